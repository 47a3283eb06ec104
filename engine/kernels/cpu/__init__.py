"""The CPU kernel: C++ built on this machine for this machine. Where it cannot be built, the reference kernel serves."""
