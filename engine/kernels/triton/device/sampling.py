"""Choosing tokens: engine/sampling/choose_device.py says what is computed, philox.py the numbers; this gives the same tokens.

A row is cut into chunks of BLOCK tokens, a program each; what a chunk found is reduced by who needs it next. Where tokens are
cut off (top_k, top_p), one program for a row bisects the least score that is kept: nothing is sorted. Scores are compared as
integers that order as they do. Probabilities are summed as integers too, in units of 2^-UNIT_BITS of the most likely one, so
that no order of summation changes which token is the last.

To be compiled without fused multiply-adds: scores are rounded as the other implementations round them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling import philox

GAMMA = tl.constexpr(philox.GAMMA)
MULTIPLIER_0 = tl.constexpr(philox.MIX_MULTIPLIERS[0])
MULTIPLIER_1 = tl.constexpr(philox.MIX_MULTIPLIERS[1])
SHIFT_0 = tl.constexpr(philox.MIX_SHIFTS[0])
SHIFT_1 = tl.constexpr(philox.MIX_SHIFTS[1])
SHIFT_2 = tl.constexpr(philox.MIX_SHIFTS[2])
LARGEST_UNIFORM = tl.constexpr(philox.LARGEST_UNIFORM)
LEAST_KEY = tl.constexpr(-(2**31))
LEAST_LONG = tl.constexpr(-(2**63))


@triton.jit
def allowed_logits(logits, bitmask, row, tokens, vocab, stride, mask_stride, MASKED: tl.constexpr):
    """Those of one row at `tokens`; -inf beyond the vocabulary and where the bitmask has no bit."""
    here = tokens < vocab
    if MASKED:
        words = tl.load(bitmask + row * mask_stride + tokens // 32, mask=here, other=0)
        here = here & (((words >> (tokens % 32)) & 1) != 0)
    return tl.load(logits + row * stride + tokens, mask=here, other=float("-inf"))


@triton.jit
def numbers(values):
    """NaN becomes -inf: what a reduction makes of NaN depends on the device."""
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def maximum_or_nan(values):
    """The largest; NaN where there is any."""
    broken = tl.max((values != values).to(tl.int32), 0) > 0
    return tl.where(broken, float("nan"), tl.max(numbers(values), 0))


@triton.jit
def scores_of(values, largest, temperature):
    """The logits below the largest, over the temperature. Rows that are broken, or have nothing allowed, get -inf."""
    return numbers(tl.div_rn(values - largest, temperature))


@triton.jit
def maximum_of(found, row, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """What all chunks of a row found together."""
    chunks = tl.arange(0, CHUNKS_PADDED)
    return maximum_or_nan(tl.load(found + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=float("-inf")))


@triton.jit
def ordered(values):
    """float32 as int32 that order alike. -0 counts as 0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def log_exponential(key, tokens):
    """The logarithm of an exponential variate for each token: SplitMix64 from the row's stream key."""
    word = key + ((tokens // 2 + 1).to(tl.uint64)) * GAMMA
    word = (word ^ (word >> SHIFT_0)) * MULTIPLIER_0
    word = (word ^ (word >> SHIFT_1)) * MULTIPLIER_1
    word = word ^ (word >> SHIFT_2)
    half = tl.where(tokens % 2 == 1, word >> 32, word & 0xFFFFFFFF)
    uniform = tl.minimum((half.to(tl.uint32).to(tl.float32) + 0.5) * 2.0**-32, LARGEST_UNIFORM)
    # log1p(-u): the rounding of 1 - u is taken out again (Kahan; HP-15C Advanced Functions Handbook, 1982).
    rest = 1.0 - uniform
    rounded = rest - 1.0
    exact = rounded == 0.0
    variate = tl.where(exact, uniform, tl.log(rest) * tl.div_rn(uniform, tl.where(exact, 1.0, rounded)))
    return tl.log(variate)


@triton.jit
def maxima(
    logits,
    bitmask,
    raw,
    best,
    best_at,
    vocab,
    stride,
    mask_stride,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A program for (row, chunk): its largest logit, the largest one allowed and that one's token, the first of equals."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf"))
    tl.store(raw + row * CHUNKS + chunk, maximum_or_nan(values))
    if MASKED:
        values = allowed_logits(logits, bitmask, row, tokens, vocab, stride, mask_stride, MASKED)
    tl.store(best + row * CHUNKS + chunk, maximum_or_nan(values))
    tl.store(best_at + row * CHUNKS + chunk, chunk * BLOCK + tl.argmax(numbers(values), 0, tie_break_left=True))


@triton.jit
def above(
    logits,
    bitmask,
    row,
    vocab,
    stride,
    mask_stride,
    largest,
    temperature,
    pivot,
    BLOCK: tl.constexpr,
    UNIT_BITS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """How many tokens have a score above `pivot` (ordered), and how much probability."""
    counts = tl.zeros([BLOCK], tl.int32)
    weights = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = allowed_logits(logits, bitmask, row, tokens, vocab, stride, mask_stride, MASKED)
        scores = scores_of(values, largest, temperature)
        counted = (ordered(scores) > pivot) & (tokens < vocab)
        counts += counted.to(tl.int32)
        weights += tl.where(counted, tl.exp(scores) * 2.0**UNIT_BITS, 0.0).to(tl.int64)
    return tl.sum(counts, 0), tl.sum(weights, 0)


@triton.jit(do_not_specialize=["rows"])
def thresholds(
    logits,
    bitmask,
    best,
    integers,
    floats,
    threshold,
    rows,
    vocab,
    stride,
    mask_stride,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_BITS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A program for a row: the least score that min_p, top_k and top_p keep, as an ordered integer."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(floats + 2 * rows + row).to(tl.float32)
    kept = ordered(tl.load(floats + 4 * rows + row).to(tl.float32))
    top_k = tl.load(integers + rows + row)
    top_p = tl.load(floats + 3 * rows + row)
    largest = maximum_of(best, row, CHUNKS, CHUNKS_PADDED)
    if temperature > 0.0:
        for by_weight in tl.static_range(2):
            wanted = (top_p < 1.0) if by_weight else ((top_k > 0) & (top_k < vocab))
            if wanted:
                # Sought: the least x above which there is less than `limit`. Above `low` there is not, above `high` there is;
                # with one token between them it is found.
                low = kept - 1
                high = kept * 0
                many, total = above(
                    logits, bitmask, row, vocab, stride, mask_stride, largest, temperature, low, BLOCK, UNIT_BITS, MASKED
                )
                between = many
                beyond = many * 0
                limit = top_p * total.to(tl.float64) if by_weight else top_k.to(tl.float64)
                amount = total.to(tl.float64) if by_weight else many.to(tl.float64)
                if amount >= limit:
                    while (high - low > 1) & (between > 1):
                        pivot = low + (high - low) // 2
                        count, weight = above(
                            logits,
                            bitmask,
                            row,
                            vocab,
                            stride,
                            mask_stride,
                            largest,
                            temperature,
                            pivot,
                            BLOCK,
                            UNIT_BITS,
                            MASKED,
                        )
                        amount = weight.to(tl.float64) if by_weight else count.to(tl.float64)
                        enough = amount < limit
                        high = tl.where(enough, pivot, high)
                        beyond = tl.where(enough, count, beyond)
                        low = tl.where(enough, low, pivot)
                        many = tl.where(enough, many, count)
                        between = many - beyond
                    kept = low + 1
    tl.store(threshold + row, kept)


@triton.jit(do_not_specialize=["rows"])
def race(
    logits,
    bitmask,
    best,
    integers,
    floats,
    threshold,
    winner,
    winner_at,
    rows,
    vocab,
    stride,
    mask_stride,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    CUT: tl.constexpr,
):
    """A program for (row, chunk): the token kept whose score less the logarithm of its variate is largest."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(floats + 2 * rows + row).to(tl.float32)
    if temperature > 0.0:
        largest = maximum_of(best, row, CHUNKS, CHUNKS_PADDED)
        tokens = chunk * BLOCK + tl.arange(0, BLOCK)
        values = allowed_logits(logits, bitmask, row, tokens, vocab, stride, mask_stride, MASKED)
        scores = scores_of(values, largest, temperature)
        key = tl.load(integers + row).to(tl.uint64, bitcast=True)
        raced = scores - log_exponential(key, tokens)
        if CUT:
            raced = tl.where(ordered(scores) >= tl.load(threshold + row), raced, float("-inf"))
        tl.store(winner + row * CHUNKS + chunk, tl.max(raced, 0))
        tl.store(winner_at + row * CHUNKS + chunk, chunk * BLOCK + tl.argmax(raced, 0, tie_break_left=True))


@triton.jit(do_not_specialize=["rows"])
def finish(
    raw,
    best,
    best_at,
    winner,
    winner_at,
    floats,
    chosen,
    largest,
    raw_largest,
    rows,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    """A program for a row: the token, the largest logit that is allowed and the largest of all."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PADDED)
    at = row * CHUNKS + chunks
    here = chunks < CHUNKS
    scores = tl.load(best + at, mask=here, other=float("-inf"))
    tokens = tl.load(best_at + at, mask=here, other=0)
    if tl.load(floats + 2 * rows + row) > 0.0:
        scores = tl.load(winner + at, mask=here, other=float("-inf"))
        tokens = tl.load(winner_at + at, mask=here, other=0)
    first = tl.argmax(numbers(scores), 0, tie_break_left=True)
    tl.store(chosen + row, tl.sum(tl.where(chunks == first, tokens, 0), 0).to(tl.int64))
    tl.store(largest + row, maximum_of(best, row, CHUNKS, CHUNKS_PADDED))
    tl.store(raw_largest + row, maximum_of(raw, row, CHUNKS, CHUNKS_PADDED))


@triton.jit(do_not_specialize=["count"])
def most_likely(logits, sums, peaks, tops, vocab, stride, count, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """A program for (row, chunk): the largest logit, the sum of exponentials beside it, and the `count` largest logits as int64
    keys: the logit, ordered, above the complement of its token, so that of equals the first is the larger key."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf"))
    peak = tl.max(values, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + row * CHUNKS + chunk, peak)
    tl.store(sums + row * CHUNKS + chunk, tl.sum(tl.exp(values - base), 0))
    keys = (ordered(values).to(tl.int64) << 32) | (0xFFFFFFFF - tokens.to(tl.int64))
    keys = tl.where(tokens < vocab, keys, LEAST_LONG)
    for rank in range(count):
        top = tl.max(keys, 0)
        tl.store(tops + (row * CHUNKS + chunk) * count + rank, top)
        keys = tl.where(keys == top, LEAST_LONG, keys)
