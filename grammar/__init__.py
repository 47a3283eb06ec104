"""Tools and JSON Schema to structural tags, and generated tokens back to text, reasoning and tool calls.

Only `grammar.compiler` imports xgrammar (which imports torch); the rest is light enough for the gateway. It imports
no other room.
"""
