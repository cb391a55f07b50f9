"""Journals of format 2, translated into the names and events of today.

names    an assignment's `epoch` is its `attempt`, a route's its `revision`; a `part` is a `mini_batch` where something
         is trained, and a `role` where a process is meant; which start in a row it is, is `restart`
events   components that were alive said so one by one (`Alive`); today one `Heartbeats` before each look at the
         health of all says who is late. In a run without faults that is nobody.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tailrace.config import Config, with_values
from tailrace.config.files import flat, read_toml
from tailrace.protocol import AnyCommand, AnyEvent, Command, Event, Heartbeats

FIELDS = {
    "Route": {"epoch": "revision"},
    "Start": {"part": "role", "attempt": "restart"},
    "GiveUp": {"part": "role"},
    "Train": {"part": "mini_batch"},
    "Trained": {"part": "mini_batch"},
    "TrainerJoined": {"part": "mini_batch"},
}
SETTINGS = {"costs.train_part": "costs.train_mini_batch", "groups.attempts": "groups.max_failures"}


class OldEntry(NamedTuple):
    now: float
    event: Event
    commands: list[Command]


class OldJournal:
    """A file of JSON lines: the settings first, then one entry a line."""

    def __init__(self, path: Path) -> None:
        head, *self._lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        values = dict(flat(read_toml(msgspec.json.decode(head)["config"])))
        self.config = with_values(Config(), {SETTINGS.get(key, key): value for key, value in values.items()})

    def entries(self) -> Iterator[OldEntry]:
        for line in self._lines:
            entry = msgspec.json.decode(line)
            event, now = entry["event"], entry["now"]
            if event["kind"] == "Alive":
                assert not entry["commands"], "nothing ever followed from a heartbeat"
                continue
            if event["kind"] == "TimerFired" and event["timer"] == "health":
                yield OldEntry(now, Heartbeats(), [])
            commands = [msgspec.convert(_renamed(one), AnyCommand) for one in entry["commands"]]
            yield OldEntry(now, msgspec.convert(_renamed(event), AnyEvent), commands)


def _renamed(value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(one) for one in value]
    if not isinstance(value, dict):
        return value
    names = FIELDS.get(value.get("kind", ""), {"epoch": "attempt"})
    return {names.get(key, key): _renamed(inner) for key, inner in value.items()}
