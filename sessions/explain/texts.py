"""Where two texts part."""

from __future__ import annotations

BEFORE, AFTER = 40, 80
"""Characters of an excerpt before and behind the place where the texts part."""


def common_prefix(one: str, other: str) -> int:
    """Characters that two texts share from the beginning. Compares memory, not characters: quick for long texts."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    # Doubling first: most texts part early or are long.
    step = 64
    while low + step < high and one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(one: str, other: str, prefix: int) -> int:
    """Characters shared from the end, those of the shared prefix left out."""
    low, high = 0, min(len(one), len(other)) - prefix
    while low < high:
        middle = (low + high + 1) // 2
        if one[len(one) - middle :] == other[len(other) - middle :]:
            low = middle
        else:
            high = middle - 1
    return low


def excerpt(text: str, at: int) -> str:
    """A short piece of `text` around character `at`, on one line."""
    start, end = max(0, at - BEFORE), min(len(text), at + AFTER)
    piece = text[start:end].encode("unicode_escape").decode("ascii") if not text[start:end].isprintable() else text[start:end]
    return ("…" if start else "") + piece + ("…" if end < len(text) else "")
