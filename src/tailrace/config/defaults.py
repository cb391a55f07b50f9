"""Defaults that follow what is given, so that no default is ever the reason of a refusal.

With nothing given they are those of `tree.py`. A group of one has one survivor, a pool of 4,000 tokens gets answers
that fit into it, a trainer of 30 GPUs gets a larger cluster. `load` adds them to what a person has written; `render`
leaves out what would come back by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import ceil
from typing import Any

from tailrace.config.fields import UNSET, fields, read
from tailrace.config.files import nested
from tailrace.config.kinds import gpus_in, kinds_of
from tailrace.config.tree import AUTO, Config, Lengths

MEDIAN, SIGMA = 2000.0, 1.0  # of answers, where nothing is known of them
OF_THE_CAP = 8  # a median is at most this part of the longest answer
LONGEST_ANSWER = 16384
VLLM_START_S = 900.0
EVAL_EVERY = 10  # steps
TAIL_SHARE, TAIL_ALPHA = 0.05, 1.5
ZERO_IS_NONE = {f"workload.lengths.{name}" for name in ("median", "sigma", "tail_share", "tail_alpha")}
CARDS = "cluster.cards"
FLEET = ("cluster.gpus", "cluster.gpus_per_host", "split.colocated")
LOCATIONS = tuple(f"workload.lengths.{name}" for name in ("median", "mean", "p99"))


class Settings:
    """What is given, what has been derived of it so far, and the default of everything else."""

    def __init__(self, given: Mapping[str, Any], context: int) -> None:
        self.given = given
        self.context = context  # most tokens of one sequence that the model can take; 0: unknown
        self.derived: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key in self.derived:
            return self.derived[key]
        return self.given[key] if key in self.given else _plain(key)

    @property
    def measured(self) -> bool:
        return self["costs.decode_step"] > 0 or self["costs.decode_sequence"] > 0

    @property
    def kv_pool(self) -> int:
        return self["rollout.kv_tokens"] or self.given.get("costs.kv_tokens", 0)


def follow(given: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Every default that depends on what is given, by dotted key."""
    settings = Settings(given, context)
    for key, rule in FOLLOWING.items():
        if key not in given or (key in ZERO_IS_NONE and not given[key]):
            settings.derived[key] = rule(settings)
    return settings.derived


def fleet_of(config: Config) -> dict[str, Any]:
    """The machines that are there, whatever is tried on them; of several kinds, their tables say how many."""
    keys = [key for key in FLEET if key != "cluster.gpus" or not config.kinds]
    return {key: UNSET if (value := read(config, key)) is None else value for key in keys}


def following_fleet(config: Config) -> dict[str, Any]:
    """The machines that the other settings would ask for, if nobody said how many there are."""
    others = {key: read(config, key) for key in fields() if key not in FLEET}
    return {key: value for key, value in follow(others, config.model.context).items() if key in FLEET}


