"""The sampler as one would write it to be read: one row, every step in float64, no shortcut. Slow."""

import math

import numpy as np

from engine.sampling.philox import stream_keys

MASK = 2**64 - 1


def variate(key, token_id):
    """The exponential variate of a token: SplitMix64's output token_id // 2, its low or high half, in Python integers."""
    word = (key + (token_id // 2 + 1) * 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    word ^= word >> 31
    half = (word >> 32) if token_id % 2 else (word & 0xFFFFFFFF)
    return -math.log1p(-min((half + 0.5) / 2**32, 1 - 2**-24))


def adjusted(row, params, prompt, generated, eos, allowed):
    """float64 [V]: logits after grammar, min_tokens, bias and penalties."""
    logits = row.astype(np.float64)
    if allowed is not None:
        logits = np.where(allowed, logits, -np.inf)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    if len(generated) < params.min_tokens:
        without = logits.copy()
        without[list(ends)] = -np.inf
        if not np.all(np.isneginf(without)):
            logits = without
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    for token_id in set(prompt) | set(generated):
        penalty = params.repetition_penalty
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    for token_id in set(generated):
        logits[token_id] -= params.frequency_penalty * generated.count(token_id) + params.presence_penalty
    return logits


def kept(logits, params):
    """bool [V], and the scores they are kept by: min_p, then top_k, then top_p."""
    scores = (logits - logits.max()) / params.temperature
    keep = ~np.isneginf(scores)
    if params.min_p > 0:
        probabilities = np.exp(scores)
        keep &= probabilities >= params.min_p * probabilities.max()
    if params.top_k > 0:
        order = np.sort(scores[keep])[::-1]
        if params.top_k < len(order):
            keep &= scores >= order[params.top_k - 1]
    if params.top_p < 1:
        probabilities = np.where(keep, np.exp(scores), 0.0)
        probabilities /= probabilities.sum()
        reached = 0.0
        for value in sorted(set(scores[keep]), reverse=True):
            if reached >= params.top_p:
                keep &= scores > value
                break
            for probability in probabilities[keep & (scores == value)]:  # equal ones stay or go together
                reached += probability
    return keep, scores


def probabilities(logits, params):
    """float64 [V]: what sampling should give."""
    keep, scores = kept(logits, params)
    weights = np.where(keep, np.exp(scores), 0.0)
    return weights / weights.sum()


def sample(row, params, prompt, generated, *, seed, choice, eos=(), allowed=None):
    """The token of one row."""
    logits = adjusted(row, params, prompt, generated, eos, allowed)
    if params.temperature < 1e-5:
        return int(np.argmax(logits))
    keep, scores = kept(logits, params)
    key = int(stream_keys([seed & MASK], [choice], [len(prompt) + len(generated)])[0])
    race = [(scores[t] - math.log(variate(key, t)), t) for t in np.flatnonzero(keep).tolist()]
    return max(race)[1]
