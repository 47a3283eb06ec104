"""The text that formats are measured on.

texts/mixed.txt: prose from the Jargon File, version 4.4.7, 29 Dec 2003 (in the public domain; "How Jargon Works", "Some AI
Koans", "OS and JEDGAR"; lines of a paragraph joined), then this project's docs/worker-protocol.md as it once was. It is never
edited: figures of different versions would not compare.
"""

from __future__ import annotations

from pathlib import Path

_DIRECTORY = Path(__file__).parent / "texts"


def bundled_text() -> str:
    """About 25,000 characters."""
    return (_DIRECTORY / "mixed.txt").read_text(encoding="utf-8")
