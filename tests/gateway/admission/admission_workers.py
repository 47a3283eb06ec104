"""Workers with books of their own, and turns that ask for room there."""

import asyncio

from gateway.admission.controller import Ask
from gateway.admission.rooms import WorkerRoom


class Workers:
    """Workers with books of their own, as the dispatcher has them."""

    def __init__(self, count=1, blocks=100, slots=2):
        self.names = [f"w{number}" for number in range(count)]
        self.blocks, self.slots = blocks, slots
        self.held = {name: [] for name in self.names}
        self.up = True

    def rooms(self, _model):
        if not self.up:
            return []
        return [WorkerRoom(name, self.blocks - sum(held), self.slots - len(held), not held) for name, held in self.held.items()]

    def place(self, need, name="w0"):
        assert next(room for room in self.rooms("m") if room.name == name).takes(need)
        self.held[name].append(need)
        return name

    def end(self, name, need):
        self.held[name].remove(need)


def ask(tenant="a", need=10, **values):
    return Ask("m", tenant, (need,), values.pop("tokens", 100), values.pop("cost", 100.0), **values)


async def waiting(admission, *asks):
    """Starts to wait for each, in order."""
    tasks = []
    for each in asks:
        tasks.append(asyncio.create_task(admission.admit(each)))
        await asyncio.sleep(0)
    return tasks
