"""Random walks through a grammar: token sequences to measure along."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from grammar.compiler import CompiledGrammar, allocate_bitmask

_LIKED = ('"', '"}', '",', '"]', "}", "}}", "]", "\n", "</", "1", "a", " ")


def random_calls(
    tokenizer_json: Path, compiled: CompiledGrammar, vocab_size: int, stops: Sequence[int], *, count: int, most: int = 400
) -> list[list[int]]:
    """`count` sequences that the grammar allows, of at most `most` tokens, with a liking for what brings a call to its end."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    liked = {token for text in _LIKED for token in tokenizer.encode(text, add_special_tokens=False).ids}
    mask = allocate_bitmask(1, vocab_size)
    walks = []
    for seed in range(count):
        random = Random(seed)
        matcher = compiled.matcher()
        ids: list[int] = []
        while len(ids) < most and not matcher.is_terminated():
            matcher.fill_bitmask(mask, 0)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:vocab_size]
            allowed = np.nonzero(bits)[0]
            some = [token for token in liked if bits[token]]
            ends = [token for token in stops if bits[token]]
            hurry = random.random() < 0.2 + len(ids) / most
            wanted = (ends or some) if hurry else []
            token = random.choice(wanted) if wanted else int(random.choice(allowed))
            matcher.accept(token)
            ids.append(token)
        walks.append(ids)
    return walks
