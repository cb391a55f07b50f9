"""Whole runs under seeded faults: each one finishes, and nothing is lost, trained twice or trained too late.

What is promised is checked twice: by `ControlPlane.check()` after every event, and by `Audit`, which knows nothing of
the plane's books and only listens to the events that go in and the commands that come out.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from audit import Audit
from tailrace.config.check import check
from tailrace.config.tree import (
    SCHEDULES,
    Cluster,
    Config,
    Faults,
    GpuSplit,
    Groups,
    Health,
    Lengths,
    Model,
    RelaySettings,
    Repack,
    Run,
    Schedule,
    Trainer,
    Turns,
    Workload,
)
from tailrace.protocol import Command, Event
from tailrace.sim.simulation import Simulation

SEEDS, CHUNK = 100, 5
SOAK_SEEDS = 1000
TROUBLED_S = 15.0  # without progress; then the faults pause
PATIENCE_S = 120.0  # a step takes some ten virtual seconds: whoever needs more to recover never will
MODEL = Model(parameters=494e6, layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64)  # qwen2.5-0.5b
KINDS = ("replica", "host", "relay", "master", "trainer", "controller", "slow", "partition")


def config_for(seed: int) -> Config:
    """A small fleet with its own schedule, settings and troubles."""
    draw = random.Random(f"config {seed}")
    kind = draw.choice(SCHEDULES)
    publish_every = draw.choice([1, 1, 2])
    behind = {"one_step": 1, "stream": 1}.get(kind, 0)
    least = behind + publish_every - 1
    many_turns = draw.random() < 0.3
    config = Config(
        model=MODEL,
        cluster=Cluster(gpus=draw.choice([8, 16, 32]), gpus_per_host=draw.choice([2, 4])),
        split=GpuSplit(trainer_share=draw.choice([0.25, 0.5])),
        workload=Workload(
            prompts_per_step=16,
            group_size=4,
            prompt_tokens=100,
            max_completion_tokens=4000,
            lengths=Lengths(median=draw.choice([500, 1000]), sigma=draw.choice([0.5, 1.0])),
            turns=Turns(mean=2.5, maximum=4, latency_s=1.0, tool_tokens=50) if many_turns else Turns(),
            reward_s=draw.choice([0.0, 0.0, 1.0]),
        ),
        schedule=Schedule(
            kind=kind,
            max_staleness=least + draw.randrange(3),
            staleness_policy=draw.choice(["drop", "wait"]),
            order=draw.choice(["fifo", "freshest"]),
            steps_ahead=1 if kind == "stream" else draw.choice([None, None, 0, 1]),
            publish_every=publish_every,
            in_flight_kv=draw.choice(["recompute", "keep"]),
        ),
        repack=Repack(enabled=draw.random() < 0.7, every_s=2.0),
        groups=Groups(deadline_s=draw.choice([30.0, 1e9, 1e9]), min_survivors=draw.choice([1, 2])),
        relay=RelaySettings(topology=draw.choice(["chain", "tree"]), keep_versions=draw.choice([2, 3])),
        health=Health(
            heartbeat_s=2.0, strikes=2, backoff_s=0.5, backoff_max_s=4.0, max_restarts=8, pull_deadline_s=8.0
        ),
        trainer=Trainer(mini_batches=draw.choice([1, 2, 4]), checkpoint_every=draw.choice([1, 2, 3])),
        faults=_faults(draw),
        run=Run(seed=seed, steps=draw.choice([4, 5, 6])),
    )
    check(config)
    return config


def _faults(draw: random.Random) -> Faults:
    """Some of the kinds of faults, so that each is also met without the others, at some ten a minute together."""
    kinds = draw.sample(KINDS, draw.randint(1, len(KINDS)))
    rates = {f"{kind}_per_hour": draw.choice([100.0, 200.0, 400.0]) for kind in kinds}
    for rare in ("trainer", "controller"):  # they must get from one checkpoint to the next, and hear from everybody
        if rare in kinds:
            rates[f"{rare}_per_hour"] /= 4
    reordered = draw.random() < 0.6
    return Faults(
        **rates,
        sample_failure=draw.choice([0.0, 0.02, 0.1]),
        delay_s=draw.choice([0.01, 0.3]) if reordered else 0.0,
        duplicate=draw.choice([0.0, 0.2]) if reordered else 0.0,
        restart_s=draw.choice([0.5, 2.0]),
    )


def pause_in_trouble(simulation: Simulation, audit: Audit) -> None:
    """Faults pause when a run is in trouble: it must recover by itself, and not because of the next restart."""
    faults = simulation.faults
    strike = faults._strike

    def strike_or_wait(rate: float, action: Callable[[], None]) -> None:
        if simulation.clock.now - audit.progress_at < TROUBLED_S:
            strike(rate, action)
        else:
            faults._schedule(rate, action)

    faults._strike = strike_or_wait


def run(seed: int) -> Simulation:
    config = config_for(seed)
    audit = Audit(config)

    def observe(now: float, event: Event, commands: list[Command]) -> None:
        audit.listen(now, event, commands)
        assert now - audit.progress_at < PATIENCE_S, "the run does not recover"
        simulation.plane.check()

    simulation = Simulation(config, observe)
    pause_in_trouble(simulation, audit)
    result = simulation.run()
    assert simulation.stopped == "all steps are done"
    assert len({step for step, _ in audit.mini_batches}) == config.run.steps
    assert result.staleness.max <= config.schedule.max_staleness, "by what the payloads say, too"
    audit.finish(simulation.plane)
    return simulation


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_run_finishes_and_keeps_its_promises(first):
    for seed in range(first, first + CHUNK):
        run(seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SEEDS, SOAK_SEEDS, CHUNK))
def test_a_thousand_runs_finish_and_keep_their_promises(first):
    for seed in range(first, first + CHUNK):
        run(seed)
