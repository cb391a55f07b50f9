"""A plan for several kinds of card, in phases.

1. The mixed-integer program (`fleet_program.py`) says who trains, who generates in which shape, and how many cards of
   each: for most throughput with the cards that are there or within a budget, or for a throughput at the least price.
2. The choice is placed (`placement_of`): trainer ranks on the first hosts of their kind, replicas on the others,
   versions from the fastest link to the slowest.
3. The simulator judges the few best: the program's choice, the best in which one kind generates alone, with a trainer
   of each other kind, and with a trainer one size larger and smaller. What it shows the stages to reach of their
   figures, for each kind of card, goes back into the program, for `ROUNDS` rounds or until nothing new comes out.

The schedule and its bounds are the user's. The points tried depend on results alone, so a plan is the same anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import isfinite
from typing import NamedTuple

import msgspec

from tailrace.config import Config, ConfigError, with_values
from tailrace.config.kinds import GpuKind
from tailrace.planner.fleet_program import (
    FleetChoice,
    FleetGoal,
    FleetProblem,
    ReplicaOption,
    TrainerOption,
    best_fleet,
)
from tailrace.planner.fleet_rates import WAITS, FleetFigures, StageScale, config_of, counted
from tailrace.planner.placement import NodeGroup, Placement
from tailrace.planner.search import AS_FAST, Evaluate, Progress, evaluator
from tailrace.planner.sizing import TrainerSize, size_trainer
from tailrace.sim.bound import bound
from tailrace.sim.cost_model import check_fit
from tailrace.sim.provisioning import provision_of
from tailrace.sim.result import Result

ROUNDS = 8  # of program and simulator; most have little to simulate
MORE = 0.95  # of its figures: what generation is taken to reach, where it was not enough
SOLUTIONS = 4  # of the program until its replicas' batches fit their number
JUDGED = 7  # candidates of a round
STEPS = 5  # of a simulation, once it is steady
BEATS, MOST_HEARTBEAT_S = 20, 30.0  # heartbeats of a step at most, and the time between two
MOST_IDLE = 0.9  # of a trainer from which anything is learnt of its speed
ALIKE = 0.02  # of the replicas may be others
COMES_NEAR = 0.7  # of the best throughput or price: others are not worth a simulation


class ProblemPart(NamedTuple):
    """Of the problem of phase 1: which trainers and replicas it has."""

    trains: Callable[[TrainerOption], bool] = lambda option: True
    generates: Callable[[ReplicaOption], bool] = lambda option: True
    fresh: bool = True  # no site is too far


WHOLE = ProblemPart()


class HostGroup(NamedTuple):
    """Hosts of a kind that have the same on them."""

    kind: GpuKind
    nodes: int
    ranks: int  # on each
    replicas: int


class FleetCandidate(msgspec.Struct, frozen=True):
    """A choice of the program, as a config, and what the simulator says of it."""

    config: Config
    choice: FleetChoice
    dollars: float  # an hour
    result: Result


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    asked: Config
    goal: FleetGoal
    best: FleetCandidate
    others: tuple[FleetCandidate, ...]  # best first
    hosts: tuple[HostGroup, ...]
    simulations: int
    trainer: TrainerSize | None = None  # None: no way of Tailrace's own to train fits
    too_small: tuple[str, ...] = ()  # kinds that hold neither a trainer nor a replica of the model

    @property
    def reached(self) -> bool:
        """A throughput that was asked for, within the simulator's own 1 %."""
        return self.best.result.tokens_per_s >= AS_FAST * self.goal.tokens_per_s


def plan_fleet(config: Config, goal: FleetGoal, progress: Progress | None = None, processes: int = 2) -> FleetPlan:
    """Of several kinds of card, or within a budget; ConfigError where no choice of cards can do it."""
    if config.costs.measured:
        raise ConfigError("[costs] are of the processes of one machine, which has no kinds of card; leave them out")
    fleet = counted(config)
    with evaluator(processes) as evaluate:
        search = FleetSearch(fleet, goal, evaluate, progress or (lambda done, total, text: None))
        while search.rounds < ROUNDS and search.judge():
            search.rounds += 1
        return search.conclude()


