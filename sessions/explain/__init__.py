"""Why a turn reused less than its predecessor left: which message, which byte, what kind of change.

texts.py         where two texts part, and excerpts of both sides
volatile.py      whether a change is of the kind that comes with every request: a time, an identifier, a counter
conversation.py  what is compared: messages, tools and settings of two turns
causes.py        the first difference of two conversations, and its class
misses.py        what is remembered of misses, and the advice that follows from those that repeat
"""
