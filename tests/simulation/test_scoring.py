"""Time that judges take is not taken from generation, and the bound on staleness holds all the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from audit import Audit
from tailrace.config import load
from tailrace.protocol import SCORING_S, Command, Event, GenerationResumed, ScoringStarted
from tailrace.sim.cost_model import CostModel
from tailrace.sim.engine import SimEngine, SimSequence
from tailrace.sim.episodes import SimTurn
from tailrace.sim.result import Result
from tailrace.sim.simulation import Simulation

OWN_BOX = Path(__file__).parents[2] / "examples/clusters/own_box.toml"
BOUND, STEPS = 16, 12
SMALL = f"--workload.group_size 4 --schedule.max_staleness {BOUND} --run.steps {STEPS}"


def simulate(kind: str, *words: str) -> tuple[Result, Simulation, Counter[type]]:
    config = load([OWN_BOX], [*SMALL.split(), "--schedule.kind", kind, *words])
    audit, events = Audit(config), Counter[type]()

    def observe(now: float, event: Event, commands: list[Command]) -> None:
        events[type(event)] += 1
        audit.listen(now, event, commands)
        if events.total() % 100 == 0:
            simulation.plane.check()

    simulation = Simulation(config, observe, timeline=True)
    result = simulation.run()
    audit.finish(simulation.plane)
    return result, simulation, events


@pytest.mark.parametrize("kind", ["one_step", "partial", "trajectory"])
def test_half_a_minute_of_scoring_hardly_slows_generation(kind: str) -> None:
    quick, _, _ = simulate(kind)
    slow, simulation, events = simulate(kind, "--workload.reward_s", "30")
    assert events[ScoringStarted] >= slow.trained * simulation.config.workload.group_size
    assert slow.tokens_per_s > 0.8 * quick.tokens_per_s
    assert slow.staleness.max <= BOUND


def test_what_is_scored_quickly_costs_no_event() -> None:
    _, _, events = simulate("partial", "--workload.reward_s", str(SCORING_S))
    assert events[ScoringStarted] == events[GenerationResumed] == 0


def test_a_replica_that_has_only_judges_to_wait_for_is_shown_so() -> None:
    _, simulation, _ = simulate("sync", "--workload.reward_s", "30")
    assert simulation.meter.timeline is not None
    spent = [span.end - span.start for span in simulation.meter.timeline if span.state == "scoring"]
    assert sum(spent) >= 30 * STEPS


def test_slow_tools_make_room_for_others() -> None:
    tools = ["--workload.turns.mean", "3", "--workload.turns.maximum", "5"]
    quick, _, _ = simulate("partial", *tools)
    slow, _, events = simulate("partial", *tools, "--workload.turns.latency_s", "10")
    assert events[GenerationResumed] > 1000
    assert slow.tokens_per_s > 0.8 * quick.tokens_per_s
    assert slow.staleness.max <= BOUND


# ------------------------------------------------------------------------------------------------- the modelled engine


def called(others: int) -> tuple[SimEngine, SimSequence, float]:
    """An engine with a sequence whose first turn is over, and so many long ones beside it; and the time."""
    config = load([OWN_BOX], ["--rollout.max_running", "10000"])
    engine = SimEngine(CostModel(config), 0.0)
    sequence = SimSequence(0, 0, 100, (SimTurn(50, 5.0, 20), SimTurn(50, 0.0, 0)))
    engine.submit(0.0, [sequence])
    now = engine.next_change()
    assert engine.ended_turns(now) == [sequence]
    length = int(engine.capacity) // max(1, others)
    engine.submit(now, [SimSequence(id, id, length, (SimTurn(1000, 0.0, 0),)) for id in range(1, others + 1)])
    return engine, sequence, max(now, engine.stall_until)


def test_a_call_holds_no_kv_and_goes_on_from_what_nobody_needed() -> None:
    engine, sequence, now = called(others=0)
    assert (engine.kv, sequence.status) == (0.0, "calling")
    engine.finish_call(now, sequence)
    assert sequence.status == "running"
    assert engine.stall_until - now == pytest.approx(engine.costs.prefill(20, 150))


def test_a_call_whose_kv_was_needed_begins_by_reading_everything_again() -> None:
    engine, sequence, now = called(others=50)
    engine.finish_call(now, sequence)
    assert sequence.status == "waiting", "the cache is full: its turn comes when there is room"
    for id in range(1, 51):
        if id in engine.held:
            engine.cancel(now, id)
    assert sequence.status == "running"
    assert engine.stall_until - now >= engine.costs.prefill(170, 0)