class FleetSearch:
    def __init__(self, config: Config, goal: FleetGoal, evaluate: Evaluate, progress: Progress) -> None:
        self.config = config
        self.goal = goal
        self.evaluate = evaluate
        self.progress = progress
        self.figures = FleetFigures(config, goal.tokens_per_s)
        self.scale = StageScale()
        self.late: dict[tuple[str, int], float] = {}  # from a trainer's site to a kind: too late for this pace
        self.rounds = 0
        self.found: dict[Config, FleetCandidate] = {}

    # ------------------------------------------------------------------------------------------------------- phase one

    def _solve(self, part: ProblemPart = WHOLE) -> FleetChoice | None:
        """The best choice of a part of the problem. A replica's batch depends on how many there are, and few large ones
        may do as well as many small ones: begin with several numbers."""
        counts = {self.config.replicas, *[each.config.replicas for each in self.found.values()]}
        settled = [choice for count in sorted(counts) if (choice := self._settled(count, part)) and choice.rate]
        return min(settled, key=self._preference, default=None)

    def _settled(self, replicas: int, part: ProblemPart) -> FleetChoice | None:
        """Solve until there are as many replicas as their batch was taken for."""
        choice = None
        for _ in range(SOLUTIONS):
            choice = best_fleet(self._problem(replicas, part), self.goal._replace(tokens_per_s=self._target))
            wanted = sum(count for _, count in choice.replicas) if choice else replicas
            if wanted == replicas:
                break
            replicas = wanted
        return choice

    def _preference(self, choice: FleetChoice) -> tuple[float, float]:
        dollars = choice.dollars(self.figures.kinds)
        return (dollars, -choice.rate) if self.goal.tokens_per_s else (-choice.rate, dollars)

    def _problem(self, replicas: int, part: ProblemPart = WHOLE) -> FleetProblem:
        whole = self.figures.problem(replicas, self.scale, part.fresh)
        kept = [number for number, option in enumerate(whole.trainers) if part.trains(option)]
        too_far = whole.too_far | self._seen_late() if part.fresh else whole.too_far
        far = frozenset((kept.index(trainer), kind) for trainer, kind in too_far if trainer in set(kept))
        return whole._replace(
            trainers=tuple([whole.trainers[number] for number in kept]),
            replicas=tuple([option for option in whole.replicas if part.generates(option)]),
            too_far=far,
        )

    def _seen_late(self) -> frozenset[tuple[int, int]]:
        """Trainers that are as fast as one beside which a kind was seen to get its versions too late."""
        return frozenset(
            (number, kind)
            for number, option in enumerate(self.figures.trainers)
            for (site, kind), rate in self.late.items()
            if self._site(option.kind) == site and option.rate >= rate
        )

    def _site(self, kind: int) -> str:
        return self.config.kinds[kind].site

    def _choices(self) -> Iterator[FleetChoice]:
        best = self._solve()
        if best is None and not self.found:
            raise ConfigError(self._refusal())
        if best is None or not self._is_promising(best, best):
            return  # by what was learnt since; the best that was simulated is the plan
        yield best
        parts = [ProblemPart(fresh=False), *self._alone()]  # the simulator keeps the staleness bound
        for part in parts if self.found else [*parts, *self._others(best)]:
            other = self._solve(part)
            if other and self._is_promising(other, best):
                yield other

    def _is_promising(self, other: FleetChoice, best: FleetChoice) -> bool:
        """At first what comes near the best; later what would be better than all that was simulated."""
        if not self.found:
            return self._comes_near(other, best)
        leader = min(self.found.values(), key=self._order)
        if self.goal.tokens_per_s:
            return leader.result.tokens_per_s < self._target or other.dollars(self.figures.kinds) < leader.dollars
        return other.rate > leader.result.tokens_per_s

    def _alone(self) -> list[ProblemPart]:
        """Each kind as the only one that generates: what it really reaches shows there."""
        kinds = sorted({shape.kind for shape in self.figures.shapes})
        return [ProblemPart(generates=lambda option, kind=kind: option.kind == kind) for kind in kinds]

    def _others(self, best: FleetChoice) -> list[ProblemPart]:
        """A trainer of another kind, or a size larger and smaller."""
        sizes = [option.gpus for option in self.figures.trainers if option.kind == best.trainer.kind]
        at = sizes.index(best.trainer.gpus)
        beside = [(best.trainer.kind, sizes[index]) for index in (at + 1, at - 1) if 0 <= index < len(sizes)]
        kinds = sorted({option.kind for option in self.figures.trainers} - {best.trainer.kind})
        return [
            *[ProblemPart(trains=lambda option, kind=kind: option.kind == kind) for kind in kinds],
            *[ProblemPart(trains=lambda option, one=one: (option.kind, option.gpus) == one) for one in beside],
        ]

    def _comes_near(self, other: FleetChoice, best: FleetChoice) -> bool:
        kinds = self.figures.kinds
        per_dollar = [each.rate / max(each.dollars(kinds), 1e-9) for each in (other, best)]
        return other.rate >= COMES_NEAR * best.rate and per_dollar[0] >= COMES_NEAR * per_dollar[1]

    def _refusal(self) -> str:
        if not self.figures.trainers or not self.figures.shapes:
            what = "trains" if not self.figures.trainers else "holds a replica of"
            size = f"{self.config.model.parameters / 1e9:.3g}B parameters"
            return f"no kind of card in [cluster.cards] {what} {size}; write more cards, or some with more memory"
        everything = best_fleet(self._problem(self.config.replicas), FleetGoal())
        if everything is None or not everything.rate:
            return (
                "no data would be fresh enough: versions take longer to the sites that generate than "
                f"schedule.max_staleness = {self.config.schedule.max_staleness} allows; write more"
            )
        if self.goal.tokens_per_s > everything.rate:
            return f"all cards together reach about {everything.rate:,.0f} tokens/s; write a lower --throughput"
        wanted = self.goal.tokens_per_s or 1e-3 * everything.rate
        cheapest = best_fleet(self._problem(self.config.replicas), FleetGoal(tokens_per_s=wanted))
        least = cheapest.dollars(self.figures.kinds) if cheapest else 0.0
        what = f"{wanted:,.0f} tokens/s" if self.goal.tokens_per_s else "a trainer and a replica"
        return f"{what} cost ${least:,.2f} an hour at least; write a larger --budget"

    # ---------------------------------------------------------------------------------------------------- judging

    def judge(self) -> bool:
        """Simulate the few best that have not been, and learn from them what stages reach of their figures; False:
        there is nothing more to try."""
        problem = self.figures.problem(self.config.replicas, StageScale())
        wanted = {config_of(self.config, problem, choice): choice for choice in self._choices()}
        new = self._new(wanted)
        if not new:
            return bool(wanted) and self._wants_more(next(iter(wanted)))
        self._simulate(new)
        self._learn([self.found[made] for made in new if made in self.found])
        return True

    def _new(self, wanted: dict[Config, FleetChoice]) -> dict[Config, FleetChoice]:
        """Of these, what has not been simulated; nor anything like it, unless the price of each card counts."""
        seen = [each.choice for each in self.found.values()]
        new: dict[Config, FleetChoice] = {}
        for made, choice in wanted.items():
            known = made in self.found if self.goal.tokens_per_s else any(are_alike(choice, one) for one in seen)
            if not known and len(new) < JUDGED:
                new[made] = choice
                seen.append(choice)
        return new

    def _wants_more(self, made: Config) -> bool:
        """The program still believes in a choice that was seen to miss the throughput: ask it for more generation."""
        known = self.found.get(made)
        if known is None or known.result.tokens_per_s >= self._target:
            return False
        self.scale = self.scale._replace(spare=self.scale.spare * MORE)
        return True

    def _simulate(self, new: dict[Config, FleetChoice]) -> None:
        before, total = len(self.found), len(self.found) + len(new)
        self.progress(before, total, "simulating the best fleets")
        results = self.evaluate([_quick(each) for each in new])
        for done, (made, result) in enumerate(zip(new, results, strict=True), before + 1):
            if result:
                dollars = new[made].dollars(self.figures.kinds)
                self.found[made] = FleetCandidate(made, new[made], dollars, result)
            self.progress(done, total, "simulating the best fleets")

    def _learn(self, judged: Sequence[FleetCandidate]) -> None:
        """What the stages reached of their figures, the program's own choice counting last. A fleet that a link makes
        late says nothing of that; where answers take too long, more replicas with fewer samples each are sooner done.
        """
        for each in judged:
            if _link_is_late(each.config):
                self._avoid(each)
        judged = [each for each in judged if not _link_is_late(each.config)]
        for each in reversed(judged):
            shown = self.figures.shown_by(each.choice, each.result)
            if each.result.trainer_idle <= WAITS:  # they were enough, and may be able to do more
                shown = {kind: max(scale, self.scale.generating.get(kind, 1.0)) for kind, scale in shown.items()}
            self.scale = self.scale._replace(generating={**self.scale.generating, **shown})
            busy = each.result.tokens_per_s / (1.0 - min(each.result.trainer_idle, MOST_IDLE))
            self.scale = self.scale._replace(training=busy / self.figures.rate_of(each.choice.trainer))
        if judged and judged[0].result.tokens_per_s < self._target:
            result = judged[0].result
            if self.rounds or result.trainer_idle <= WAITS:  # else what was shown is enough to go by
                missed = result.tokens_per_s / self.goal.tokens_per_s
                self.scale = self.scale._replace(spare=self.scale.spare * missed)

    def _avoid(self, late: FleetCandidate) -> None:
        """Beside a trainer of this pace, if it was kept waiting."""
        trainer = late.choice.trainer
        rate, site = self.figures.rate_of(trainer), self._site(trainer.kind)
        for option, _ in late.choice.replicas:
            if late.result.trainer_idle > WAITS and self._site(option.kind) != site:
                self.late[site, option.kind] = min(rate, self.late.get((site, option.kind), rate))

    @property
    def _target(self) -> float:
        return AS_FAST * self.goal.tokens_per_s

    def conclude(self) -> FleetPlan:
        if not self.found:
            raise ConfigError("no fleet gets through in the simulator; lower the rates in [faults]")
        ranked = sorted(self.found.values(), key=self._order)
        best = ranked[0]
        return FleetPlan(
            asked=self.config,
            goal=self.goal,
            best=best,
            others=tuple(ranked[1:]),
            hosts=(hosts := placement_of(best.config)),
            trainer=size_trainer(best.config, _placed(hosts), self.figures.tokens),
            simulations=len(self.found),
            too_small=self.figures.too_small,
        )

    def _order(self, each: FleetCandidate) -> tuple[float, ...]:
        """Cheapest of those that reach the throughput, or the fastest; of those within 1 % of it the cheapest."""
        rate, target = each.result.tokens_per_s, self.goal.tokens_per_s
        if target:
            return (0.0, each.dollars, -rate) if rate >= self._target else (1.0, -rate, each.dollars)
        fastest = max(other.result.tokens_per_s for other in self.found.values())
        return (0.0, each.dollars, -rate) if rate >= AS_FAST * fastest else (1.0, -rate, each.dollars)


