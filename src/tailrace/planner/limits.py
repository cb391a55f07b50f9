"""What does not fit anywhere on these machines, refused in a sentence that says what would.

`search.py` asks before it simulates. A config that describes a trainer with tensor, context or pipeline ways
(`split.trainer_parallel`) is not held to the memory of ours, which has none: only the simulator judges it then.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import msgspec

from tailrace.config import Config, ConfigError
from tailrace.planner.placement import exact_splits, two_kinds, ways_to_try
from tailrace.planner.sizing import engine_bytes, fewest_ranks, longest_sequence
from tailrace.sim.cost_model import ENGINE_MEMORY
from tailrace.sim.gpus import GPUS, rollout_card
from tailrace.sim.sharding import trainer_card


def check_limits(config: Config) -> None:
    """Raise ConfigError if no replica fits a host, no rank its card, or both together the cluster."""
    if config.costs.measured or not config.model.parameters:
        return
    if not fewest_ways(config):
        raise ConfigError(f"{_no_replica(config)}; {_instead(config)}")
    if config.split.trainer_parallel > 1:
        return
    if not fewest_ranks(config):
        raise ConfigError(f"{_no_rank(config)}; {_instead(config)}")
    if not fits_split(config) and not fits_shared(config):
        raise ConfigError(f"{_too_few(config)}; {_instead(config)}")


def fewest_ways(config: Config) -> int:
    """Cards of the smallest replica that holds the model and one sequence; 0: there is none."""
    return next((ways for ways in ways_to_try(config) if _serves(config, ways)), 0)


def fits_split(config: Config) -> bool:
    """Whether some split has enough cards for the trainer and a replica."""
    fewest = fewest_ranks(config)
    if two_kinds(config):
        return 0 < fewest <= config.trainer_gpus and 0 < fewest_ways(config) <= config.rollout_gpus
    sizes = [exact_splits(config, ways)[-1:] for ways in ways_to_try(config) if _serves(config, ways)]
    return 0 < fewest <= max((largest for size in sizes for largest in size), default=0)


def fits_shared(config: Config) -> bool:
    """Whether trainer and replicas fit together on all cards."""
    with_ways = [_changed(config, "split", tensor_parallel=ways) for ways in ways_to_try(config)]
    return any(0 < fewest_ranks(each, shared=True) <= config.cluster.gpus for each in with_ways)


def _serves(config: Config, ways: int) -> bool:
    needed = engine_bytes(_changed(config, "split", tensor_parallel=ways))
    return needed <= rollout_card(config.cluster).memory_bytes * ENGINE_MEMORY


def _changed(config: Config, section: str, **values: Any) -> Config:
    """Without the checks of `with_values`: what is tried here may be refused for other reasons."""
    return msgspec.structs.replace(config, **{section: msgspec.structs.replace(getattr(config, section), **values)})


# ------------------------------------------------------------------------------------------------------- what is wrong


def _no_replica(config: Config) -> str:
    cards = min(config.cluster.gpus, config.cluster.gpus_per_host)
    return (
        f"no replica of up to {cards} {rollout_card(config.cluster).name} holds {_parameters(config)} "
        f"({config.model.weight_bytes / 1e9:,.0f} GB) and one sequence of {longest_sequence(config):,} tokens"
    )


def _no_rank(config: Config) -> str:
    card = trainer_card(config)
    return (
        f"one sequence of {longest_sequence(config):,} tokens through {_parameters(config)} does not fit the "
        f"{card.memory_bytes / 1e9:.0f} GB of one {card.name}, however many ranks share the weights"
    )


def _too_few(config: Config) -> str:
    ranks, ways = fewest_ranks(config), fewest_ways(config)
    return (
        f"training {_parameters(config)} takes at least {ranks} {trainer_card(config).name} and a replica {ways} "
        f"{rollout_card(config.cluster).name}, more than there are ({config.size})"
    )


def _parameters(config: Config) -> str:
    return f"{config.model.parameters / 1e9:.3g}B parameters"


# ---------------------------------------------------------------------------------------------------------- what would


def _instead(config: Config) -> str:
    found = [words for change, each in _variants(config) if (words := _with_enough_cards(change, each))]
    if not found:
        return "no card of the catalogue is large enough: take a smaller model or shorter sequences"
    return f"write {', or '.join(found)}"


def _variants(config: Config) -> Iterator[tuple[str, Config]]:
    """What could be written instead, the least change first."""
    yield "", config
    if not _possible(config):
        yield "model.bytes_per_weight = 1 (fp8)", _changed(config, "model", bytes_per_weight=1.0)
    for changes in (_shorter_answers, _larger_cards):
        yield from _smallest(config, list(changes(config)))


def _smallest(config: Config, variants: list[tuple[str, Config]]) -> list[tuple[str, Config]]:
    """The first that fits these cards; or, where no number of cards would do, the first that fits more of them."""
    fitting = [each for each in variants if _fits(each[1])]
    larger = [each for each in variants if _possible(each[1])] if not fitting and not _possible(config) else []
    return (fitting or larger)[:1]


def _shorter_answers(config: Config) -> Iterator[tuple[str, Config]]:
    tokens = config.workload.max_completion_tokens
    while (tokens := tokens // 2) >= 1:
        yield f"workload.max_completion_tokens = {tokens}", _changed(config, "workload", max_completion_tokens=tokens)


def _larger_cards(config: Config) -> Iterator[tuple[str, Config]]:
    present = trainer_card(config).memory_bytes
    name = "trainer_gpu" if two_kinds(config) and fewest_ways(config) else "gpu"
    for card in sorted(GPUS, key=lambda card: (card.memory_bytes, card.dollars_per_hour)):
        if card.memory_bytes > present:
            yield f'cluster.{name} = "{card.name}"', _changed(config, "cluster", **{name: card.name})


def _possible(config: Config) -> bool:
    """With cards enough."""
    served = bool(fewest_ways(_of_whole_hosts(config)))
    return served and (config.split.trainer_parallel > 1 or bool(fewest_ranks(config)))


def _of_whole_hosts(config: Config) -> Config:
    return _changed(config, "cluster", gpus=max(config.cluster.gpus, config.cluster.gpus_per_host))


def _fits(config: Config) -> bool:
    return bool(fewest_ways(config)) and (config.split.trainer_parallel > 1 or fits_split(config))


def _with_enough_cards(change: str, config: Config) -> str:
    """The change, and more cards where it needs them too; empty: it would not be enough."""
    if _fits(config):
        return change
    gpus = enough_cards(_of_whole_hosts(config))
    return " and ".join(each for each in (change, f"cluster.gpus = {gpus}") if each) if gpus else ""


def enough_cards(config: Config) -> int:
    """The least cluster, of whole hosts where one is not enough, that has room for a trainer and a replica; 0: none."""
    if not _possible(config):
        return 0
    ranks, serving = max(1, fewest_ranks(config)), [ways for ways in ways_to_try(config) if _serves(config, ways)]
    return min((gpus for ways in serving for gpus in _clusters(config.cluster.gpus_per_host, ranks, ways)), default=0)


def _clusters(cards: int, ranks: int, ways: int) -> Iterator[int]:
    """Sizes that leave no card unused: one host, hosts that are alike, hosts that train beside one that generates."""
    if ranks + ways <= cards:
        yield ranks + ways
    for each in range(1, cards - ways + 1):
        if (cards - each) % ways == 0:
            yield cards * ceil(ranks / each)
    if cards % ways == 0:
        yield cards * (ceil(ranks / cards) + 1)
