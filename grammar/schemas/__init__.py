"""The parts of `grammar.schema`: references, merging, keywords, the walk, and what the result would cost to compile."""
