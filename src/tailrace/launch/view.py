"""What a person sees of a run that is driven: `LiveView` observes the controller and draws the live view.

A run that is taken up has a history, perhaps of millions of events. They are looked through beside the run, a slice at
a time, so that the controller is back at once however long the run has been going; what happens meanwhile waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tailrace.config.tree import Config
from tailrace.obs.live import LiveRun
from tailrace.obs.terminal import watch
from tailrace.protocol import Command, Event
from tailrace.store.run import RunStore

SHOW_S = 0.25
SLICE = 1000  # events of the history between two turns of the controller


class LiveView:
    def __init__(self, store: RunStore, config: Config) -> None:
        self.live = LiveRun(config, name=store.folder.name)
        self._history = store.entries
        self._until = store.last_seq
        self._waiting: list[Callable[[], None]] | None = []  # None: the history has been gone through

    def see(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self._in_turn(partial(self.live.see, now, event, commands))

    def measure(self, now: float, step: int, source: str, values: Mapping[str, float]) -> None:
        self._in_turn(partial(self.live.measure, now, step, source, values))

    def _in_turn(self, action: Callable[[], None]) -> None:
        if self._waiting is None:
            action()
        else:
            self._waiting.append(action)

    async def show(self, clock: Callable[[], float], beat: Callable[[], None]) -> None:
        """Until it is cancelled."""
        await self._look_back(beat)
        with watch(self.live) as show:
            self._catch_up()
            while True:
                beat()
                show(clock())
                await asyncio.sleep(SHOW_S)

    async def _look_back(self, beat: Callable[[], None]) -> None:
        """A slice is read and let go: while somebody reads, the log of the database only grows. What comes after the
        history is written by the controller of now, and waits."""
        for first in range(0, self._until, SLICE):
            for entry in self._history(first, min(SLICE, self._until - first)):
                self.live.see(entry.now, entry.event, entry.commands)
            beat()
            await asyncio.sleep(0)

    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for action in waiting:
            action()
