"""A whole controller, and components and machines of its run that say anything.

Whoever sends has the right key. Beyond not crashing, the controller keeps a promise, and breaking it is a crash here:
nothing that is said raises out of it or ends the run, its invariants hold, and whoever said it is heard or dropped.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from hostile.inputs import Decode
from hostile.messages import examples

sys.path.append(str(Path(__file__).parents[2] / "tests"))

RUN = 500  # inputs; then a new one is begun, because everything is remembered
PARTS = [("replica", 0), ("replica", 1), ("relay", 0), ("relay", 1), ("trainer", 0), ("store", 0)]
GUESTS = [("replica", 2), ("relay", 2), ("store", 2)]
SETTINGS = {
    "model.preset": "smollm2-135m",
    "rollout.engine": "emulated",
    "rollout.kv_tokens": "4000",
    "trainer.engine": "emulated",
    "trainer.mini_batches": "2",
    "costs.decode_step": "0.001",
    "workload.prompts_per_step": "2",
    "workload.group_size": "2",
    "workload.max_completion_tokens": "64",
    "local.listen": "127.0.0.1",
    "local.relays": "2",
    "groups.max_failures": "1000",
    "run.steps": "100000",
}


def components(folder: Path) -> tuple[list[bytes], Decode]:
    """Of every role, of this machine and of one that has joined."""
    from tailrace.wire.messages import Collapsed, decode_from_component

    def sender(data: bytes) -> tuple[str, int]:
        try:  # a component that the run itself has started is believed when it says that it cannot go on
            guests_only = isinstance(decode_from_component(data), Collapsed)
        except Exception:
            guests_only = False
        chosen = GUESTS if guests_only else PARTS + GUESTS
        return chosen[crc32(data) % len(chosen)]

    seeds = [msgspec.msgpack.encode(each) for each in [*examples()[0], *_truths()]]
    return seeds, _attacked(folder, lambda _, data: sender(data), seeds)


def machines(folder: Path) -> tuple[list[bytes], Decode]:
    """Offers, and what a machine has no business to say."""
    from tailrace import __version__
    from tailrace.wire.messages import Hello, Offer

    offers = [Offer(__version__, 1), Offer(__version__, 0), Offer(__version__, 1024), Offer("9.9", 1), Hello()]
    offers += [
        Offer(__version__, 1, True),
        Offer(__version__, 2, True, {"relay-2/1": "", "replica-2/1": "was killed by signal 9"}),
    ]
    seeds = [msgspec.msgpack.encode(each) for each in offers]
    return seeds, _attacked(folder, lambda number, _: ("host", number % 7), seeds)


def _truths() -> list[Any]:
    """Some of what is true at the start, so that what is nearly true is tried too."""
    from tailrace.protocol import Finished, SampleFailed, SamplesLost, StoreJoined, TrajectoryMeta, WeightsLoaded
    from tailrace.wire.messages import Accused, Reported

    events = [Finished(0, TrajectoryMeta(0, 1, 3, 0, 0, "stop", 1.0)), SampleFailed(0, 1, 1, "raised")]
    events += [WeightsLoaded(0, 1, 0), StoreJoined(0, 2), SamplesLost(0, 1, (0, 1)), SamplesLost(2, 1, (2,))]
    return [*map(Reported, events), Accused("replica-1/1", "tokens of t0, which it was not given")]


def _attacked(folder: Path, sender: Callable[[int, bytes], tuple[str, int]], seeds: list[bytes]) -> Decode:
    from played import Played
    from tailrace.config import load

    loop, numbers, runs = asyncio.new_event_loop(), count(), list[Any]()
    asyncio.set_event_loop(loop)
    config = load([], [word for name, value in SETTINGS.items() for word in (f"--{name}", value)])

    async def begin(number: int) -> None:
        if runs:
            await runs.pop().close()
        place = folder / "played" / str(number)
        shutil.rmtree(place.parent, ignore_errors=True)
        runs.append(Played(place, config))
        await runs[0].start()
        await runs[0].welcome("host-5/1", store=True)

    async def hear(data: bytes) -> bool:
        number = next(numbers)
        if number % RUN == 0:
            await begin(number)
        played = runs[0]
        role, id = sender(number, data)
        process = played.controller.components.get(role, id)
        played.orders.clear()
        played.say_bytes(process.spec.name if process is not None else f"host-{id}/1", data)
        await played.turn()
        assert played.goes_on, f"the run has ended: {played.controller.error or played.controller.state.stopped}"
        played.controller.plane.check()
        dropped = any(one.refused for one in played.processes("store", "relay", "trainer", "replica"))
        sent_away = any(type(message).__name__ == "Dismissed" for _, message in played.orders)
        await played.revive()
        return not dropped and not sent_away

    def decode(data: bytes) -> bool | None:
        heard = loop.run_until_complete(hear(data))
        return None if data in seeds else heard

    return decode
