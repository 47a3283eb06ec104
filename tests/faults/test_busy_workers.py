"""A worker that is busy to the limit is not taken for dead: its probes are answered beside its steps."""

import aiohttp
from cluster import cluster
from streams import ask_all

LONG = " ".join(f"item {number} of the long list" for number in range(50))


async def test_a_worker_that_computes_without_a_pause_stays_up(tiny_checkpoint, tmp_path):
    directory = tiny_checkpoint("llama", max_position_embeddings=8192, vocab_size=320)
    options = ("--model", directory, "--model-name", "m", "--dtype", "float32", "--threads", 1, "--num-blocks", 2000)
    real = (*options, "--kernels", "reference", "--max-num-batched-tokens", 4096, "--debug-integrity")
    patience = ("--pool-poll-interval", 0.05, "--pool-probe-timeout", 10, "--pool-unresponsive-after", 20)
    bodies = [
        {"model": "m", "messages": [{"role": "user", "content": f"{number} {LONG}"}], "max_tokens": 4, "temperature": 0}
        for number in range(4)
    ]
    async with cluster(tmp_path, directory, [real], *patience) as made:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as session:
            answers = await ask_all(session, made.url, bodies, len(bodies))
        assert all(answer.complete for answer in answers), [answer.error for answer in answers]
        assert min(answer.prompt_tokens for answer in answers) > 300
        assert not [line for line in made.served.lines if "worker worker-0 is down" in line]
        assert await made.metric("streams_resumed_total") == 0
        assert made.replicas[0].lives == 1
        await made.nothing_is_left()
