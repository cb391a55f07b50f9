"""Measurements on a fleet that is broken in one place: does anybody else feel it, and how long until it is mended?

Used by `test_isolation.py` in short and by `benchmarks/chaos.py` in full. Moments are taken from the run's own journal,
in the controller's time; a `Tape` that runs along says which moment of it a moment of ours was.
"""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from victim import Victim

from tailrace.control.plane import ControlPlane
from tailrace.protocol import (
    Command,
    Finished,
    Generate,
    GiveUp,
    Publish,
    RelayLost,
    StoreJoined,
    StoreLost,
    Trained,
    TrainerJoined,
    TrainerLost,
    VersionStored,
)
from tailrace.store.journal import Entry, Journal

REPLICAS, RELAYS = 4, 3
FLEET = f"""
[model]
preset = "smollm2-135m"
[workload]
prompts_per_step = 8
group_size = 4
prompt_tokens = 16
max_completion_tokens = 400
[workload.lengths]
median = 60
sigma = 0.6
[rollout]
engine = "emulated"
kv_tokens = 8000
stream_tokens = 4
[trainer]
engine = "emulated"
mini_batches = 2
checkpoint_every = 1
[costs]
decode_step = 0.005
decode_sequence = 0.0001
train_mini_batch = 0.3
[schedule]
max_staleness = 8
[repack]
every_s = 1.0
[local]
replicas = {REPLICAS}
relays = {RELAYS}
[run]
steps = 1000
"""  # the trainer is what limits it, so one replica of four can be missed; heartbeats are the defaults
# A trainer that waits for generation, and a buffer with room for half a minute of it.
ROOM = (
    *("--costs.train_mini_batch", "0.05", "--costs.decode_step", "0.01"),
    *("--schedule.max_staleness", "180", "--schedule.steps_ahead", "180"),
)
EVERYBODY = {"trainer0", "store0", *(f"replica{id}" for id in range(REPLICAS)), *(f"relay{id}" for id in range(RELAYS))}
TAPE_S = 0.01


class Tape:
    """How far journal and sample store were, moment by moment of our clock."""

    def __init__(self, run: Victim) -> None:
        self.ahead = float("inf")  # our clock minus the controller's, by the freshest event ever seen
        self.segments: list[int] = []
        self.seen: list[float] = []
        self._run = run
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    @property
    def now(self) -> float:
        """In the controller's time."""
        return time.monotonic() - self.ahead

    def when(self, segment: int) -> float:
        """When this segment of a sample was first seen in the store. Whoever asks may have seen it just before us."""
        at = bisect_left(self.segments, segment)
        return self.seen[at] - self.ahead if at < len(self.seen) else self.now

    def _follow(self) -> None:
        query = "SELECT (SELECT max(now) FROM journal), (SELECT coalesce(max(number), 0) FROM segments)"
        with connected(self._run) as database:
            while not self._ending.wait(TAPE_S):
                now, segment = database.execute(query).fetchone()
                self.ahead = min(self.ahead, time.monotonic() - now)
                self.segments.append(segment)
                self.seen.append(time.monotonic())


@contextmanager
def connected(run: Victim) -> Iterator[sqlite3.Connection]:
    """To run.db, and to the samples beside it."""
    with closing(sqlite3.connect(f"file:{run.folder / 'run.db'}?mode=ro", uri=True)) as database:
        database.execute("ATTACH ? AS store", (f"file:{run.folder / 'samples-0.db'}?mode=ro",))
        yield database


@contextmanager
def taped(run: Victim) -> Iterator[Tape]:
    tape = Tape(run)
    tape._thread.start()
    try:
        time.sleep(1.0)  # for the clock
        yield tape
    finally:
        tape._ending.set()
        tape._thread.join(10.0)


def in_full_swing(run: Victim) -> None:
    """Everybody is there, and steps follow each other."""
    run.wait_until(lambda: set(run.processes()) >= EVERYBODY, "everybody to be there")
    wanted = run.steps_done + 4
    run.wait_until(lambda: run.steps_done >= wanted, "four more steps")


def entries(run: Victim, at: float = 0.0) -> list[Entry]:
    return [entry for entry in Journal(run.folder).entries() if entry.now >= at]


def until(run: Victim, at: float, wanted: Callable[[Entry], bool], otherwise: float = 0.0) -> float:
    """Seconds from `at` to the first entry that is wanted."""
    return next((entry.now - at for entry in entries(run, at) if wanted(entry)), otherwise)


def has(kind: type[Command], relay_is_not: int = -1) -> Callable[[Entry], bool]:
    return lambda entry: any(isinstance(c, kind) and getattr(c, "relay", 0) != relay_is_not for c in entry.commands)


