"""The roofline's formula on numbers worked out by hand, and the plan of steps against the engine's own."""

import itertools

import pytest

from engine.bench.machine import Machine, Read
from engine.bench.roofline import Need, Precision, Step, _seen, decode_steps, need_of, roofline, steps_of
from engine.bench.works import Work, standard_works
from engine.kernels.interface import AttentionSpec
from engine.models.spec import ModelSpec, RopeSpec

# Two layers, hidden 8, two heads of 4 on one KV head, MLP 16, vocabulary 32.
# A layer: q 8*8, k and v 8*4 each, out 8*8, gate, up and down 8*16 each = 64 + 64 + 64 + 384 = 576 parameters; two: 1152.
# The head: 32 * 8 = 256.
LAYERS, HEAD = 1152, 256


def spec(window=None):
    attention = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5, window=window)
    return ModelSpec(
        architecture="tiny",
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention=(attention, attention),
        rope=RopeSpec("default", 1e4, 4, 128, 128),
        eos_token_ids=(0,),
    )


BFLOAT16 = Precision.of("bfloat16")


def test_a_decode_step_reads_weights_and_kv_once():
    # KV of a token in a layer: 2 * 1 head * 4 * 2 bytes = 16; contexts of 10 and 20 in two layers: 30 * 16 * 2 = 960.
    # Attention: 4 * 2 heads * 4 = 32 a pair of tokens; 30 pairs, two layers: 1920.
    need = need_of(Step(new=(1, 1), contexts=(10, 20), rows=2), spec(), BFLOAT16)
    assert need == Need(bytes=2 * (LAYERS + HEAD) + 960, linear=2 * 2 * (LAYERS + HEAD), attention=1920)


def test_a_chunk_within_a_prompt_needs_no_head_and_sees_what_precedes_it():
    # New tokens 4, 5 and 6 of the context see 4, 5 and 6 tokens: 15 pairs.
    need = need_of(Step(new=(3,), contexts=(6,), rows=0), spec(), BFLOAT16)
    assert need == Need(bytes=2 * LAYERS + 6 * 16 * 2, linear=2 * 3 * LAYERS, attention=15 * 32 * 2)


def test_a_window_bounds_kv_and_attention():
    # Window 4, context 10, three new: they see 4 each, and the first begins 3 before itself: 6 tokens are read.
    need = need_of(Step(new=(3,), contexts=(10,), rows=1), spec(window=4), BFLOAT16)
    assert need.attention == 3 * 4 * 32 * 2
    assert need.bytes == 2 * (LAYERS + HEAD) + 6 * 16 * 2


@pytest.mark.parametrize(("new", "context", "window"), itertools.product((1, 2, 5, 9), (9, 12), (None, 1, 3, 9, 20)))
def test_pairs_of_tokens_are_counted_as_one_by_one(new, context, window):
    one_by_one = sum(min(position, window or context) for position in range(context - new + 1, context + 1))
    assert _seen(new, context, window) == one_by_one


@pytest.mark.parametrize(
    ("quantization", "layer_bits", "head_bits"),
    [("none", 16, 16), ("int8", 8, 8), ("int4", 5, 8)],
    ids=["none", "int8", "int4"],
)
def test_quantised_weights_are_read_as_what_they_take(quantization, layer_bits, head_bits):
    need = need_of(Step((1,), (1,), 1), spec(), Precision.of("bfloat16", quantization))
    assert need.bytes == (LAYERS * layer_bits + HEAD * head_bits) / 8 + 16 * 2


def test_gguf_weights_are_as_large_as_their_file_and_int8_kv_has_scales():
    need = need_of(Step((1,), (7,), 1), spec(), Precision.of("bfloat16", "gguf", "int8", weight_bytes=1000))
    assert need.bytes == pytest.approx(1000 + 7 * 2 * (4 + 4) * 2)


def machine(bandwidth=1000.0, **rates):
    return Machine(2, (Read(1, int(bandwidth), 1.0),), rates or {"float32": 1e6, "bfloat16": 1e3, "float16": 2e6}, "test")


def test_each_step_takes_the_larger_of_reading_and_computing():
    decode = Step((1,), (10,), 1)  # 2816 + 320 bytes = 3.136 s; 2816 + 640 operations at 2e6 = 1.7 ms
    prefill = Step((100,), (100,), 1)  # 2816 + 3200 bytes = 6.016 s
    least = roofline([decode, prefill], spec(), BFLOAT16, machine())
    assert least.seconds == pytest.approx(3.136 + 6.016)
    assert (least.memory_share, least.instruction) == (1.0, "float16")
    slow = machine(1e9, float32=100.0)
    least = roofline([decode, prefill], spec(), BFLOAT16, slow)
    pairs = 100 * 101 // 2
    linear = 2 * (LAYERS + HEAD) + 2 * (100 * LAYERS + HEAD)
    assert least.seconds == pytest.approx((linear + 64 * (10 + pairs)) / 100)
    assert (least.memory_share, least.instruction) == (0.0, "float32")


def test_the_best_instruction_of_a_format_is_taken_and_attention_keeps_to_floats():
    rates = {"float32": 10.0, "bfloat16": 20.0, "float16": 40.0, "int8": 80.0}
    step = Step((4,), (4,), 0)
    linear, attention = 2 * 4 * LAYERS, 10 * 32 * 2
    for precision, rate, attention_rate in (
        (Precision.of("float32"), 10, 10),
        (Precision.of("bfloat16"), 40, 40),
        (Precision.of("bfloat16", "int8"), 80, 40),
        (Precision.of("bfloat16", "int8", "float32"), 80, 10),
    ):
        least = roofline([step], spec(), precision, machine(1e12, **rates))
        assert least.seconds == pytest.approx(linear / rate + attention / attention_rate)


def test_a_model_that_fits_into_a_cache_is_measured_against_the_cache():
    reads = (Read(100, 900, 1.0), Read(1000, 300, 1.0), Read(5000, 100, 1.0))
    measured = Machine(1, reads, {"float32": 1.0}, "test")
    assert [measured.bandwidth(size) for size in (10, 100, 999, 1000, 9999)] == [900, 900, 900, 300, 100]
    assert measured.memory_bandwidth == 100


def test_a_prompt_goes_in_chunks_beside_those_who_decode():
    steps = steps_of([(2, 3), (7, 1)], budget=4)
    assert steps == [
        Step(new=(2, 2), contexts=(2, 2), rows=1),
        Step(new=(1, 3), contexts=(3, 5), rows=1),
        Step(new=(1, 2), contexts=(4, 7), rows=2),
    ]
    assert decode_steps(2, 5, 2) == [Step((1, 1), (5, 5), 2), Step((1, 1), (6, 6), 2)]


def test_what_a_work_counts():
    assert Work("p", "prefill", ((10, 1), (20, 1))).tokens == 30
    assert Work("d", "decode", ((10, 0),) * 4, steps=8).tokens == 32
    assert Work("r", "run", ((16, 64),) * 2).tokens == 128  # what is generated
    assert Work("m", "run", ((16, 8), (100, 1))).tokens == 125  # both: the prompts are most of it
    assert [work.name for work in standard_works(8192)] == [
        "prefill 512",
        "prefill 4000",
        *(f"decode {batch} x {context}" for context in (16, 4000) for batch in (1, 4, 16)),
        "16 sequences x 64",
        "mixed: 4 decoding, prefill 4000",
    ]
    second = Work("d", "decode", ((10, 0),), steps=3).plan(64, turn=1)
    assert [step.contexts for step in second] == [(14,), (15,), (16,)]
