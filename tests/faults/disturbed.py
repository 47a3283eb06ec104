"""The same streams twice: undisturbed, and with their workers killed."""

import asyncio
import time

import aiohttp
from cluster import dice
from streams import ask_all


async def streams_under_fire(made, bodies, *, concurrency, kills, pause, seed, reference=None, say=lambda line: None):
    """Asks for everything undisturbed (of the gateway at `reference`, else of the same one), then again while workers are
    killed, and holds the second answers to the first. Returns how many streams went on elsewhere."""
    began = time.monotonic()

    def report(number, answer):
        finished.append(number)
        if len(finished) % 100 == 0:
            say(f"{len(finished)} streams, {made.kills} kills, {time.monotonic() - began:.0f} s")

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20) as session:
        finished = []
        undisturbed = await ask_all(session, reference or made.url, bodies, concurrency, report)
        assert all(answer.complete for answer in undisturbed), [a.error for a in undisturbed if not a.complete][:3]
        assert await made.metric("streams_resumed_total") == 0
        say(f"undisturbed: {len(bodies)} streams in {time.monotonic() - began:.0f} s")
        began, finished, done = time.monotonic(), [], asyncio.Event()
        killing = asyncio.create_task(made.kill_at_random(kills, pause, dice(seed), done))
        try:
            answers = await ask_all(session, made.url, bodies, concurrency, report)
        finally:
            done.set()
            await killing
    incomplete = [(number, answer.status, answer.error) for number, answer in enumerate(answers) if not answer.complete]
    assert not incomplete, f"{len(incomplete)} streams did not come to their end: {incomplete[:3]}"
    different = [number for number, answer in enumerate(answers) if answer.said() != undisturbed[number].said()]
    detail = [(bodies[number], answers[number].said(), undisturbed[number].said()) for number in different[:2]]
    assert not different, f"{len(different)} answers are not the undisturbed ones: {detail}"
    assert await made.metric("streams_lost_total") == 0
    resumed = await made.metric("streams_resumed_total")
    say(
        f"disturbed: {len(bodies)} streams in {time.monotonic() - began:.0f} s, {made.kills} kills, {resumed:.0f} times resumed"
    )
    await made.nothing_is_left()
    return resumed
