"""The same load as in `data_path.py`, on the release before tokens had a path of their own (commit 722dcdb).

    git worktree add ../before 722dcdb
    python benchmarks/data_path_before.py --tree ../before [--replicas 64] [--seconds 60] [--overload]

There every token goes to the controller in `Grown` messages, as tuples of Python's numbers, into `run.db`, and to the
trainer in the `Train` order. Controller, relay and trainer are that release's own processes; the mocks speak its
protocols. A token counts as stored when the controller has put it into `run.db`. A mock generates while its connection
takes what it sends; one that is declared dead is started again, as control orders.
"""

# What is imported here is of that release.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

if "--tree" in sys.argv:  # ahead of the release that is installed, for this process and those that it starts
    SOURCE = str(Path(sys.argv[sys.argv.index("--tree") + 1]).resolve() / "src")
    os.environ["PYTHONPATH"] = SOURCE
    sys.path.insert(0, SOURCE)

import numpy as np
from data_path_rig import (
    ANSWER,
    PIECES,
    VOCABULARY,
    Board,
    ControllerProcess,
    Rig,
    Seen,
    fleet_settings,
    measured,
    options,
)
from msgspec.structs import replace
from tailrace.launch.sources import Blanks
from tailrace.runtime.parts import Tie

from tailrace.config import load
from tailrace.protocol import (
    Finished,
    Generate,
    LoadWeights,
    Progressed,
    ReplicaJoined,
    TrajectoryMeta,
    WeightsLoaded,
)
from tailrace.runtime.controller import Controller
from tailrace.store.run import RunStore
from tailrace.types import Segment
from tailrace.wire import descriptors
from tailrace.wire.connection import Connection
from tailrace.wire.keys import Keyring
from tailrace.wire.messages import (
    Grown,
    Growth,
    Hello,
    Introduce,
    Ordered,
    Reported,
    decode_from_controller,
    encode,
)

KEYS = Keyring(bytes(32), "ab" * 32)


class MockReplica:
    """See `data_path_rig.Mock`."""

    stored = 0  # the controller knows

    def __init__(self, running: int, chunk: int, id: int, incarnation: int, port: int) -> None:
        name = f"replica-{id}/{incarnation}"
        self.id, self._incarnation = id, incarnation
        self.held_up = self.lost = False
        self._wire = Connection(f"tcp://127.0.0.1:{port}", name, KEYS.of(name))
        self._number = self._version = 0
        self._chunk, self._uneven = chunk, running
        self._random = np.random.default_rng(id)
        self._pieces = [self._piece() for _ in range(PIECES)]
        self._running: dict[tuple[int, int], list[int]] = {}  # length, end and first version of each

    def _piece(self) -> Segment:
        tokens = self._random.integers(0, VOCABULARY, self._chunk).tolist()
        return Segment(0, tuple(tokens), tuple((-self._random.random(self._chunk, dtype="<f4")).tolist()))

    def join(self) -> None:
        self._wire.send(0, encode(Hello()))
        self._report(Reported(ReplicaJoined(self.id, self._incarnation, 0, -1, 1 << 30, 1024)))

    def beat(self) -> None:
        length = sum([one[0] for one in self._running.values()])
        self._wire.send(0, encode(Reported(Progressed(self.id, self._incarnation, length, len(self._running), 0))))

    def _report(self, message: Any) -> None:
        self._number += 1
        self._wire.send(self._number, encode(message))

    def send(self) -> None:
        self._wire.flush()
        self.held_up = self._wire.has_unsent

    def close(self) -> None:
        self._wire.close()

    def take_in(self) -> None:
        for content in self._wire.receive():
            match decode_from_controller(content):
                case Ordered(Generate(_, _, requests)):
                    for one in requests:
                        self._running[one.trajectory, one.epoch] = [0, self._end(), self._version]
                case Ordered(LoadWeights(_, _, version)):
                    self._version = version
                    self._pieces = [Segment(version, one.tokens, one.logprobs) for one in self._pieces]
                    self._report(Reported(WeightsLoaded(self.id, self._incarnation, version)))
                case Introduce():
                    self.lost = True
                case _:
                    pass

    def _end(self) -> int:
        self._uneven -= 1
        return int(self._random.integers(1, ANSWER // self._chunk)) * self._chunk if self._uneven >= 0 else ANSWER

    def generate(self) -> int:
        if self.held_up or not self._running:
            return 0
        grown = [Growth(*key, (self._pieces[(one[0] + key[0]) % PIECES],)) for key, one in self._running.items()]
        self._report(Grown(tuple(grown)))
        count = len(grown) * self._chunk
        for key, one in list(self._running.items()):
            one[0] += self._chunk
            if one[0] >= one[1]:
                self._finish(*key, *self._running.pop(key))
        return count

    def _finish(self, trajectory: int, epoch: int, tokens: int, _: int, oldest: int) -> None:
        reward = float(self._random.random())
        meta = TrajectoryMeta(trajectory, epoch, tokens, oldest, self._version, "length", reward)
        self._report(Reported(Finished(self.id, meta)))


def control(pipe: Pipe, board: Board, folder: Path, config: Any) -> None:
    def make(lifeline: int, seen: Seen) -> Controller:
        descriptors.raise_limit()
        store: Any = RunStore.create(folder, config)
        board.kept.value, append = 0, store.vault.append

        def count(trajectory: int, epoch: int, segments: tuple[Segment, ...]) -> bool:
            stored = append(trajectory, epoch, segments)
            board.kept.value += stored * sum([len(one.tokens) for one in segments])
            return stored

        store.vault.append = count
        controller: Any = Controller(store, config, Blanks(config), Tie(KEYS, lifeline), seen)
        controller.components, controller.server = controller.parts, controller.hub  # their names today
        return controller

    asyncio.run(ControllerProcess(pipe, board).run(make))


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--tree", required=True, help="a checkout of commit 722dcdb")
    chosen = parser.parse_args()
    descriptors.raise_limit()
    words = fleet_settings(chosen.replicas, chosen.running)
    config = load([], [word for name, value in words.items() for word in (f"--{name}", value)])
    config = replace(config, local=replace(config.local, replicas=chosen.replicas))
    make = partial(MockReplica, chosen.running, chosen.chunk)
    measured("before", chosen, lambda folder: Rig(chosen.replicas, control, make, folder, config))


if __name__ == "__main__":
    main()