def are_alike(one: FleetChoice, other: FleetChoice) -> bool:
    """The simulator cannot tell them apart: the trainer is the same, and so are the replicas but for a few."""
    counts, others = dict(_shapes(one)), dict(_shapes(other))
    differing = sum(abs(counts.get(shape, 0) - others.get(shape, 0)) for shape in {*counts, *others})
    same_trainer = (one.trainer.kind, one.trainer.gpus) == (other.trainer.kind, other.trainer.gpus)
    return same_trainer and differing <= ALIKE * sum(counts.values())


def _shapes(choice: FleetChoice) -> Iterator[tuple[tuple[int, int], int]]:
    return (((option.kind, option.ways), count) for option, count in choice.replicas)


def _quick(config: Config) -> Config:
    """For the judge: few steps, and as few heartbeats as steps of this length need, since nothing fails here. No
    replica reports its load more often than samples end there."""
    beats = min(BEATS, config.workload.trajectories_per_step / config.replicas)
    step_s = bound(config).step_s
    heartbeat_s = max(config.health.heartbeat_s, min(step_s / beats, MOST_HEARTBEAT_S))
    made = with_values(config, {"run.steps": _steps_of(config), "health.heartbeat_s": heartbeat_s})
    check_fit(made)
    return made


def _steps_of(config: Config) -> int:
    """That samples come too late shows once more steps are made than they may be old."""
    return STEPS if _in_time(config) else max(STEPS, 2 * config.schedule.max_staleness)


