"""What each kind of card could do as a trainer and as a replica, from the cost model: the figures of phase 1.

Rates are trained tokens per second, prompts included, so that both sides of the program have one unit. A replica's
depends on its batch, and that on how many replicas share what may be under way; `fleet_plan.py` therefore solves a few
times.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tailrace.config import Config, ConfigError, with_values
from tailrace.config.kinds import GpuKind
from tailrace.planner.fleet_program import FleetChoice, FleetProblem, KindSupply, ReplicaOption, TrainerOption
from tailrace.planner.placement import heads_divide, two_kinds
from tailrace.planner.sizing import fewest_ranks, longest_sequence
from tailrace.sim.cost_model import TRAINING_BYTES, CostModel, config_of_kind
from tailrace.sim.gpus import find
from tailrace.sim.provisioning import Provisioning, batch_of, group_s, provision_of, sample_s, share_of, training_step_s
from tailrace.sim.result import Result
from tailrace.sim.sizes import Sizes, sizes_of

WAITS = 0.03  # idle share from which on a trainer waits for data
FEW_HOSTS = 8  # up to so many, a trainer may have any number of cards; a larger one has whole hosts


class StageScale(NamedTuple):
    """What simulations have shown each stage to reach of its figures; generation by kind of card."""

    training: float = 1.0
    generating: Mapping[int, float] = MappingProxyType({})
    spare: float = 1.0  # of generation: below 1, more of it is planned, so that a trainer waits less

    def of_kind(self, kind: int) -> float:
        return self.spare * self.generating.get(kind, 1.0)


class ReplicaCosts(NamedTuple):
    """A shape that holds the model, and what it costs there."""

    kind: int
    ways: int
    costs: CostModel


def counted(config: Config) -> Config:
    """The same fleet with its one kind of card in a table, where there are no tables."""
    if config.kinds:
        return config
    if two_kinds(config):
        raise ConfigError(
            "cluster.trainer_gpu is another card than cluster.gpu, and it is not said how many there are of each; "
            f"write [cluster.cards.{config.cluster.gpu}] and [cluster.cards.{config.cluster.trainer_gpu}] with gpus"
        )
    cluster = config.cluster
    table = dict(cluster.cards.get(cluster.gpu, {})) | {"gpus": cluster.gpus, "gpus_per_host": cluster.gpus_per_host}
    return with_values(config, {"cluster.cards": cluster.cards | {cluster.gpu: table}, "split.colocated": "unset"})


class FleetFigures:
    """All that phase 1 asks of the cost model, computed once for a fleet; `tokens_per_s`: a throughput to reach."""

    def __init__(self, config: Config, tokens_per_s: float = 0.0) -> None:
        self.config = config
        self.sizes: Sizes = sizes_of(config.workload, config.run.seed)
        self.tokens = float(np.mean(self.sizes.sequences))
        self.work = self.tokens * config.workload.trajectories_per_step
        cards = config.cluster.cards
        self.kinds = tuple(
            [
                KindSupply(kind.name, kind.gpus, kind.gpus_per_host, find(kind.name, cards).dollars_per_hour)
                for kind in config.kinds
            ]
        )
        self.trainers = tuple(
            [each for number, kind in enumerate(config.kinds) for each in self._trainers(number, kind)]
        )
        self.shapes = [each for number, kind in enumerate(config.kinds) for each in self._shapes(number, kind)]
        self.too_far = frozenset(self._too_far(tokens_per_s))

    @property
    def too_small(self) -> tuple[str, ...]:
        """Kinds that hold neither a trainer nor a replica of the model."""
        used = {option.kind for option in self.trainers} | {shape.kind for shape in self.shapes}
        return tuple([kind.name for number, kind in enumerate(self.kinds) if number not in used])

    def problem(self, replicas: int, scale: StageScale, fresh: bool = True) -> FleetProblem:
        """With so many replicas sharing what may be under way. `fresh`: no site is too far for the fastest pace of its
        trainer; in a fleet in which that has to wait, versions are made less often."""
        trainers = tuple([each._replace(rate=each.rate * scale.training) for each in self.trainers])
        options = tuple([self._option(shape, replicas, scale.of_kind(shape.kind)) for shape in self.shapes])
        return FleetProblem(self.kinds, trainers, options, self.too_far if fresh else frozenset())

    def _option(self, shape: ReplicaCosts, replicas: int, scale: float) -> ReplicaOption:
        batch = batch_of(shape.costs, self.sizes, share_of(self.config, replicas))
        rate = scale * self.tokens / sample_s(shape.costs, self.sizes, batch)
        return ReplicaOption(shape.kind, shape.ways, rate)

    def rate_of(self, trainer: TrainerOption) -> float:
        """Without a scale."""
        return next(each.rate for each in self.trainers if (each.kind, each.gpus) == (trainer.kind, trainer.gpus))

    def shown_by(self, choice: FleetChoice, result: Result) -> dict[int, float]:
        """Kinds that generated in a simulation, and what they reached of the figures that they have without a scale.

        Tokens of a replica while it was busy tell the kinds apart; where the trainer waited for them, all of them
        together reached what was trained.
        """
        replicas, per_completion = sum(count for _, count in choice.replicas), self._per_completion
        shown: dict[int, float] = {}
        reached = 0.0
        for shape in self.shapes:
            chosen, decoded = choice.shape_of(shape.kind), result.decoded_by_kind.get(self.kinds[shape.kind].name, 0.0)
            if chosen and decoded and chosen[0].ways == shape.ways:
                rate = self._option(shape, replicas, 1.0).rate
                shown[shape.kind] = decoded * per_completion / rate
                reached += chosen[1] * decoded * per_completion
        waited = result.trainer_idle > WAITS and reached > result.tokens_per_s
        return {kind: scale * (result.tokens_per_s / reached if waited else 1.0) for kind, scale in shown.items()}

    @property
    def _per_completion(self) -> float:
        """Trained tokens for each that is decoded."""
        return self.tokens / float(self.sizes.completions.mean())

    # --------------------------------------------------------------------------------------------------------- trainers

    def _trainers(self, number: int, kind: GpuKind) -> list[TrainerOption]:
        if self.config.cluster.trainer_gpu not in ("", kind.name):
            return []  # the user has said who trains
        of_kind = _changed(self.config, cluster={"trainer_gpu": kind.name}, split={"trainer_gpus": kind.gpus})
        fewest = _fewest_cards(of_kind)
        sizes = [gpus for gpus in _trainer_sizes(kind, self.config.split.trainer_parallel) if gpus >= fewest > 0]
        return [TrainerOption(number, gpus, self.work / self._step_s(of_kind, gpus)) for gpus in sizes]

    def _step_s(self, config: Config, gpus: int) -> float:
        sized = _changed(config, split={"trainer_gpus": gpus})
        return training_step_s(sized, CostModel(sized), self.sizes)

    # --------------------------------------------------------------------------------------------------------- replicas

    def _shapes(self, number: int, kind: GpuKind) -> list[ReplicaCosts]:
        """Doubling ways within a host that hold the model and the longest sequence."""
        ways = [1 << power for power in range(min(kind.gpus, kind.gpus_per_host).bit_length())]
        found = [
            ReplicaCosts(number, each, CostModel(config_of_kind(self.config, kind._replace(ways=each))))
            for each in ways
            if heads_divide(self.config, each)
        ]
        return [each for each in found if each.costs.kv_capacity >= longest_sequence(self.config)]

    def _too_far(self, tokens_per_s: float) -> list[tuple[int, int]]:
        """Trainers and kinds at other sites: by the time that its first groups are done, a version is too old for the
        fastest pace of the trainer, or for the pace of the throughput that is asked for."""
        sites = [kind.site for kind in self.config.kinds]
        latency = [self._latency_s(number) for number in range(len(sites))]
        return [
            (option, number)
            for option, trainer in enumerate(self.trainers)
            for number, site in enumerate(sites)
            if site != sites[trainer.kind]
            and self._is_late(trainer.rate, tokens_per_s, self._crossing_s(sites[trainer.kind], site), latency[number])
        ]

    def _is_late(self, rate: float, tokens_per_s: float, crossing_s: float, latency_s: float) -> bool:
        schedule = self.config.schedule
        rule = Provisioning(self.work, rate, self.work / rate, crossing_s, latency_s, schedule.max_staleness)
        if rule.window_s <= 0.0 or not tokens_per_s:
            return rule.window_s <= 0.0
        asked = rule._replace(step_s=self.work / tokens_per_s)  # as slow as it may be
        every = max(schedule.publish_every, asked.least_publish_every)
        return asked._replace(publish_every=every).needed == inf

    def _latency_s(self, number: int) -> float:
        """Of a group on the shape of a kind that is fastest, with its even share of a step."""
        share = self.config.workload.trajectories_per_step / self.config.replicas
        shapes = [each.costs for each in self.shapes if each.kind == number]
        return min([group_s(each, self.sizes, batch_of(each, self.sizes, share)) for each in shapes], default=0.0)

    def _crossing_s(self, site: str, other: str) -> float:
        link = CostModel(self.config).between(site, other)
        return self.config.model.weight_bytes / link.bytes_per_s + link.latency_s


def _trainer_sizes(kind: GpuKind, unit: int) -> list[int]:
    """Any number of cards as far as that makes a difference, whole hosts beyond, and all there are."""
    few, host = min(kind.gpus, FEW_HOSTS * kind.gpus_per_host), kind.gpus_per_host
    sizes = {*range(1, few + 1), *range(host, kind.gpus + 1, host), kind.gpus}
    return sorted(each for each in sizes if each % unit == 0)


def _fewest_cards(config: Config) -> int:
    """That hold what training needs: our trainer's memory, or only the states where it has ways of its own."""
    costs = CostModel(config)
    states = ceil(TRAINING_BYTES * config.model.parameters / costs.trainer_gpu.memory_bytes)
    ours = fewest_ranks(config) if config.split.trainer_parallel == 1 else 1
    return max(states, ours) if ours else 0


