"""More turns than the workers can take, from tenants that behave and one that does not, over simulated replicas."""

import asyncio
import re

import aiohttp
import pytest

from tests.live_gateway import serve

KEYS = """noisy-key tenant=noisy
quiet-0-key tenant=quiet-0
quiet-1-key tenant=quiet-1
agent-key tenant=agent
root admin
"""
QUIET = ("quiet-0", "quiet-1")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEYS)
    with serve(
        *("--simulate", "--replicas", 2, "--num-blocks", 400, "--engine", "max-num-seqs=2", "--api-key-file", keys),
        *("--admission-ahead", 0, "--admission-queue-size", 12, "--log-level", "error"),
    ) as gateway:
        yield gateway


class Tenant:
    """Sends turns, and remembers how each was answered."""

    def __init__(self, http, url, name):
        self.http, self.url, self.name = http, url, name
        self.statuses = []
        self.answered = 0

    async def turn(self, messages, session=None, **body):
        headers = {"Authorization": f"Bearer {self.name}-key"}
        if session is not None:
            headers["Session-ID"] = session
        body = {"messages": messages, "max_tokens": 16, "ignore_eos": True, **body}
        async with self.http.post(self.url + "/v1/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
            self.statuses.append(response.status)
            if response.status == 200:
                self.answered += 1
                return answer["choices"][0]["message"]
            assert response.status in (429, 503), answer
            assert 1 <= int(response.headers["Retry-After"]) <= 60
            return None


def user(text):
    return {"role": "user", "content": text}


async def shed(http, url):
    async with http.get(url + "/metrics", headers={"Authorization": "Bearer root"}) as response:
        text = await response.text()
    found = re.findall(r'admission_shed_total\{kind="(\w+)",reason="(\w+)"\} (\S+)', text)
    return {(kind, reason): float(count) for kind, reason, count in found}


async def test_a_flood_of_one_tenant_delays_others_by_its_share_and_costs_no_session_a_turn(gateway):
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as http:
        noisy, agent = Tenant(http, gateway.url, "noisy"), Tenant(http, gateway.url, "agent")
        quiet = [Tenant(http, gateway.url, name) for name in QUIET]
        over = asyncio.Event()
        passed = []

        async def flood(number):
            round_ = 0
            while not over.is_set():
                await noisy.turn([user(f"noise {number} {round_}")])
                round_ += 1

        async def behave(tenant):
            for number in range(4):
                before = noisy.answered
                while await tenant.turn([user(f"question {number}")]) is None:
                    pass
                passed.append(noisy.answered - before)

        async def work():
            messages = []
            for number in range(8):
                messages.append(user(f"step {number}"))
                answer = await agent.turn(messages, session="work")
                while answer is None and number == 0:
                    answer = await agent.turn(messages, session="work")
                messages.append(answer)

        floods = [asyncio.create_task(flood(number)) for number in range(30)]
        await asyncio.gather(work(), *(behave(tenant) for tenant in quiet))
        over.set()
        await asyncio.gather(*floods)
        counts = await shed(http, gateway.url)
    # Four turns run at once and twelve wait: with one queue for all a turn would have sixteen before it.
    assert max(passed) <= 10, passed
    assert noisy.statuses.count(429) + noisy.statuses.count(503) > 20
    # Quiet tenants are not turned away for what another does, and turn 2 to 8 of the session never.
    assert [tenant.statuses for tenant in quiet] == [[200] * 4, [200] * 4]
    assert agent.statuses[-7:] == [200] * 7
    assert sum(count for (kind, _), count in counts.items() if kind == "birth") > 20
    assert not any(count for (kind, _), count in counts.items() if kind == "turn")


async def test_a_client_that_gives_up_frees_its_place(gateway):
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def state():
            async with http.get(gateway.url + "/admission", headers={"Authorization": "Bearer root"}) as response:
                return await response.json()

        async def send(number):
            tenant = Tenant(http, gateway.url, "noisy")
            await tenant.turn([user(f"long {number}")], max_tokens=4000, session=f"long-{number}")

        tasks = [asyncio.create_task(send(number)) for number in range(10)]
        # What the turns before have left behind there the gateway hears with the next report of its workers.
        while (now := await state())["in_flight"] != 4 or now["queued"]["normal"] != 6:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert now["queued_by_tenant"] == {"@noisy": 6}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while (now := await state())["in_flight"] or now["queued_tokens"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        answer = await Tenant(http, gateway.url, "quiet-0").turn([user("still there?")])
        assert answer["content"]
