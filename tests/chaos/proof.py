"""What must hold after any run, however it was treated: proved from its journal, its files and what it left behind.

`prove` goes through the whole journal with a fresh control plane and the audit of `tests/audit.py`, compares `run.db`
and the files of the sample stores with it row by row, and returns what it counted. It raises `AssertionError` with a
sentence at the first broken promise.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from audit import Audit
from tailrace.config.tree import Local
from tailrace.control.ledger import NONE, Sample
from tailrace.control.plane import ControlPlane
from tailrace.control.state import State
from tailrace.control.storage import FIRST
from tailrace.protocol import (
    Command,
    Event,
    Finished,
    Forget,
    Generate,
    PromptsAdded,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    Request,
    SampleFailed,
    SamplesLost,
    StoreJoined,
    StoreLost,
    Train,
    Trained,
    TrainerLost,
    TrajectoryMeta,
    WeightsLoaded,
)
from tailrace.samples.messages import StoredSample
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import sample_file
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
    regenerated: int  # samples whose tokens were lost with a store
    read: int  # samples that were read whole from the files of stores


def prove(folder: Path, check_every: int = 50, elsewhere: Mapping[int, Path] | None = None) -> Proof:
    """`elsewhere`: the folders of stores on other machines. Those that have not left must be among them."""
    journal = Journal(folder)
    config = journal.config  # parsed anew whenever it is asked for
    plane, audit, versions, accounts = ControlPlane(config), Audit(config), Versions(), Accounts()
    events, losses, orders = 0, Counter[str](), 0
    for entry in journal.entries():
        accounts.hear(plane.state, entry.event)
        commands = plane.handle(entry.now, entry.event)
        assert commands == list(entry.commands), f"event {entry.seq} would be answered differently today"
        audit.listen(entry.now, entry.event, commands)
        accounts.obey(commands)
        versions.listen(entry.event)
        events += 1
        orders += sum(isinstance(command, Train) for command in commands)
        _nobody_of_ours_was_dropped(config.local, entry.event)
        name = type(entry.event).__name__
        losses[name.removesuffix("Lost")] += name.endswith("Lost")
        if events % check_every == 0:
            plane.check()
    plane.check()
    audit.finish(plane)
    _run_db_agrees(folder, accounts, audit)
    folders = {FIRST: folder, **(elsewhere or {})}
    there = [id for id, store in plane.state.stores.stores.items() if store.incarnation and not store.departed]
    read = sum(_store_agrees(folders[id], id, plane.state, accounts) for id in there)
    tally = plane.state.ledger.tally
    assert tally.started == tally.ended + len(plane.state.ledger.groups), "the account of groups does not balance"
    return Proof(
        events,
        plane.state.training.version,
        tally.trained,
        tally.dropped_stale,
        tally.failed,
        orders - len(audit.mini_batches),
        +losses,
        accounts.regenerated,
        read,
    )


def _nobody_of_ours_was_dropped(local: Local, event: Any) -> None:
    """What the run's own components say is always something that they may say."""
    dropped = "it was dropped, because it sent"
    if isinstance(event, ReplicaLost | RelayLost | StoreLost | TrainerLost) and dropped in event.reason:
        guest = (
            (isinstance(event, ReplicaLost) and event.replica >= local.replicas)
            or (isinstance(event, RelayLost) and event.relay >= local.relays)
            or (isinstance(event, StoreLost) and event.store != FIRST)
        )
        assert guest, f"an honest component was dropped: {event}"


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


@dataclass
class Account:
    """What a run has to know of a trajectory."""

    request: Request  # the newest
    state: str = "running"
    step: int | None = None
    meta: TrajectoryMeta | None = None  # of the `Finished` that counted
    kept: bool = True  # somebody may still need its tokens


class Accounts:
    """Of every trajectory, by the journal alone."""

    def __init__(self) -> None:
        self.known: dict[int, Account] = {}
        self.prompts: dict[int, int] = {}  # and how many tokens each has
        self.forgotten: dict[int, set[int]] = {}  # by store: since it last joined
        self.regenerated = 0
        self.lost_a_file = False  # or a part of it, of the first store
        self.doubtful: set[int] = set()  # there was damage, and nobody has read them since

    def hear(self, state: State, event: Event) -> None:
        """Before control does: whether it counts depends on what control knew by then."""
        match event:
            case Finished(_, meta) if state.ledger.current(meta.id, meta.attempt):
                self.known[meta.id].state, self.known[meta.id].meta = "finished", meta
                self.doubtful.discard(meta.id)
            case SampleFailed(_, trajectory, attempt) if state.ledger.current(trajectory, attempt):
                self.known[trajectory].state = "failed"
            case Trained(incarnation, step, part) if state.training.awaits(incarnation, step, part):
                for id in [id for group in state.training.picked for id in group.trajectories]:
                    self.known[id].state, self.known[id].step = "trained", step
                    self.doubtful.discard(id)
            case PromptsAdded(start, prompts) if start == len(self.prompts):
                self.prompts |= {prompt.id: prompt.tokens for prompt in prompts}
            case StoreJoined(store):
                self.forgotten[store] = set()
            case SamplesLost(store):
                self.lost_a_file |= store == FIRST
                self.doubtful |= self.known.keys()
            case _:
                pass

    def obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Generate(requests=requests):
                    self.known |= {one.trajectory: Account(one) for one in requests}
                    self.doubtful -= {one.trajectory for one in requests if not one.resume}
                case Forget(trajectories=trajectories, reason=reason):
                    for id in trajectories:
                        self._forget(id, reason)
                case _:
                    pass

    def _forget(self, id: int, reason: str) -> None:
        account = self.known.get(id)
        if account is None:
            return  # it was never given to anybody
        account.kept = False
        self.forgotten.setdefault(account.request.store, set()).add(id)
        if reason != "trained" and account.state != "failed":
            account.state = "lost" if reason == "regenerate" else reason  # until it is ordered again
        if reason in ("lost", "regenerate"):
            account.step, account.meta = None, None
            self.regenerated += 1


