"""Workers are killed under their streams. `make faults` does this with 200 kills and 2,000 streams (full_size.py)."""

from cluster import cluster, dice, simulated
from disturbed import streams_under_fire
from streams import model_ask, plain_ask


async def test_streams_outlive_killed_workers(smollm2_dir, tmp_path):
    throws = dice(1)
    bodies = [plain_ask(number, throws, 80) for number in range(20)]
    arguments = [simulated(smollm2_dir)] * 3
    async with cluster(tmp_path, smollm2_dir, arguments, "--pool-max-migrations", 50) as made:
        resumed = await streams_under_fire(made, bodies, concurrency=20, kills=3, pause=0.2, seed=2, at_least_kills=True)
        assert made.kills == 3
        assert resumed >= 1


async def test_a_model_goes_on_with_grammars_calls_and_logprobs(tiny_checkpoint, tmp_path):
    directory = tiny_checkpoint("llama", max_position_embeddings=2048, vocab_size=320)
    throws = dice(3)
    bodies = [model_ask(number, throws, 200) for number in range(8)]
    real = ("--model", directory, "--model-name", "m", "--dtype", "float32", "--threads", 1, "--num-blocks", 800)
    arguments = [(*real, "--kernels", "reference", "--debug-integrity")] * 2
    async with cluster(tmp_path, directory, arguments, "--pool-max-migrations", 50) as made:
        resumed = await streams_under_fire(made, bodies, concurrency=8, kills=1, pause=0.2, seed=4, at_least_kills=True)
        assert made.kills == 1
        assert resumed >= 1
