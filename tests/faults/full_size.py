"""`make faults`: 200 workers killed under 2,000 streams, 50 of these from replicas that run the real model. It takes
minutes, so it is no part of the suite (its name says so); tests/faults/test_killed_workers.py is the same in small."""

import functools

import pytest
from cluster import cluster, dice, replicas_at, simulated
from disturbed import streams_under_fire
from live_gateway import serve
from streams import model_ask, plain_ask

SIMULATED_STREAMS, SIMULATED_KILLS = 1950, 185
MODEL_STREAMS, MODEL_KILLS = 50, 15

say = functools.partial(print, flush=True)


@pytest.mark.timeout(3600)
async def test_1950_streams_of_simulated_replicas(smollm2_dir, tmp_path):
    throws = dice(11)
    bodies = [plain_ask(number, throws, 160) for number in range(SIMULATED_STREAMS)]
    fast = simulated(smollm2_dir, "--sim-time-scale", 0)
    (tmp_path / "reference").mkdir()
    async with replicas_at(tmp_path / "reference", [fast]) as (undisturbed,):
        with serve("--model", smollm2_dir, "--served-model-name", "m", "--worker", undisturbed.url) as reference:
            arguments = [simulated(smollm2_dir, step=0.06)] * 8
            async with cluster(tmp_path, smollm2_dir, arguments, "--pool-max-migrations", 50) as made:
                resumed = await streams_under_fire(
                    made,
                    bodies,
                    concurrency=64,
                    kills=SIMULATED_KILLS,
                    pause=0.8,
                    seed=12,
                    spared=3,
                    at_least_kills=True,
                    reference=reference.url,
                    say=say,
                )
                assert made.kills == SIMULATED_KILLS
                assert resumed > made.kills


@pytest.mark.timeout(3600)
async def test_50_streams_of_the_real_model(smollm2_dir, tmp_path):
    throws = dice(13)
    bodies = [model_ask(number, throws, 60) for number in range(MODEL_STREAMS)]
    real = ("--model", smollm2_dir, "--model-name", "m", "--dtype", "float32", "--threads", 1, "--num-blocks", 1000)
    async with cluster(tmp_path, smollm2_dir, [(*real, "--debug-integrity")] * 3, "--pool-max-migrations", 50) as made:
        resumed = await streams_under_fire(
            made, bodies, concurrency=12, kills=MODEL_KILLS, pause=4.0, seed=14, at_least_kills=True, say=say
        )
        assert made.kills == MODEL_KILLS
        assert resumed >= 5
