"""What the engine reaches on this machine, beside what the machine can and what other engines reach."""
