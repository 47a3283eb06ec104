"""Strings with a length limit, in XGrammar's EBNF: every character counts once, spelled out or escaped, and masks stay fast.

XGrammar 0.2.9 writes them as a counted repetition of any character but a quote, a backslash and a line end: control characters
come out raw, which is no JSON, and escapes not at all. A counted repetition that holds escapes takes up to 0.2 s for every
mask. So short ones become a chain of rules, one for every number of characters left; all strings of all grammars share it, so
that its masks are made once. Longer ones stay repetitions, without what needs an escape.
"""

from __future__ import annotations

import re

EXACT_LENGTH = 128
"""Up to this many characters are counted by the chain."""
PLAIN_AS_WRITTEN = r"""[^\"\\\r\n]"""
_PLAIN = r"""[^\0-\x1f\"\\]"""
_QUOTE = r'''"\""'''
_ESCAPED = r""""\\" basic_escape"""
_COUNTED = re.compile(r'^(\S+) ::= \(\("\\"" \1_characters\{(\d+), (-?\d+)\} "\\""\)\)$', re.MULTILINE)
_ONE = f"(({_QUOTE} {_PLAIN} {_QUOTE}))"
_AT_MOST_ONE = f'("" | ({_PLAIN}))'


def count_characters(ebnf: str) -> str:
    """The grammar with its counted strings rewritten. Needs XGrammar's rules basic_string_sub and basic_escape."""
    ebnf = ebnf.replace(PLAIN_AS_WRITTEN, _PLAIN)
    ebnf = ebnf.replace(_ONE, f"(({_QUOTE} {_PLAIN} {_QUOTE}) | ({_QUOTE} {_ESCAPED} {_QUOTE}))")
    ebnf = ebnf.replace(_AT_MOST_ONE, f'("" | ({_PLAIN}) | ({_ESCAPED}))')
    chain: dict[str, str] = {}

    def rewritten(match: re.Match[str]) -> str:
        name, least, most = match[1], int(match[2]), int(match[3])
        if max(least, most) <= EXACT_LENGTH:
            return f"{name} ::= (({_QUOTE} {_link(least, most, chain)}))"
        if most < 0:
            return f"{name} ::= (({_QUOTE} {name}_characters{{{least}, {least}}} basic_string_sub))"
        return match[0]

    ebnf = _COUNTED.sub(rewritten, ebnf)
    return ebnf + "".join(f"{name} ::= {rule}\n" for name, rule in chain.items())


def _link(least: int, most: int, chain: dict[str, str]) -> str:
    """The rule for the rest of a string of `least` to `most` characters (-1: any number), with its closing quote."""
    first = _name(least, most)
    while (name := _name(least, most)) not in chain and (least or most >= 0):
        after = max(least - 1, 0), most - (most > 0)
        choices = [] if least else [f"({_QUOTE})"]
        if most:
            choices += [f"({_PLAIN} {_name(*after)})", f"({_ESCAPED} {_name(*after)})"]
        chain[name] = f"({' | '.join(choices)})"
        if most == 0:
            break
        least, most = after
    return first


def _name(least: int, most: int) -> str:
    if most >= 0:
        return f"counted_{least}_{most}"
    return f"counted_{least}" if least else "basic_string_sub"
