"""Four replicas, two of them four times slower, lose nothing; and the cheapest are enough where the trainer is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit import Audit
from tailrace.config.load import load
from tailrace.protocol import Activate, Command, Event, PriceChanged
from tailrace.sim.result import Result
from tailrace.sim.simulation import Simulation

HEAVY_TAIL = Path(__file__).parents[2] / "examples" / "heavy_tail.toml"
GENERATION_IS_THE_LIMIT = ["--workload.prompts_per_step", "64", "--costs.train_token", "0.000003"]
TRAINING_IS_THE_LIMIT = ["--costs.train_token", "0.0002", "--rollout.prices", "[1, 2, 3, 4]"]


def simulated(speeds: str, *settings: str) -> Result:
    words = ["--rollout.speeds", speeds, "--run.steps", "30", *GENERATION_IS_THE_LIMIT, *settings]
    return Simulation(load([HEAVY_TAIL], words)).run()


@pytest.mark.parametrize("kind", ["adaptive", "trajectory"])
def test_a_mixed_fleet_does_what_its_replicas_can_do(kind: str) -> None:
    schedule = ["--schedule.kind", kind]
    fast, slow, mixed, equal = (
        simulated(speeds, *schedule) for speeds in ("[1]", "[0.25]", "[1, 1, 0.25, 0.25]", "[0.625]")
    )
    assert mixed.tokens_per_s >= 0.95 * (fast.tokens_per_s + slow.tokens_per_s) / 2
    assert mixed.step_s <= 1.05 * equal.step_s


def test_in_rounds_the_fast_replicas_take_over_what_would_keep_all_waiting() -> None:
    mixed, equal = (simulated(speeds, "--schedule.kind", "one_step") for speeds in ("[1, 1, 0.25, 0.25]", "[0.625]"))
    assert mixed.step_s <= 1.05 * equal.step_s


class Priced:
    """A run in which the trainer takes no more than one replica makes; every promise is checked at every event."""

    def __init__(self, *settings: str) -> None:
        config = load([HEAVY_TAIL], [*TRAINING_IS_THE_LIMIT, "--run.steps", "30", *settings])
        self.audit = Audit(config)
        self.simulation = Simulation(config, self._see)
        self.told: list[Activate] = []

    def _see(self, now: float, event: Event, commands: list[Command]) -> None:
        self.audit.listen(now, event, commands)
        self.simulation.plane.check()
        self.told += [command for command in commands if isinstance(command, Activate)]

    def run(self) -> Result:
        result = self.simulation.run()
        self.audit.finish(self.simulation.plane)
        return result

    def at_work(self) -> list[int]:
        return [one.id for one in self.simulation.plane.state.fleet.replicas.values() if not one.resting]


@pytest.mark.parametrize("kind", ["adaptive", "partial"])
def test_one_replica_is_enough_and_it_is_the_cheapest(kind: str) -> None:
    run = Priced("--schedule.kind", kind)
    result = run.run()
    assert run.at_work() == [0]
    assert result.trainer_idle < 0.05


def test_when_prices_change_others_are_called_and_none_is_lost_or_doubled() -> None:
    run = Priced()
    network: list[Event] = [PriceChanged((0,), 9.0)]
    run.simulation.clock.at(40.0, lambda: run.simulation._network.send(None, network[0]))  # pyright: ignore
    run.run()
    assert run.at_work() == [1]
    assert (0, False) in [(one.replica, one.active) for one in run.told]


def test_a_fleet_with_prices_survives_losses() -> None:
    faults = [
        "--faults.replica_per_hour",
        "400",
        "--faults.controller_per_hour",
        "100",
        "--faults.slow_per_hour",
        "200",
    ]
    run = Priced("--schedule.kind", "trajectory", *faults, "--faults.restart_s", "5", "--rollout.speeds", "[1, 0.25]")
    run.run()
    assert {one.active for one in run.told} == {True, False}
