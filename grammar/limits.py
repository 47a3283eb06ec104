"""How large a grammar may be, and what compiling one may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Caps on what a caller may send, and bounds on what compiling may cost.

    XGrammar 0.2.9 cannot be interrupted while it compiles, and its time grows much faster than the schema with nesting
    depth, counted repetition in patterns and optional properties. What is over a cap is refused before anything is
    compiled; what is under the caps and estimated above `cheap_milliseconds` is tried in a process that can be killed.
    """

    max_tools: int = 512
    max_tool_name_length: int = 128
    max_schema_bytes: int = 1 << 20
    max_schema_depth: int = 64
    max_schema_nodes: int = 20_000
    max_properties: int = 1_000
    max_open_prefixes: int = 64
    """Above so many distinct prefixes of its described names, an object that allows further ones is closed: telling names
    apart costs XGrammar about 15 ms for each."""
    max_enum_values: int = 10_000
    max_pattern_length: int = 4_096
    max_pattern_size: int = 1_000
    """Steps of one pattern with its counted repetitions written out (see grammar.pattern)."""
    max_counted_length: int = 1_024
    """A larger maxLength is not enforced: counting so many characters would leave no room for line ends and quotes."""
    max_count: int = 2_147_483_647
    """minLength, minItems and the like; XGrammar's own bound."""

    max_compile_milliseconds: float = 30_000.0
    """Estimated compile time (grammar.schemas.cost) above which a schema is refused without trying."""

    max_source_bytes: int = 8 << 20
    cheap_milliseconds: float = 3_000.0
    cheap_schema_milliseconds: float = 1_000.0
    """Estimated compile time, of a source and of one schema in it, up to which it is compiled in process without a probe."""
    probe_processor_seconds: float = 0.5
    """What one trial may compute, so that bad input is answered within a second."""
    probe_steps: int = 32
    max_mask_milliseconds: float = 5.0
    """A trial goes so many tokens along a grammar; one whose masks take longer in the mean would hold up the tokens of all
    other requests of its batch."""
    probe_deadline_seconds: float = 5.0
    """How long one trial may take on a machine that has other things to do."""
    probe_memory_bytes: int = 4 << 30
    max_probes: int = 2
    """Probes that run at the same time; others wait for their turn."""
    cache_entries: int = 256
    cache_bytes: int = 512 << 20
    compile_threads: int = 2


DEFAULT_LIMITS = GrammarLimits()
