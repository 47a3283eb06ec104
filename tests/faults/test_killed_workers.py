"""Workers are killed under their streams. `make faults` does this with 200 kills and 2,000 streams (full_size.py)."""

from cluster import cluster, dice, simulated
from disturbed import streams_under_fire
from streams import model_ask, plain_ask


async def test_streams_outlive_killed_workers(smollm2_dir, tmp_path):
    throws = dice(1)
    bodies = [plain_ask(number, throws, 120) for number in range(30)]
    arguments = [simulated(smollm2_dir)] * 3
    async with cluster(tmp_path, smollm2_dir, arguments, "--pool-max-migrations", 50) as made:
        resumed = await streams_under_fire(made, bodies, concurrency=30, kills=8, pause=0.4, seed=2)
        assert made.kills >= 3, "the streams were over before anybody was killed"
        assert resumed >= made.kills


async def test_a_model_goes_on_with_grammars_calls_and_logprobs(tiny_checkpoint, tmp_path):
    directory = tiny_checkpoint("llama", max_position_embeddings=2048, vocab_size=320)
    throws = dice(3)
    bodies = [model_ask(number, throws, 400) for number in range(12)]
    real = ("--model", directory, "--model-name", "m", "--dtype", "float32", "--threads", 1, "--num-blocks", 800)
    arguments = [(*real, "--kernels", "reference", "--debug-integrity")] * 2
    async with cluster(tmp_path, directory, arguments, "--pool-max-migrations", 50) as made:
        resumed = await streams_under_fire(made, bodies, concurrency=12, kills=2, pause=0.8, seed=4)
        assert resumed >= 1
