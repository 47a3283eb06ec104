"""What is said of guesses adds up, in our names and in vLLM's."""

import hypothesis.strategies as st
import msgspec
from hypothesis import given
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.server.draft_metrics import draft_families
from engine.server.vllm.metrics import speculation_families
from engine.speculation.drafts import Draft
from engine.speculation.tally import Tally
from gateway.workers.protocol import WorkerStats


def samples(families):
    class Collector:
        def collect(self):
            return families

    registry = CollectorRegistry()
    registry.register(Collector())
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found[sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "model_name")] = sample.value
    return found


def stats_of(tally):
    required = [field.name for field in msgspec.structs.fields(WorkerStats) if field.required and field.type is int]
    numbers = dict.fromkeys(required, 0)
    return WorkerStats(instance="i", **numbers, drafts=tally.whole(), drafters=tally.each())


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 5), st.sampled_from(["ngram", "model"]), st.floats(0, 1)).filter(
            lambda one: one[0] + one[1] > 0
        ),
        min_size=1,
        max_size=30,
    )
)
def test_counts_add_up(verified):
    tally, lengths = Tally(), []
    expected = {}
    for forced, guessed, by, share in verified:
        accepted = round(share * (forced + guessed))
        tally.verified(Draft(tuple(range(forced + guessed)), forced, by), accepted)
        lengths.append(accepted)
        for name, drafted, true in (("grammar", forced, min(accepted, forced)), (by, guessed, max(accepted - forced, 0))):
            if drafted:
                before = expected.get(name, (0, 0, 0))
                expected[name] = (before[0] + 1, before[1] + drafted, before[2] + true)
    stats = stats_of(tally)
    assert {
        one.name: (one.drafts_total, one.drafted_tokens_total, one.accepted_tokens_total) for one in stats.drafters
    } == expected
    assert tally.drafted == sum(forced + guessed for forced, guessed, _, _ in verified)
    assert tally.accepted == sum(lengths)
    found = samples(draft_families(stats))
    longest = max(forced + guessed for forced, guessed, _, _ in verified)
    for at_most in range(longest):
        bucket = found["turnkeep_engine_accepted_draft_length_bucket", f"{at_most}.0"]
        assert bucket == sum(length <= at_most for length in lengths)
    assert found["turnkeep_engine_accepted_draft_length_count",] == len(lengths)
    assert found["turnkeep_engine_accepted_draft_length_sum",] == sum(lengths)
    for name, (drafts, drafted, accepted) in expected.items():
        assert found["turnkeep_engine_drafter_drafts_total", name] == drafts
        assert found["turnkeep_engine_drafter_drafted_tokens_total", name] == drafted
        assert found["turnkeep_engine_drafter_accepted_tokens_total", name] == accepted
    theirs = samples(speculation_families(stats, ("m", "0")))
    assert theirs["vllm:spec_decode_num_drafts_total", "0"] == len(lengths)
    assert theirs["vllm:spec_decode_num_draft_tokens_total", "0"] == tally.drafted
    assert theirs["vllm:spec_decode_num_accepted_tokens_total", "0"] == sum(lengths)
    for position in range(longest):
        reached = theirs["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0", str(position)]
        assert reached == sum(length > position for length in lengths)


def test_before_the_first_guess_there_is_nothing_to_tell():
    stats = stats_of(Tally())
    assert samples(draft_families(stats)) == {}
    assert samples(speculation_families(stats, ("m", "0")))["vllm:spec_decode_num_drafts_total", "0"] == 0
