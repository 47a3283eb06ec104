"""How far one observation of a text is from another, and whether that is within bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.quality.config import Bounds
from engine.quality.observe import Observation

_ROWS = 64  # of logits in float64 at a time


@dataclass(frozen=True, slots=True)
class Drift:
    """See `Bounds` for perplexity_ratio, agreement and divergence.

    logit_error: norm of the difference of the logits over the norm of the reference's. common_prefix: tokens that the greedy
    continuations have in common with the reference's before they part, mean over prompts, of `generated`. decode_divergence:
    of positions computed one at a time (0 without any).
    """

    perplexity: float
    perplexity_ratio: float
    agreement: float
    divergence: float
    decode_divergence: float
    logit_error: float
    common_prefix: float
    generated: int


def drift(observed: Observation, reference: Observation) -> Drift:
    """Of two observations of the same texts."""
    pairs = list(zip(observed.generated, reference.generated, strict=True))
    prefixes = [_common(ours, theirs) for ours, theirs in pairs]
    return Drift(
        perplexity=observed.perplexity,
        perplexity_ratio=observed.perplexity / reference.perplexity,
        agreement=float((observed.choices == reference.choices).double().mean()),
        divergence=_divergence(observed.logits, reference.logits),
        decode_divergence=_divergence(observed.decoded, reference.decoded),
        logit_error=float((observed.logits - reference.logits).double().norm() / reference.logits.double().norm()),
        common_prefix=sum(prefixes) / len(prefixes) if prefixes else 0.0,
        generated=len(pairs[0][0]) if pairs else 0,
    )


def out_of_bounds(found: Drift, bounds: Bounds) -> list[str]:
    """A sentence's worth for each bound that is not kept; none of them when the format is ready. NaN keeps no bound."""
    broken = []
    if not found.perplexity_ratio <= bounds.perplexity_ratio:
        broken.append(f"perplexity ratio {found.perplexity_ratio:.4f} is above {bounds.perplexity_ratio}")
    if not found.agreement >= bounds.agreement:
        broken.append(f"agreement {found.agreement:.2%} is below {bounds.agreement:.0%}")
    if not found.divergence <= bounds.divergence:
        broken.append(f"divergence {found.divergence:.4f} is above {bounds.divergence}")
    if not found.decode_divergence <= bounds.divergence:
        broken.append(f"divergence in decode {found.decode_divergence:.4f} is above {bounds.divergence}")
    return broken


def _common(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    return next((index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def _divergence(observed: torch.Tensor, reference: torch.Tensor) -> float:
    if reference.shape[0] == 0:
        return 0.0
    total = 0.0
    for start in range(0, reference.shape[0], _ROWS):
        wanted = reference[start : start + _ROWS].double().log_softmax(-1)
        found = observed[start : start + _ROWS].double().log_softmax(-1)
        total += float((wanted.exp() * (wanted - found)).sum())
    return total / reference.shape[0]
