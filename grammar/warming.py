"""Compiling before anybody asks: what the strings of all tools share, and the tool lists that were used before."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from grammar.compiler import GrammarCompiler
from grammar.counted import EXACT_LENGTH
from grammar.probe import ProbeLost
from grammar.tools import GrammarRefused
from grammar.urgency import step_back

log = logging.getLogger(__name__)

_NICE = 10
_COUNTED: dict[str, Any] = {"type": "string", "maxLength": EXACT_LENGTH}
"""Its masks are those of all shorter ones (see grammar.counted); they take most of a second."""
SHARED = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": _COUNTED}})


def warm_up(compiler: GrammarCompiler, sources: Sequence[str]) -> threading.Thread:
    """Compiles the sources in order and what strings share, and starts the process that tries what is not cheap, on a thread of
    its own that is less urgent than all else this process does. It ends early when the compiler is closed."""
    thread = threading.Thread(target=_warm_up, args=(compiler, sources), name="grammar-warm-up")
    thread.start()
    return thread


def _warm_up(compiler: GrammarCompiler, sources: Sequence[str]) -> None:
    begun = time.perf_counter()
    step_back(_NICE)
    compiled = 0
    for source in [*sources, SHARED]:
        if compiler.closed:
            return
        try:
            compiler.compile(source)
            compiled += 1
        except GrammarRefused as refused:  # another version may have kept it
            log.info("a list of tools from before cannot be compiled any more: %s", refused.message)
    with contextlib.suppress(ProbeLost):
        compiler.start_probe()
    log.info("%d grammars of before are compiled again, in %.1f s", compiled - 1, time.perf_counter() - begun)