def is_a(kind: type) -> Callable[[Entry], bool]:
    return lambda entry: isinstance(entry.event, kind)


def is_the_loss(kind: type) -> Callable[[Entry], bool]:
    """Its process ended, or control gave it up."""
    return lambda entry: isinstance(entry.event, kind) or has(GiveUp)(entry)


# ---------------------------------------------------------------------------------------------------------- isolation


class Change(NamedTuple):
    """A figure in a window before a fault and in one after it."""

    fault: str
    before: float
    after: float

    @property
    def share(self) -> float:
        return self.after / self.before - 1


def _follower(run: Victim) -> str:
    return next(name for name in sorted(run.processes()) if name.startswith("relay") and name != run.master())


BROKEN: dict[str, tuple[Callable[[Victim], str], signal.Signals]] = {
    "replica killed": (lambda run: "replica1", signal.SIGKILL),
    "replica stopped": (lambda run: "replica2", signal.SIGSTOP),
    "relay killed": (_follower, signal.SIGKILL),
    "relay stopped": (_follower, signal.SIGSTOP),
    "master relay killed": (lambda run: run.master(), signal.SIGKILL),
    "master relay stopped": (lambda run: run.master(), signal.SIGSTOP),
}


def step_intervals(run: Victim, tape: Tape, window_s: float, kinds: list[str]) -> list[Change]:
    """The trainer's step interval before and after each fault."""
    moments: list[tuple[str, float]] = []
    for kind in kinds:
        in_full_swing(run)
        time.sleep(window_s)
        whom, number = BROKEN[kind]
        moments.append((kind, tape.now))
        run.send(number, run.processes()[whom(run)])
        time.sleep(window_s)
    times = _steps(run)
    return [
        Change(kind, _interval(times, at - window_s, at), _interval(times, at, at + window_s)) for kind, at in moments
    ]


def _steps(run: Victim) -> list[float]:
    """When each step was complete for the first time."""
    done: dict[int, float] = {}
    for entry in entries(run):
        if isinstance(entry.event, Trained) and entry.event.mini_batch == 1:
            done.setdefault(entry.event.step, entry.now)
    return list(done.values())


def _interval(times: list[float], since: float, until: float) -> float:
    inside = [at for at in times if since <= at <= until]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else until - since


def generation_without_trainer(run: Victim, tape: Tape, window_s: float) -> Change:
    """Tokens per second of all replicas before the trainer's death, and after it while it is away."""
    in_full_swing(run)
    time.sleep(window_s)
    at = tape.now
    run.send(signal.SIGKILL, run.processes()["trainer0"])
    run.wait_until(lambda: until(run, at, is_a(TrainerJoined)), "the trainer to be back")
    away = min(window_s, until(run, at, is_a(TrainerJoined)))
    return Change("trainer killed", _tokens_per_s(run, at - window_s, at), _tokens_per_s(run, at, at + away))


def _tokens_per_s(run: Victim, since: float, until: float) -> float:
    """By what the replicas say of themselves with every heartbeat, extended to the ends of the window."""
    query = "SELECT source, now, value FROM metrics WHERE name = 'engine/decoded' AND now BETWEEN ? AND ? ORDER BY now"
    told: dict[str, list[tuple[float, float]]] = {}
    for source, now, value in run.query(query, since - 0.5, until + 0.5):
        told.setdefault(source, []).append((now, value))
    rates = [(own[-1][1] - own[0][1]) / _span([at for at, _ in own], since, until) for own in told.values()]
    return sum(rates)


def _span(told: list[float], since: float, until: float) -> float:
    """Who says nothing for longer than a heartbeat or two has done nothing then."""
    first = told[0] if told[0] - since < 2 else since
    return max(1e-3, (told[-1] if until - told[-1] < 2 else until) - first)


# ----------------------------------------------------------------------------------------------------------- recovery


class Recovery(NamedTuple):
    """Seconds from the fault: until it is known, until all of the work is with somebody, until that shows."""

    fault: str
    known: float
    again: float
    shows: float


def replica_recovery(run: Victim, tape: Tape, id: int, number: signal.Signals) -> Recovery:
    """Known; all its trajectories given to others; the first new token of one of them is stored."""
    at = tape.now
    run.send(number, run.processes()[f"replica{id}"])
    run.wait_until(lambda: _taken_over(run, id, at), f"others to go on with the work of replica {id}")
    known, again, moved = _taken_over(run, id, at) or (0.0, 0.0, {})
    if not moved:  # it had nothing in hand just then
        return Recovery(f"replica {_how(number)}", known, again, known)
    given = {one: at + when for one, when in moved.items()}
    run.wait_until(lambda: _gone_on(run, tape, given), f"a token of what replica {id} had in hand")
    return Recovery(f"replica {_how(number)}", known, again, min(_gone_on(run, tape, given)) - at)