def _changed(config: Config, **sections: dict[str, Any]) -> Config:
    """Without the checks of `with_values`, which a thousand sizes would wait for."""
    made = {name: msgspec.structs.replace(getattr(config, name), **values) for name, values in sections.items()}
    return msgspec.structs.replace(config, **made)


# ---------------------------------------------------------------------------------------------------------------- back


def config_of(config: Config, problem: FleetProblem, choice: FleetChoice) -> Config:
    """The fleet that a choice means: every kind with the cards that it needs, maybe none. Weights are published as
    seldom as the slowest link needs, where the staleness bound allows it."""
    cards = {name: dict(table) for name, table in config.cluster.cards.items()}
    for number, kind in enumerate(problem.kinds):
        shape = choice.shape_of(number)
        ways = {"tensor_parallel": shape[0].ways} if shape else {}
        cards[kind.name] |= {"gpus": _cards_for(kind, choice, number)} | ways
    made = with_values(
        config,
        {
            "cluster.cards": cards,
            "cluster.gpu": _generating(problem, choice),
            "cluster.trainer_gpu": problem.kinds[choice.trainer.kind].name,
            "split.trainer_gpus": choice.trainer.gpus,
        },
    )
    every = provision_of(made).least_publish_every
    link_waits = config.schedule.publish_every < every <= config.schedule.max_staleness
    return with_values(made, {"schedule.publish_every": every}) if link_waits else made


def _generating(problem: FleetProblem, choice: FleetChoice) -> str:
    """A kind that has replicas, and only generates if there is such a one."""
    kinds = [option.kind for option, _ in choice.replicas]
    apart = [kind for kind in kinds if kind != choice.trainer.kind]
    return problem.kinds[(apart or kinds)[0]].name


def _cards_for(kind: KindSupply, choice: FleetChoice, number: int) -> int:
    """The fewest on whose hosts a choice finds room; where shapes do not fill a host, some of them stay idle."""
    used, shape = choice.gpus_of(number), choice.shape_of(number)
    if shape is None:
        return used
    taken = choice.trainer.gpus if choice.trainer.kind == number else 0
    option, count = shape
    for gpus in range(used, kind.gpus):
        if sum(GpuKind(kind.name, gpus, kind.gpus_per_host, option.ways).replicas_on_hosts(taken)) >= count:
            return gpus
    return kind.gpus
