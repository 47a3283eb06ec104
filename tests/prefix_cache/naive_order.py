"""The order in which a device gives blocks up as a list that is sorted anew each time, and a policy that is held to it."""

from prefix_cache.worth import IDLE, PINNED, SHARED, SUPERSEDED, WAITING


class NaiveOrder:
    """What each block is worth, in full; of blocks that are named at once, one by one."""

    def __init__(self, clock):
        self.clock = clock
        self.order = {}  # block -> sort key
        self.untils = {}  # of those in the order that wait or are pinned
        self.marks = {}  # of those that somebody uses
        self.sessions = {}
        self.shared = set()
        self.turn = 0

    def place(self, block, standing, expected, until, first=False):
        self.turn += 1
        self.order[block] = (standing, -expected if standing == WAITING else 0.0, -self.turn if first else self.turn)
        self.untils[block] = until

    def add_all(self, blocks):
        for block in blocks:
            assert block not in self.order
            self.place(block, *self.marks.pop(block, (IDLE, 0.0, 0.0)))

    def remove_all(self, blocks):
        for block in blocks:
            del self.order[block]

    def supersede_all(self, blocks):
        for block in blocks:
            assert block in self.order
            self.place(block, SUPERSEDED, 0.0, 0.0, first=True)

    def mark_all(self, blocks, standing, expected, session):
        for block in blocks:
            if session:
                if self.sessions.setdefault(block, session) != session:
                    self.shared.add(block)
                self.sessions[block] = session
            worth = SHARED if block in self.shared and standing != PINNED else standing
            grace = max(expected - self.clock(), 1.0) if worth == WAITING else 0.0
            mark = (worth, expected, expected + grace)
            if block in self.order:
                self.place(block, *mark)
            else:
                self.marks[block] = mark

    def expire(self):
        """Whoever's mark is over is idle, before others that are. Blocks whose marks end at once keep their order."""
        over = [
            (self.untils[block], -turn, block)
            for block, (standing, _, turn) in self.order.items()
            if standing in (WAITING, PINNED) and self.untils[block] < self.clock()
        ]
        for _, _, block in sorted(over):
            self.place(block, IDLE, 0.0, 0.0, first=True)

    def forget_all(self, blocks):
        for block in blocks:
            self.marks.pop(block, None)
            self.sessions.pop(block, None)
            self.shared.discard(block)

    def pop_all(self, count):
        popped = list(self)[:count]
        self.remove_all(popped)
        self.forget_all(popped)
        return popped

    def pop_below(self, count, expected):
        less = [block for block in self if self.order[block][0] < WAITING or self.expected_after(block, expected)]
        return self.pop_all(min(count, len(less)))

    def expected_after(self, block, expected):
        standing, later, _ = self.order[block]
        return standing == WAITING and -later > expected

    def __len__(self):
        return len(self.order)

    def __contains__(self, block):
        return block in self.order

    def __iter__(self):
        self.expire()
        return iter(sorted(self.order, key=self.order.get))


class CheckedPolicy:
    """A policy whose every answer is what the naive order says."""

    def __init__(self, policy, naive):
        self.policy = policy
        self.naive = naive

    def __getattr__(self, name):
        def both(*arguments):
            # The naive order takes lists, and what it is asked for must not change under it.
            plain = [argument.tolist() if hasattr(argument, "tolist") else argument for argument in arguments]
            expected = getattr(self.naive, name)(*plain)
            answer = getattr(self.policy, name)(*arguments)
            assert answer == expected
            return answer

        return both

    def __len__(self):
        assert len(self.policy) == len(self.naive)
        return len(self.policy)

    def __contains__(self, block):
        assert (block in self.policy) == (block in self.naive)
        return block in self.policy

    def __iter__(self):
        order = list(self.policy)
        assert order == list(self.naive)
        return iter(order)
