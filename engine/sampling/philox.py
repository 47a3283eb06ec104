"""Counter-based random numbers: a pure function of (seed, choice, position), and from there of the token id.

One Philox 4x32-10 block (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) per sampled
token gives its *stream key*; SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014) started at that key gives a number to each token of the vocabulary: its output j serves the tokens 2j (low half) and
2j + 1 (high half). Nothing is drawn in sequence, so no batch, chunk, preemption or worker can shift what a token gets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

GAMMA = 0x9E3779B97F4A7C15
MIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX_SHIFTS = (30, 27, 31)

LARGEST_UNIFORM = 1.0 - 2.0**-24
"""The largest float32 below 1; numbers between 0 and 1 are kept at or below it."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox 4x32-10. counter: [4, N], key: [2, N], both 32-bit words held in uint64. Returns the words [4, N]."""
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(ROUNDS):
        product0, product1 = word0 * MULTIPLIERS[0], word2 * MULTIPLIERS[1]
        word0, word1 = (product1 >> _HALF) ^ word1 ^ key0, product1 & _LOW
        word2, word3 = (product0 >> _HALF) ^ word3 ^ key1, product0 & _LOW
        key0, key1 = (key0 + np.uint64(WEYL[0])) & _LOW, (key1 + np.uint64(WEYL[1])) & _LOW
    return np.stack([word0, word1, word2, word3])


def stream_keys(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """One uint64 per row, [R]. seeds: unsigned 64 bits; choices: 32 bits; positions: 64 bits."""
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    choice = np.asarray(choices, dtype=np.uint64)
    counter = np.stack([position & _LOW, position >> _HALF, choice, np.zeros_like(choice)])
    words = philox4x32(counter, np.stack([seed & _LOW, seed >> _HALF]))
    keys: npt.NDArray[np.uint64] = words[0] | (words[1] << _HALF)
    return keys
