"""Changes of the kind that comes with every request: a time, a random identifier, a counter."""

from __future__ import annotations

import re
from typing import Literal

from sessions.explain.texts import common_prefix, common_suffix

Kind = Literal["timestamp", "uuid", "counter"]

_MAX_CHANGED = 16_384
_AROUND = 48

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)"
_NTH = r"\d{1,2}(?:st|nd|rd|th)?\b"
_CLOCK = r"\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?"
_ZONE = r"(?:\s*(?:Z|UTC|GMT|[+-]\d\d:?\d\d)\b)?"
_TIMESTAMP = re.compile(
    "|".join(
        (
            rf"\d{{4}}-\d\d-\d\d(?:[T ]{_CLOCK}{_ZONE})?",  # 2026-11-30T12:00:00Z
            r"\b(?:\d{4}[/.]\d\d?[/.]\d\d?|\d\d?[/.]\d\d?[/.]\d\d(?:\d\d)?)\b",  # 30.11.2026, 11/30/26
            rf"\b(?:{_DAY}(?:day)?\b,?\s+)?(?:{_NTH}\s+{_MONTH}|{_MONTH}\s+{_NTH}),?(?:\s+\d{{4}}\b)?",  # Mon, 30 Nov 2026
            rf"\b{_DAY}day\b",
            rf"\b{_CLOCK}{_ZONE}\s*(?:[ap]\.?m\b\.?)?",  # 12:30:01 pm
            r"\b1[5-9]\d{8}(?:\d{3}|\.\d+)?\b",  # Unix seconds, milliseconds
        )
    ),
    re.IGNORECASE,
)
_UUID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"  # UUID
    r"|\b(?=[0-9a-z_-]*\d)(?=[0-9a-z_-]*[a-z])[0-9a-z]+(?:[_-][0-9a-z]+)*\b(?<=[0-9a-z_-]{12})"  # call_8fk2..., hex digests
    r"|(?<![\w-])(?=[\w+/=-]*\d)[\w+/-]{16,}={0,2}",  # base64 and its like
    re.IGNORECASE,
)
_COUNTER = re.compile(r"\d+(?:[.,]\d+)*")

_ORDER: tuple[tuple[Kind, re.Pattern[str]], ...] = (("timestamp", _TIMESTAMP), ("uuid", _UUID), ("counter", _COUNTER))


def volatile_kind(old: str, new: str) -> Kind | None:
    """What turned `old` into `new`, when it is volatile values alone: the kind of the first of them. None for other changes,
    and for texts that are equal."""
    prefix = common_prefix(old, new)
    suffix = common_suffix(old, new, prefix)
    if max(len(old), len(new)) - prefix - suffix > _MAX_CHANGED or old == new:
        return None
    # With what stands around it: a change may begin within a value.
    start, end = max(0, prefix - _AROUND), max(0, suffix - _AROUND)
    one, other = old[start : len(old) - end], new[start : len(new) - end]
    if _masked(one) != _masked(other):
        return None
    at = prefix - start
    return next((kind for kind, pattern in _ORDER if _covers(pattern, one, at) or _covers(pattern, other, at)), "counter")


def _masked(text: str) -> str:
    for _, pattern in _ORDER:
        text = pattern.sub("\0", text)
    return text


def _covers(pattern: re.Pattern[str], text: str, at: int) -> bool:
    return any(match.start() <= at <= match.end() for match in pattern.finditer(text))