def _in_time(config: Config) -> bool:
    """Versions reach every site soon enough, however fast replicas are."""
    return isfinite(provision_of(config).needed)


def _link_is_late(config: Config) -> bool:
    """And not what a group takes, or not that alone."""
    rule = provision_of(config)
    return not isfinite(rule.needed) and isfinite(rule._replace(broadcast_s=0.0).needed)


# --------------------------------------------------------------------------------------------------------- phase two


def placement_of(config: Config) -> tuple[HostGroup, ...]:
    """Ranks and replicas on the hosts of each kind, hosts that are alike together."""
    trainer = config.trainer_kind
    groups: list[HostGroup] = []
    for kind in config.kinds:
        loads = list(_loads(kind, config.trainer_gpus if kind == trainer else 0))
        groups += [HostGroup(kind, len(list(alike)), *load) for load, alike in groupby(loads)]
    return tuple([group for group in groups if group.ranks or group.replicas])


def _loads(kind: GpuKind, taken: int) -> Iterator[tuple[int, int]]:
    """Ranks and replicas of each host: ranks fill hosts one after the other."""
    for first in range(0, kind.gpus, kind.gpus_per_host):
        cards = min(kind.gpus_per_host, kind.gpus - first)
        ranks = min(cards, max(0, taken - first))
        yield ranks, (cards - ranks) // kind.ways


def _placed(hosts: Sequence[HostGroup]) -> Placement:
    groups = [NodeGroup(group.nodes, group.ranks, group.replicas) for group in hosts]
    return Placement(groups=tuple(groups), ways=max(group.kind.ways for group in hosts))


def within(goal: FleetGoal) -> str:
    """The goal in words."""
    if goal.tokens_per_s:
        return f"the cheapest for {goal.tokens_per_s:,.0f} tokens/s"
    return f"the fastest for ${goal.budget:,.2f} an hour" if isfinite(goal.budget) else "the fastest with these cards"