def _gone_on(run: Victim, tape: Tape, given: dict[int, float]) -> list[float]:
    """When tokens of these samples were stored, or their end, since each of them was given to somebody."""
    with connected(run) as database:
        segments = database.execute("SELECT trajectory_id, number FROM segments").fetchall()
    stored = [(id, tape.when(number)) for id, number in segments if id in given]
    ended = [(e.event.meta.id, e.now) for e in entries(run, min(given.values())) if isinstance(e.event, Finished)]
    return [when for id, when in stored + ended if when > given.get(id, float("inf"))]


def _taken_over(run: Victim, id: int, at: float) -> tuple[float, float, dict[int, float]] | None:
    """When the replica was given up, when the last of its trajectories had a new place, and when each of them had."""
    plane, held, known = ControlPlane(Journal(run.folder).begun), set[int](), 0.0
    moved: dict[int, float] = {}
    for entry in entries(run):
        plane.handle(entry.now, entry.event)
        replica = plane.state.fleet.replicas.get(id)
        if replica is None or entry.now < at or (replica.live and not known):  # what repack moves meanwhile is not lost
            held = set(replica.holds()) if replica else held
            continue
        known = known or entry.now - at
        given = [
            r.trajectory for c in entry.commands if isinstance(c, Generate) and c.replica != id for r in c.requests
        ]
        moved |= {one: entry.now - at for one in given if one in held and one not in moved}
        held &= set(plane.state.ledger.samples)
        if known and held <= set(moved):
            return known, max(moved.values(), default=known), moved
    return None


def master_recovery(run: Victim, tape: Tape, number: signal.Signals) -> Recovery:
    """Known; a version is on its way to another master; that one has it."""
    master = run.master()
    at = tape.now
    run.send(number, run.processes()[master])
    publishes = has(Publish, relay_is_not=int(master[5:]))
    run.wait_until(lambda: until(run, at, publishes), "a version to go to another master")
    again = until(run, at, publishes)
    run.wait_until(lambda: until(run, at + again, is_a(VersionStored)), "that version to be stored")
    known = until(run, at, is_the_loss(RelayLost), again)
    return Recovery(f"master relay {_how(number)}", known, again, again + until(run, at + again, is_a(VersionStored)))


def trainer_recovery(run: Victim, tape: Tape, number: signal.Signals) -> Recovery:
    """Known; back with its checkpoint; a component is trained."""
    at = tape.now
    run.send(number, run.processes()["trainer0"])
    run.wait_until(lambda: until(run, at, is_a(TrainerJoined)), "the trainer to be back")
    again = until(run, at, is_a(TrainerJoined))
    run.wait_until(lambda: until(run, at + again, is_a(Trained)), "a component to be trained")
    known = until(run, at, is_the_loss(TrainerLost), again)
    return Recovery(f"trainer {_how(number)}", known, again, again + until(run, at + again, is_a(Trained)))


def store_recovery(run: Victim, tape: Tape, number: signal.Signals) -> Recovery:
    """Known; back on its file; a sample is complete."""
    at = tape.now
    run.send(number, run.processes()["store0"])
    run.wait_until(lambda: until(run, at, is_a(StoreJoined)), "the store to be back")
    again = until(run, at, is_a(StoreJoined))
    run.wait_until(lambda: until(run, at + again, is_a(Finished)), "a sample")
    known = until(run, at, is_the_loss(StoreLost), again)
    return Recovery(f"store {_how(number)}", known, again, again + until(run, at + again, is_a(Finished)))


def controller_recovery(run: Victim) -> Recovery:
    """By our clock: another controller is there; all its workers are; a sample is complete."""
    joined = {"ReplicaJoined": REPLICAS, "RelayJoined": RELAYS, "TrainerJoined": 1, "StoreJoined": 1}
    wanted = joined | {"ControllerRestarted": 1}
    before = {kind: run.events(kind) for kind in (*wanted, "Finished")}
    began = time.monotonic()
    run.send(signal.SIGKILL, run.processes()["controller"])
    run.wait_until(lambda: run.events("ControllerRestarted") > before["ControllerRestarted"], "another controller")
    known = time.monotonic() - began
    run.wait_until(lambda: all(run.events(k) >= before[k] + n for k, n in wanted.items()), "all of its workers")
    again = time.monotonic() - began
    run.wait_until(lambda: run.events("Finished") > before["Finished"], "a sample")
    return Recovery("controller killed", known, again, time.monotonic() - began)


def _how(number: signal.Signals) -> str:
    return "stopped" if number == signal.SIGSTOP else "killed"