@cache
def _plain(key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(Lengths(), name) if section == "workload.lengths" else read(Config(), key)


# ----------------------------------------------------------------------------------------------------------- lengths


def _law(settings: Settings) -> str:
    if settings["workload.lengths.file"] and not _locations(settings):
        return "empirical"
    tail = settings["workload.lengths.tail_share"] or settings["workload.lengths.tail_alpha"]
    return "mixture" if tail else "lognormal"


def _locations(settings: Settings) -> list[str]:
    """The given figures that say where the lengths lie."""
    return [key for key in LOCATIONS if settings.given.get(key)]


def _longest_answer(settings: Settings) -> int:
    """Half of what holds a sequence, and above the usual length."""
    usual = max(settings.given.get(key, 0) for key in LOCATIONS[:2])
    wanted = LONGEST_ANSWER if usual < LONGEST_ANSWER else OF_THE_CAP * usual
    holds = [tokens // 2 for tokens in (settings.context, settings.kv_pool) if tokens]
    return max(1, int(min(wanted, *holds))) if holds else int(wanted)


def _prompt_tokens(settings: Settings) -> int:
    longest = settings["workload.max_completion_tokens"]
    room = [tokens - longest for tokens in (settings.context, settings.kv_pool) if tokens]
    return max(0, min(_plain("workload.prompt_tokens"), *room)) if room else _plain("workload.prompt_tokens")


def _median(settings: Settings) -> float:
    law = settings["workload.lengths.law"]
    if law == "empirical" or _locations(settings):
        return 0.0
    return min(MEDIAN, settings["workload.max_completion_tokens"] / OF_THE_CAP)


def _sigma(settings: Settings) -> float:
    has_spread = settings["workload.lengths.law"] in ("lognormal", "mixture")
    return SIGMA if has_spread and len(_locations(settings)) < 2 else 0.0


def _of_a_tail(value: float) -> Callable[[Settings], float]:
    return lambda settings: value if settings["workload.lengths.law"] == "mixture" else 0.0


def _turns(settings: Settings) -> int:
    mean = settings["workload.turns.mean"]
    return 1 if mean == 1 else ceil(2 * mean)


# ---------------------------------------------------------------------------------------------------------- schedule


def _max_staleness(settings: Settings) -> int:
    """Enough for the schedule to find data that is fresh enough."""
    kind, ahead = settings["schedule.kind"], settings["schedule.steps_ahead"]
    behind = {"one_step": 1, "stream": 1 if ahead is None else int(ahead)}.get(kind, 0)
    return max(_plain("schedule.max_staleness"), behind + settings["schedule.publish_every"] - 1)


def _emulated_like(other: str) -> Callable[[Settings], str]:
    return lambda settings: "emulated" if settings[other] == "emulated" else "native"


def _start_s(settings: Settings) -> float:
    """vLLM compiles and measures before it is ready."""
    return VLLM_START_S if settings["rollout.engine"] == "vllm" else _plain("local.start_s")


# ----------------------------------------------------------------------------------------------------------- cluster


def _gpus_per_host(settings: Settings) -> int:
    usual, ways = _plain("cluster.gpus_per_host"), settings["split.tensor_parallel"]
    return ways if ways > usual and ways % usual else usual


def _gpus(settings: Settings) -> int:
    """Whole hosts for the trainer and one replica."""
    if counted := gpus_in(_cards(settings)):
        return counted
    trainer = max(settings["split.trainer_gpus"], settings["split.trainer_parallel"])
    needed, host = trainer + settings["split.tensor_parallel"], settings["cluster.gpus_per_host"]
    usual = _plain("cluster.gpus")
    return usual if needed <= usual else ceil(needed / host) * host


def _cards(settings: Settings) -> dict[str, Any]:
    """The tables [cluster.cards.NAME], given as a whole or value by value."""
    values = {key: value for key, value in settings.given.items() if key == CARDS or key.startswith(f"{CARDS}.")}
    return nested(values).get("cluster", {}).get("cards", {})


def _gpu(settings: Settings) -> str:
    """Of several kinds: one that generates, so the first that does not train."""
    names = [kind.name for kind in kinds_of(_cards(settings), 1, 1)]
    if not names:
        return _plain("cluster.gpu")
    trainer = settings["cluster.trainer_gpu"] or names[0]
    return next((name for name in names if name != trainer), names[0])


def _colocated(settings: Settings) -> bool | None:
    alone = settings["cluster.gpus"] == 1 and not gpus_in(_cards(settings))  # cards of a kind take no turns
    return True if alone and not settings.measured else None


def _kv_tokens(settings: Settings) -> int:
    """A pool that nobody has measured is no limit."""
    if not settings.measured or settings["rollout.kv_tokens"]:
        return 0
    longest = settings["workload.prompt_tokens"] + settings["workload.max_completion_tokens"]
    return settings["rollout.max_running"] * longest


def _replicas(settings: Settings) -> int | str:
    """Every card of the machine, where a model is really trained on it."""
    trains = settings["model.path"] and settings["rollout.engine"] != "emulated" and not settings.measured
    return AUTO if trains else _plain("local.replicas")


def _eval_every(settings: Settings) -> int:
    """Who wants the best versions wants to know which they are: in so many steps, and only of published versions."""
    if not (settings["eval.keep_best"] or settings["eval.patience"]):
        return _plain("eval.every")
    published = settings["schedule.publish_every"]
    return ceil(EVAL_EVERY / published) * published


def _filter(settings: Settings) -> str:
    """Who sets filters wants them, and who says how many groups they may leave out wants one."""
    if any(key.startswith("filters.") for key in settings.given):
        return "all"
    return "zero_advantage" if "groups.max_filtered" in settings.given else _plain("groups.filter")


# Each may use those before it.
FOLLOWING: dict[str, Callable[[Settings], Any]] = {
    "workload.lengths.law": _law,
    "workload.max_completion_tokens": _longest_answer,
    "workload.prompt_tokens": _prompt_tokens,
    "workload.lengths.median": _median,
    "workload.lengths.sigma": _sigma,
    "workload.lengths.tail_share": _of_a_tail(TAIL_SHARE),
    "workload.lengths.tail_alpha": _of_a_tail(TAIL_ALPHA),
    "workload.turns.maximum": _turns,
    "task.max_turns": lambda settings: 3 if settings["task.tools"] or settings["task.name"] == "calculator" else 1,
    "workload.group_size": lambda settings: max(_plain("workload.group_size"), settings["groups.min_survivors"]),
    "groups.min_survivors": lambda settings: min(_plain("groups.min_survivors"), settings["workload.group_size"]),
    "workload.prompts_per_step": lambda settings: max(
        _plain("workload.prompts_per_step"), settings["trainer.mini_batches"]
    ),
    "trainer.mini_batches": lambda settings: min(_plain("trainer.mini_batches"), settings["workload.prompts_per_step"]),
    "eval.every": _eval_every,
    "groups.filter": _filter,
    "trainer.ranks": lambda settings: max(_plain("trainer.ranks"), settings["local.ranks"] or 0),
    "schedule.max_staleness": _max_staleness,
    "health.backoff_s": lambda settings: min(_plain("health.backoff_s"), settings["health.backoff_max_s"]),
    "health.backoff_max_s": lambda settings: max(_plain("health.backoff_max_s"), settings["health.backoff_s"]),
    "rollout.engine": _emulated_like("trainer.engine"),
    "trainer.engine": _emulated_like("rollout.engine"),
    "local.replicas": _replicas,
    "local.start_s": _start_s,
    "split.trainer_parallel": lambda settings: (
        settings["split.trainer_tensor_parallel"] * settings["split.trainer_pipeline_parallel"]
    ),
    "cluster.gpu": _gpu,
    "cluster.gpus_per_host": _gpus_per_host,
    "cluster.gpus": _gpus,
    "split.colocated": _colocated,
    "costs.kv_tokens": _kv_tokens,
}
