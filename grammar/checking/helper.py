"""The process of `grammar.checking.checker`: reads Work from stdin, writes a Result for each to stdout, until stdin closes."""

from __future__ import annotations

import os
import resource
import signal

import msgspec

from grammar.checking.checker import Result, Work
from grammar.checking.validate import NotCheckable, violations
from grammar.probe import read_message, write_message

_MEMORY = 2 << 30


def answer(work: Work) -> Result:
    """Checks one."""
    try:
        found = violations(msgspec.json.decode(work.schema), work.text)
    except ValueError:
        return Result("invalid", ("the text is no JSON",))
    except (NotCheckable, RecursionError, MemoryError) as error:
        return Result("unknown", (str(error) or type(error).__name__,))
    return Result("invalid", tuple(found)) if found else Result("valid")


def main() -> None:
    """Nothing but results goes to stdout."""
    stdin, stdout = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair; stdin closes when it is gone
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    while (body := read_message(stdin)) is not None:
        write_message(stdout, answer(msgspec.msgpack.decode(body, type=Work)))


if __name__ == "__main__":
    main()
