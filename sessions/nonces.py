"""Values that a client puts at the top of every prompt and changes with every request, and that mean nothing to a model.

They would make each turn's prompt new from its first words on. Known ones are left out of the prompt.
"""

from __future__ import annotations

import re

_BILLING = "x-anthropic-billing-header:"
# A block of its own in the system prompt, `x-anthropic-billing-header: cc_version=...; cc_entrypoint=...; cch=...;`, or,
# where a translator has joined the blocks, a line.
_LINE = re.compile(r"(?:\A|(?<=\n))[ \t]*x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.IGNORECASE)


def without_nonces(system: str) -> str:
    """A system prompt without the known nonces; the very same object where there are none."""
    if _BILLING not in system and _BILLING not in system[:4096].lower():
        return system
    return _LINE.sub("", system)