def _run_db_agrees(folder: Path, accounts: Accounts, audit: Audit) -> None:
    """Every trajectory is there at its newest attempt, as the journal says; what is trained is marked with its step."""
    columns = "id, attempt, group_id, prompt_id, store, state, step, tokens, oldest, newest, finish, reward, payload"
    with closing(sqlite3.connect(f"file:{folder / 'run.db'}?mode=ro", uri=True)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = database.execute(f"SELECT {columns} FROM trajectories").fetchall()
    assert {row[0] for row in rows} == set(accounts.known), "run.db has other trajectories than were ordered"
    for id, attempt, group, prompt, store, state, step, *told, payload in rows:
        account = accounts.known[id]
        request, meta = account.request, account.meta
        assert attempt == request.attempt == audit.attempt[id], (
            f"t{id} is at attempt {attempt} in run.db, not {request.attempt}"
        )
        assert (group, prompt, store) == (request.group, request.prompt, request.store), f"t{id} is misplaced"
        assert state == account.state, f"t{id} is {account.state} by the journal; run.db says {state}"
        assert step == account.step, f"t{id} was trained in step {account.step}; run.db says {step}"
        assert (payload == "live") == account.kept, f"t{id} is {payload} in run.db"
        if meta is not None and state in ("finished", "trained"):
            expected = [meta.tokens, meta.oldest, meta.newest, meta.finish, meta.reward]
            assert told == expected, f"t{id} finished with {expected}; run.db says {told}"


def _store_agrees(folder: Path, store: int, state: State, accounts: Accounts) -> int:
    """What control counts on is there, whole; nothing else is live. Returns how many samples were read."""
    path = sample_file(folder, store)
    was_killed = path.with_name(f"{path.name}-wal").exists()  # a store that leaves merges its log
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        payloads = dict(database.execute("SELECT id, payload FROM trajectories"))
        prompts = {id for (id,) in database.execute("SELECT id FROM prompts")}
    assert store != FIRST or prompts >= _needed_prompts(state, accounts), "a prompt is not in the store"
    mine = {id: one for id, one in accounts.known.items() if one.request.store == store}
    live = {id for id, payload in payloads.items() if payload == "live"}
    extra = live - {id for id, one in mine.items() if one.kept}
    late = accounts.forgotten.get(store, set()) if was_killed else set[int]()
    assert extra <= late, f"{path.name} keeps what nobody needs: {sorted(extra - late)[:9]}"
    with closing(SampleReader(path)) as reader:
        kept = {id for id, payload in payloads.items() if payload in ("live", "archived")} - accounts.doubtful
        found = {one.id: one for one in reader.read(sorted(kept))}
        _prompts_agree(reader, prompts, accounts)
    for id, one in mine.items():
        whole = one.meta is not None and one.state in ("finished", "trained") and id not in accounts.doubtful
        if whole and (one.kept or payloads.get(id) == "archived"):
            assert id in found, f"t{id} is finished, and {path.name} does not have it"
            _is_whole(found[id], one)
    _prefixes_are_kept([one for one in state.ledger.samples.values() if one.id not in accounts.doubtful], store, found)
    return len(found)


def _needed_prompts(state: State, accounts: Accounts) -> set[int]:
    """All that ever came; where a file was lost, those of which anything may still be generated."""
    opened = [group.prompt for group in state.ledger.groups.values()]
    still = {prompt.id for prompt in (*state.ledger.pool.contents(), *opened)}
    return still if accounts.lost_a_file else set(accounts.prompts)


def _prompts_agree(reader: SampleReader, prompts: set[int], accounts: Accounts) -> None:
    for id in prompts & accounts.prompts.keys():
        assert reader.row(id).length == accounts.prompts[id], f"p{id} has another length than control was told"


def _is_whole(sample: StoredSample, account: Account) -> None:
    meta, request, answer = account.meta, account.request, sample.pieces[1:]
    assert meta is not None
    assert (sample.group, sample.prompt) == (request.group, request.prompt), f"t{meta.id} is of another group"
    assert _count(sample) == meta.tokens, f"t{meta.id} has {_count(sample)} tokens of {meta.tokens}"
    versions = [piece.version for piece in answer if piece.version is not None]
    if versions:
        assert (min(versions), max(versions)) == (meta.oldest, meta.newest), f"t{meta.id} has other versions than told"


def _prefixes_are_kept(samples: Sequence[Sample], store: int, found: Mapping[int, StoredSample]) -> None:
    """What is not finished yet goes on from at least what was reported of it."""
    for one in samples:
        if one.store == store and one.oldest != NONE and one.state != "failed":
            there = _count(found[one.id]) if one.id in found else 0
            assert there >= one.tokens, f"t{one.id} has {there} tokens of the {one.tokens} that were reported"


def _count(sample: StoredSample) -> int:
    """Of its tokens after the prompt."""
    return sum(len(piece) for piece in sample.pieces[1:])
