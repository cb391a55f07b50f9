"""The little world of `test_machine.py` with a stranger in it, who is cut off at any time: whatever it hands in, and
whoever is lost meanwhile, nothing of it is trained that no checker has had, and nothing twice."""

from __future__ import annotations

import random

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from test_machine import ACTIONS, GUEST, QUICK, REPLICAS, Fleet, evaluated, small, troubled

from tailrace.config.tree import Config, Local, Strangers
from tailrace.protocol import (
    CheckFailed,
    Command,
    CutOff,
    Evaluate,
    Event,
    Finished,
    Generate,
    GenerationResumed,
    HandedIn,
    Heartbeats,
    HostJoined,
    Late,
    ScoringStarted,
    TimerFired,
    TrajectoryMeta,
    WorkerRefused,
    WorkerRevoked,
)

STRANGER, CHECKER = REPLICAS, 0


def with_strangers(seed: int) -> Config:
    """Without rounds, which a stranger could hold up."""
    config, draw = (evaluated if seed % 2 else small)(seed), random.Random(f"strangers {seed}")
    kind = draw.choice(["trajectory", "adaptive", "partial"])
    schedule = msgspec.structs.replace(config.schedule, kind=kind)
    return msgspec.structs.replace(
        config,
        schedule=schedule,
        strangers=Strangers(checkers=1, check_share=draw.choice([0.0, 0.5, 1.0]), hand_in_s=draw.choice([5.0, 600.0])),
        local=Local(listen="127.0.0.1", replicas=REPLICAS),
        health=msgspec.structs.replace(config.health, lease_s=draw.choice([0.0, 6.0, 1e9])),
    )


class StrangerFleet(Fleet):
    guest = HostJoined(GUEST, (STRANGER,), worker="alice", salt=7)
    cut_off = 0

    def obey(self, command: Command) -> None:
        self.cut_off += isinstance(command, CutOff) and command.role == "replica"
        super().obey(command)

    def generate(self, command: Generate | Evaluate) -> None:
        """A stranger hands in, and has no judges; a checker finds something wrong with few of them."""
        before = len(self.answers)
        super().generate(command)
        judges = ScoringStarted | GenerationResumed
        said = [one for one in self.answers[before:] if command.replica != STRANGER or not isinstance(one, judges)]
        self.answers[before:] = [self.as_stranger(command, one) for one in said]

    def as_stranger(self, command: Generate | Evaluate, answer: Event) -> Event:
        if command.replica == STRANGER and isinstance(answer, Finished):
            meta = msgspec.structs.replace(answer.meta, reward=None)
            return HandedIn(STRANGER, (meta,))
        if command.replica == CHECKER and isinstance(answer, Finished) and answer.meta.id % 97 == 13:
            return CheckFailed(CHECKER, answer.meta.id, answer.meta.attempt, "it lied")
        return answer

    def death(self, number: int) -> Event:
        """Its machine leaves more rarely than others die."""
        return super().death(number if number % 8 != 7 or number % 512 == 7 else number - 1)

    def act(self, choice: int, number: int) -> None:
        if choice == 15 and number % 3 == 0:
            self.hear(nonsense_of_strangers(random.Random(number)))
        elif choice == 10 and number % 3 == 0:
            self.now += number % 4
            late = Late("replica", STRANGER, self.incarnations.get(("replica", STRANGER), 0), number % 9)
            self.hear(Heartbeats((late,)))
            self.hear(TimerFired("health"))
        else:
            super().act(choice, number)


def nonsense_of_strangers(draw: random.Random) -> Event:
    def n(most: int = 4) -> int:
        return draw.randint(0, most)

    metas = tuple(TrajectoryMeta(n(40), n(3), n(500), 0, 0) for _ in range(n(3)))
    makers = [
        lambda: HandedIn(n(), metas),
        lambda: CheckFailed(n(), n(40), n(3), "?"),
        lambda: WorkerRevoked("nobody", "?"),
        lambda: WorkerRefused("alice" if n(40) == 0 else "nobody", "?"),
        lambda: HostJoined(GUEST + 1 + n(1), (), worker="alice", salt=n()),
    ]
    return draw.choice(makers)()


def play(seed: int, actions: list[tuple[int, int]]) -> StrangerFleet:
    fleet = StrangerFleet(with_strangers(seed))
    for choice, number in actions:
        if fleet.over:
            break
        fleet.act(choice, number)
    fleet.audit.finish(fleet.plane)
    return fleet


@given(st.integers(0, 200), ACTIONS)
@example(1, troubled(1)[:250])
@QUICK
def test_no_history_breaks_an_invariant_with_a_stranger_in_it(seed, actions):
    play(seed, actions)


def test_its_work_is_trained_and_it_is_cut_off_now_and_then():
    """Else the test above would say little."""
    fleets = [play(seed, quieter(seed)) for seed in range(12)]
    workers = [fleet.plane.state.strangers.workers["alice"] for fleet in fleets]
    assert sum(one.handed_in for one in workers) > 50
    assert sum(one.passed for one in workers) > 10
    assert any(one.excluded for one in workers)
    assert sum(fleet.cut_off for fleet in fleets) > 5


def quieter(seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    choices = [*[2, 3, 4, 7, 8, 9, 9, 9] * 6, 10, 10, 10, 10, 11, 12, 15]
    return [(draw.choice(choices), draw.randrange(10**6)) for _ in range(1500)]
