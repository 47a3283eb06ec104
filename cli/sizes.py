"""Values of options that are more than a word or a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import click

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class MemorySize(click.ParamType[int | float]):
    """Bytes with a unit (8GiB, 500MB), or a share of what is available (0.5, 50%): an int or a float. `zero`: 0 is one."""

    name = "size"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        if isinstance(value, (int, float)):
            return value
        matched = re.fullmatch(r"(?i)\s*(\d+(?:\.\d+)?)\s*(?:(%)|([kmgt]i?)?b?)\s*", str(value))
        if matched is None:
            self.fail(f"{value!r} is no size; write bytes with a unit (8GiB, 500MB) or a share (0.5, 50%).", param, ctx)
        number, percent, unit = float(matched[1]), matched[2], (matched[3] or "").lower()
        if self._zero and not number:
            return 0
        if percent or (not unit and number <= 1):
            share = number / 100 if percent else number
            if not 0 < share <= 1:
                self.fail(f"{value!r}: a share lies above 0 and at most at 1.", param, ctx)
            return share
        return int(number * _UNITS[unit])


class BatchSizes(click.ParamType[tuple[int, ...]]):
    """Ascending numbers with commas between them, or `none`."""

    name = "sizes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [] if str(value).strip() == "none" else str(value).split(",")
        if not all(part.strip().isdecimal() for part in parts):
            self.fail(f"{value!r} are no batch sizes; write them with commas between (1,2,4,8), or none.", param, ctx)
        return tuple(int(part) for part in parts)


class OTLPAddress(click.ParamType[str]):
    """The URL of an OTLP/HTTP collector."""

    name = "url"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            self.fail(f"{text!r} is no URL of a collector; write one like http://127.0.0.1:4318.", param, ctx)
        return text


def fields_given(options: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Of the options that were given, by the names of fields that they fill."""
    return {field: options[option] for field, option in names.items() if options[option] is not None}
