"""What is learned from turns as they pass: why one missed, and how long its session is away.

config.py     settings of both
misses.py     turns that reused less than their predecessors left
gaps.py       tool gaps, and hints to the workers when a session will be back
watch.py      both, as the pipeline tells of a turn
"""
