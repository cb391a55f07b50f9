"""The mixed-integer program of a fleet against every choice there is, on fleets small enough to try them all."""

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config.kinds import GpuKind
from tailrace.planner.fleet_program import (
    FleetChoice,
    FleetGoal,
    FleetProblem,
    KindSupply,
    ReplicaOption,
    TrainerOption,
    best_fleet,
)

pytest.importorskip("scipy")


def every_choice(problem: FleetProblem) -> Iterator[FleetChoice]:
    """Placed card by card: the trainer on the first hosts of its kind, replicas on what each host has left."""
    for number, trainer in enumerate(problem.trainers):
        shapes = [[option for option in problem.replicas if option.kind == kind] for kind in range(len(problem.kinds))]
        ranges = [[(None, 0), *room(problem, number, trainer, options)] for options in shapes]
        for chosen in product(*ranges):
            yield FleetChoice(trainer, tuple((option, count) for option, count in chosen if option))


def room(problem, number, trainer, options):
    for option in options:
        if (number, option.kind) in problem.too_far:
            continue
        kind = problem.kinds[option.kind]
        cards = [1] * kind.gpus
        if trainer.kind == option.kind:
            cards[: trainer.gpus] = [0] * trainer.gpus
        hosts = [cards[first : first + kind.gpus_per_host] for first in range(0, kind.gpus, kind.gpus_per_host)]
        most = sum(sum(host) // option.ways for host in hosts)
        yield from ((option, count) for count in range(1, most + 1))


def by_hand(problem: FleetProblem, goal: FleetGoal) -> tuple[float, float] | None:
    """Throughput and dollars of the best."""
    allowed = [each for each in every_choice(problem) if each.dollars(problem.kinds) <= goal.budget + 1e-9]
    figures = [(each.rate, each.dollars(problem.kinds)) for each in allowed if each.rate > 0]
    if goal.tokens_per_s:
        reaching = [each for each in figures if each[0] >= goal.tokens_per_s]
        return min(reaching, key=lambda each: each[1], default=None)
    best = max((rate for rate, _ in figures), default=0.0)
    equal = [each for each in figures if each[0] >= best * (1 - 1e-6)]
    return min(equal, key=lambda each: each[1], default=None)


@st.composite
def problems(draw):
    count = draw(st.integers(1, 3))
    whole = st.integers(1, 20)
    kinds = tuple(
        KindSupply(f"k{number}", draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(whole) / 4)
        for number in range(count)
    )
    speeds = [draw(whole) for _ in kinds]
    trainers = tuple(
        TrainerOption(number, gpus, speeds[number] * gpus**0.9)
        for number, kind in enumerate(kinds)
        for gpus in range(1, kind.gpus + 1)
    )
    replicas = tuple(
        ReplicaOption(number, ways, draw(whole) * ways**0.8)
        for number, kind in enumerate(kinds)
        for ways in (1, 2, 3)
        if ways <= kind.gpus_per_host
    )
    pairs = st.tuples(st.integers(0, len(trainers) - 1), st.integers(0, count - 1))
    return FleetProblem(kinds, trainers, replicas, draw(st.frozensets(pairs, max_size=4)))


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(["have", "budget", "throughput"]), st.integers(1, 40))
def test_the_program_equals_brute_force(problem, kind, amount):
    goals = {
        "have": FleetGoal(),
        "budget": FleetGoal(budget=amount / 2),
        "throughput": FleetGoal(tokens_per_s=float(amount)),
    }
    expected, found = by_hand(problem, goals[kind]), best_fleet(problem, goals[kind])
    if expected is None:
        assert found is None or found.rate == 0
        return
    assert found is not None
    if kind == "throughput":
        assert found.rate >= amount * (1 - 1e-5)
        assert found.dollars(problem.kinds) == pytest.approx(expected[1])
    else:
        assert found.rate == pytest.approx(expected[0], rel=1e-5)
        assert found.dollars(problem.kinds) == pytest.approx(expected[1])


def test_a_choice_that_does_not_divide_a_host_leaves_its_rest_unused():
    kinds = (KindSupply("H800", 8, 8, 2.0),)
    problem = FleetProblem(kinds, (TrainerOption(0, 2, 100.0),), (ReplicaOption(0, 4, 10.0),))
    chosen = best_fleet(problem, FleetGoal())
    assert chosen is not None
    assert chosen.replicas == ((problem.replicas[0], 1),)
    assert sum(GpuKind("H800", 8, 8, 4).replicas_on_hosts(2)) == 1
