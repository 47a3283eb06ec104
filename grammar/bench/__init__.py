"""What `turnkeep bench grammar` measures: which keywords are enforced, and what masks and compiling cost."""
