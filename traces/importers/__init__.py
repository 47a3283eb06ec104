"""Public traces of agent traffic, as sessions of requests that know the blocks of their prompts."""
