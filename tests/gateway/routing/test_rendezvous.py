from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.router.config import RouterConfig
from gateway.router.costs import WorkerLoad
from gateway.router.rendezvous import prompt_key, score, session_key
from gateway.router.router import Router
from gateway.turn import SessionRef
from prefix_cache.index import ResidencyIndex

parts = st.text(max_size=8)


def chosen(key, workers):
    return max(workers, key=lambda worker: (score(key, worker), worker))


@given(st.tuples(parts, parts), st.tuples(parts, parts))
def test_two_sessions_never_have_one_key(one, other):
    assert (session_key(one) == session_key(other)) == (one == other)


@given(st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=8), st.tuples(parts, parts), st.data())
def test_a_worker_that_goes_moves_its_own_sessions_only(workers, session, data):
    key = session_key(session)
    gone = data.draw(st.sampled_from(sorted(workers)))
    before, after = chosen(key, workers), chosen(key, workers - {gone})
    assert before in (after, gone)


def test_sessions_spread_evenly():
    workers = [f"w{number}" for number in range(8)]
    counts = Counter(chosen(session_key(("t", f"s-{number}")), workers) for number in range(8000))
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_prompts_are_known_by_where_they_end_within_their_tenant():
    assert prompt_key("t", []) is None
    assert prompt_key("t", [b"a", b"b"]) != prompt_key("t", [b"a", b"c"])
    assert prompt_key("t", [b"a"]) != prompt_key("u", [b"a"])


def place(router, session, loads, **more):
    route = router.route(digests=[], prompt_tokens=100, block_size=16, session=SessionRef("t", session), loads=loads, **more)
    route.abandoned()
    return route.receipt


def loads_of(names, order):
    """The same workers, under names of each gateway's own."""
    return [
        WorkerLoad(f"{names}-{position}", max_concurrency=8, instance=f"i{number}") for position, number in enumerate(order)
    ]


def test_gateways_that_share_nothing_send_new_sessions_to_the_same_workers():
    agreeing = [Router(RouterConfig(agree=True), ResidencyIndex(), lambda: 0.0) for _ in range(2)]
    alone = [Router(RouterConfig(), ResidencyIndex(), lambda: 0.0) for _ in range(2)]
    first, second = loads_of("a", [0, 1, 2, 3]), loads_of("b", [2, 0, 3, 1])
    # The other gateway has placed a few before.
    for number in range(3):
        place(alone[1], f"before-{number}", second)
    for gateways, agree in ((agreeing, True), (alone, False)):
        instances = []
        for number in range(40):
            # Each session is new and both are idle: nothing but the session tells workers apart.
            got = [place(gateways[0], f"s{number}", first).instance, place(gateways[1], f"s{number}", second).instance]
            instances.append(got)
        assert all(one == other for one, other in instances) == agree
        assert len({one for one, _ in instances}) == 4


def test_a_session_that_another_gateway_served_goes_home():
    router = Router(RouterConfig(), ResidencyIndex(), lambda: 0.0)
    shared = Router(RouterConfig(agree=True), ResidencyIndex(), lambda: 0.0)
    loads = loads_of("w", [0, 1, 2, 3])
    for number in range(8):
        receipt = place(router, f"s{number}", loads, last_instance="i2")
        assert (receipt.instance, receipt.reason) == ("i2", "home")
        # Another gateway has moved it: that is its home now, whatever this one remembers.
        receipt = place(shared, f"s{number}", loads, last_instance="i2")
        receipt = place(shared, f"s{number}", loads, last_instance="i3")
        assert (receipt.instance, receipt.reason) == ("i3", "home")
        assert place(shared, f"s{number}", loads, last_instance="i9").instance == "i3"
    # An instance that is gone is no home.
    assert place(router, "other", loads, last_instance="i9").instance in {"i0", "i1", "i2", "i3"}
