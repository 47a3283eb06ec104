"""Reading tool calls out of a stream of text: the text around them, and the ways one call can be written."""
