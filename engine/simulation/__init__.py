"""The parts of a replica without a model: its costs, its clock, its tokens and its scheduler."""
