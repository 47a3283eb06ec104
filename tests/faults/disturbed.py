"""The same streams twice: undisturbed, and with their workers killed."""

import asyncio
import time
from collections import Counter

import aiohttp
from cluster import dice
from streams import ask_all


async def streams_under_fire(
    made, bodies, *, concurrency, kills, pause, seed, spared=1, at_least_kills=False, reference=None, say=lambda line: None
):
    """Asks for everything undisturbed (of the gateway at `reference`, else of the same one), then again while workers are
    killed, and holds the second answers to the first. `at_least_kills`: asks on until there were enough kills. Returns how many
    times a stream went on elsewhere."""
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
        killing = asyncio.create_task(made.kill_at_random(kills, pause, dice(seed), done, spared))
        numbers, answers = list(range(len(bodies))), []
        try:
            answers += await ask_all(session, made.url, bodies, concurrency, report)
            while made.kills < kills and at_least_kills:
                again = [(len(numbers) + place) % len(bodies) for place in range(concurrency)]
                answers += await ask_all(session, made.url, [bodies[number] for number in again], concurrency, report)
                numbers += again
        finally:
            done.set()
            await killing
    incomplete = [(number, answer.status, answer.error) for number, answer in enumerate(answers) if not answer.complete]
    kinds = Counter((status, error and error["message"].split("(")[0]) for _, status, error in incomplete)
    assert not incomplete, f"{len(incomplete)} streams did not come to their end: {kinds.most_common(5)}, {incomplete[:3]}"
    different = [
        (bodies[number], answer.said(), undisturbed[number].said())
        for number, answer in zip(numbers, answers, strict=True)
        if not answer.equals(undisturbed[number])
    ]
    assert not different, f"{len(different)} answers are not the undisturbed ones: {different[:2]}"
    assert await made.metric("streams_lost_total") == 0
    resumed = await made.metric("streams_resumed_total")
    seconds = time.monotonic() - began
    away = sum(answer.turned_away for answer in answers)
    say(f"disturbed: {len(answers)} streams, all equal, {made.kills} kills, {resumed:.0f} times resumed, {seconds:.0f} s")
    say(f"turned away before their first byte, as nobody was up: {away}")
    await made.nothing_is_left()
    return resumed
