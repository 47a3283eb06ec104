"""How large a grammar may be. Everything above a cap is refused before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Caps on what a caller may send and bounds on what compiling may cost.

    XGrammar 0.2.9 cannot be interrupted while it compiles, and its time grows faster than linearly with nesting depth and
    counted repetition; the defaults keep whatever passes in the range of milliseconds to a few hundred milliseconds.
    """

    max_tools: int = 512
    max_tool_name_length: int = 64
    max_schema_depth: int = 64
    max_schema_bytes: int = 1_048_576
    max_schema_nodes: int = 20_000
    max_enum_values: int = 10_000
    max_repetition: int = 1_000
    max_source_bytes: int = 8_388_608

    cheap_source_bytes: int = 262_144
    """Sources up to this size (and below the other `cheap_` bounds) compile in process without a probe."""
    cheap_repetition: int = 256
    cheap_depth: int = 16
    compile_deadline_seconds: float = 1.0
    cache_entries: int = 256
    cache_bytes: int = 512 * 1_048_576


DEFAULT_LIMITS = GrammarLimits()
