"""What two replays of one trace mean, in sentences computed from their figures."""

from __future__ import annotations

from traces.report import Run


def verdict(base: Run, other: Run) -> str:
    """Compares cached shares and times of `other` with those of `base`. Says so where a figure is missing or worse."""
    return " ".join(sentence for sentence in (_cached(base, other), _times(base, other)) if sentence)


def _cached(base: Run, other: Run) -> str:
    before, after = base.result.cached_share, other.result.cached_share
    if before is None or after is None:
        return "How much came from a cache is not known: not every answer said so."
    share = other.share_of_unlimited
    of_bound = f" ({share:.1%} of what one unlimited cache would give)" if share is not None else ""
    sentence = f"With {other.name} routing {after:.1%} of the prompt tokens were cached{of_bound}, "
    sentence += f"with {base.name} {before:.1%}"
    if not (base.result.failed or other.result.failed):
        computed = [run.result.prompt_tokens - run.result.cached_tokens for run in (other, base)]
        sentence += f": {computed[0]:,} tokens had to be computed instead of {computed[1]:,}"
    return sentence + "."


def _times(base: Run, other: Run) -> str:
    parts = []
    for name, q in (("median", 50.0), ("90th percentile", 90.0)):
        before, after = base.result.ttft.percentile(q), other.result.ttft.percentile(q)
        if before > 0 and after > 0:
            parts.append(f"its {name} first token came after {_seconds(after)} instead of {_seconds(before)}")
    if base.result.duration > 0 and other.result.duration > 0:
        parts.append(f"the whole replay took {other.result.duration:.0f} s instead of {base.result.duration:.0f} s")
    if not parts:
        return ""
    text = ", and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
    return text[0].upper() + text[1:] + "."


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
