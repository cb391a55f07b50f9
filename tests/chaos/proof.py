"""What must hold after any run, however it was treated: proved from its journal, its vault and what it left behind.

`prove` goes through the whole journal with a fresh control plane and the audit of `tests/audit.py`, compares the vault
with it row by row, and returns what it counted. It raises `AssertionError` with a sentence at the first broken promise.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from audit import Audit
from tailrace.control.plane import ControlPlane
from tailrace.protocol import (
    Finished,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    Train,
    Trained,
    TrainerLost,
    WeightsLoaded,
)
from tailrace.store.journal import Journal


class Proof(NamedTuple):
    """Counts of a run in which every promise was kept."""

    events: int
    steps: int
    trained: int  # groups
    dropped: int  # as too stale; their prompts were used again
    failed: int
    repeated: int  # parts that were trained again after a loss
    lost: Counter[str]  # losses that control took note of, by role


def prove(folder: Path, check_every: int = 50) -> Proof:
    journal = Journal(folder)
    plane, audit, versions = ControlPlane(journal.config), Audit(journal.config), Versions()
    events, losses, orders = 0, Counter[str](), 0
    for entry in journal.entries():
        commands = plane.handle(entry.now, entry.event)
        assert commands == list(entry.commands), f"event {entry.seq} would be answered differently today"
        audit.listen(entry.now, entry.event, commands)
        versions.listen(entry.event)
        events += 1
        orders += sum(isinstance(command, Train) for command in commands)
        _nobody_of_ours_was_dropped(journal, entry.event)
        name = type(entry.event).__name__
        losses[name.removesuffix("Lost")] += name.endswith("Lost")
        if events % check_every == 0:
            plane.check()
    plane.check()
    audit.finish(plane)
    _vault_agrees(folder, plane, audit)
    tally = plane.state.ledger.tally
    assert tally.started == tally.ended + len(plane.state.ledger.groups), "the account of groups does not balance"
    return Proof(
        events,
        plane.state.training.version,
        tally.trained,
        tally.dropped_stale,
        tally.failed,
        orders - len(audit.parts),
        +losses,
    )


def _nobody_of_ours_was_dropped(journal: Journal, event: Any) -> None:
    """What the run's own parts say is always something that they may say."""
    dropped, local = "it was dropped, because it sent", journal.config.local
    if isinstance(event, ReplicaLost | RelayLost | TrainerLost) and dropped in event.reason:
        guest = (isinstance(event, ReplicaLost) and event.replica >= local.replicas) or (
            isinstance(event, RelayLost) and event.relay >= local.relays
        )
        assert guest, f"an honest part was dropped: {event}"


class Versions:
    """They never go back: neither what is trained, nor what one process of a replica generates with."""

    def __init__(self) -> None:
        self.loaded: dict[tuple[int, int], int] = {}
        self.finished: dict[tuple[int, int], int] = {}

    def listen(self, event: Any) -> None:
        if isinstance(event, ReplicaJoined):
            self.loaded[event.replica, event.incarnation] = event.version
        elif isinstance(event, WeightsLoaded):
            key = event.replica, event.incarnation
            assert event.version >= self.loaded.get(key, -1), f"replica {key} went back to version {event.version}"
            self.loaded[key] = event.version


def _vault_agrees(folder: Path, plane: ControlPlane, audit: Audit) -> None:
    """Every token that control was told of is there, once; what is trained is marked with its step."""
    journal = Journal(folder)
    told: dict[tuple[int, int], Finished] = {}
    trained: dict[int, int] = {}
    parts: dict[tuple[int, int], Train] = {}
    prompts = len(audit.received)
    for entry in journal.entries():
        if isinstance(entry.event, Finished):
            told.setdefault((entry.event.meta.id, entry.event.meta.epoch), entry.event)
        elif isinstance(entry.event, Trained) and (part := parts.get((entry.event.step, entry.event.part))):
            trained |= {id: part.step for group in part.groups for id in group.trajectories}
        parts |= {(one.step, one.part): one for one in entry.commands if isinstance(one, Train)}
    with closing(sqlite3.connect(f"file:{folder / 'run.db'}?mode=ro", uri=True)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        stored = database.execute("SELECT id, epoch, state, step, reward, payload FROM trajectories").fetchall()
        tokens = dict(database.execute("SELECT trajectory_id, sum(length(tokens)) / 4 FROM segments GROUP BY 1"))
        assert database.execute("SELECT count(*) FROM prompts").fetchone()[0] >= prompts, "a prompt is not in the vault"
    assert {row[0] for row in stored} == set(audit.epoch), "the vault has other trajectories than were ordered"
    for id, epoch, state, step, reward, payload in stored:
        assert epoch == audit.epoch[id], f"t{id} is at epoch {epoch} in the vault and {audit.epoch[id]} in the journal"
        assert (state == "trained") == (id in trained), f"t{id} is {state} in the vault"
        assert step == trained.get(id), f"t{id} was trained in step {trained.get(id)}; the vault says {step}"
        if state in ("finished", "trained") and payload != "deleted":
            meta = told[id, epoch].meta
            assert reward == meta.reward, f"t{id} was given {meta.reward}; the vault says {reward}"
            assert tokens.get(id, 0) == meta.tokens, f"t{id} has {tokens.get(id, 0)} tokens of {meta.tokens}"
