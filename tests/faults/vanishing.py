"""Run in a network of its own (`unshare -rn`): a client streams from a gateway, the network goes away, and the replica, which
is reached over a unix socket, must hear of it. Prints one line of JSON."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import aiohttp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE), str(HERE.parent)]  # the rooms before the tests that mirror them

from cluster import cluster, simulated  # noqa: E402 - the path is set above


def network(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


async def main(model, directory):
    network("up")
    options = ("--http-write-timeout", 2, "--http-ping-interval", 0.5)
    async with cluster(Path(directory), model, [simulated(model, step=0.05)], *options) as made:
        [replica] = made.replicas
        body = {"model": "m", "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 4000, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            response = await session.post(made.url + "/v1/chat/completions", json={**body, "stream": True})
            await response.content.readuntil(b"content")
            assert (await replica.stats()).running == 1
            network("down")
            stats = await replica.idle(60)
            network("up")
            print(json.dumps({"aborted": stats.aborted_total, "generated": stats.generated_tokens_total}), flush=True)
            response.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
