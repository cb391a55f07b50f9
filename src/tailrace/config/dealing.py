"""Which process of a run gets which GPU of its machine, and which share of that card's memory.

    trainer ranks   the first cards, one each; or those that `trainer.cards` names, one for each rank
    replicas        the cards that the trainer leaves, in turn; all, if it leaves none; or those of `rollout.cards`
    memory          a card's replicas divide `rollout.memory` of it among themselves; beside them, its ranks the rest

A pure function of settings and cards: `launch` deals before a run starts, `runtime.agent` for a machine that has
joined one, `tailrace doctor` for any cards that a person thinks of. `runtime.local` looks a process up when it starts
it. The shares of a card add up to at most 1. A deal that cannot work raises ConfigError, with one that would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from msgspec.structs import replace

from tailrace.config.card_memory import refuse_small
from tailrace.config.errors import ConfigError
from tailrace.config.tree import WITHOUT_CARDS, Config, Rollout, Trainer
from tailrace.types import Card, CardShare, Struct
from tailrace.wording import counted

TO_ITSELF = 0.85  # of a card's memory, for replicas that have it to themselves
BESIDE_TRAINER = 0.3  # for replicas that share it with a trainer: master weights, moments, gradients, activations
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Deal(Struct):
    """Of one machine. Nothing in it: everybody computes on the CPU."""

    replicas: tuple[CardShare, ...] = ()
    ranks: tuple[CardShare, ...] = ()

    def of(self, role: str, number: int) -> CardShare:
        """The numbers of a machine's replicas, and of its ranks, follow each other, wherever they begin."""
        dealt = {"replica": self.replicas, "trainer": self.ranks}.get(role, ())
        return dealt[number % len(dealt)] if dealt else CardShare()

    def unused(self, cards: int) -> list[int]:
        """Cards that nobody has."""
        used = {card for placement in (*self.replicas, *self.ranks) for card in placement.cards}
        return [card for card in range(cards) if card not in used]


def deal_here(config: Config, cards: Sequence[Card]) -> Deal:
    """For the machine that the run is started on."""
    _refuse_lists_without_cards(config, len(cards))
    return _deal(config, cards, config.local.replicas, ranks_here(config))


def deal_elsewhere(config: Config, cards: Sequence[Card], replicas: int, ranks: int = 0) -> Deal:
    """For a machine that has joined: the numbers of cards in the settings are those of the run's own machine."""
    return _deal(_without_numbers(config), cards, replicas, ranks)


def replicas_for(config: Config, cards: int) -> int:
    """What `local.replicas = "auto"` means with so many cards."""
    if not cards or not uses_cards(config.rollout):
        return WITHOUT_CARDS
    return len(_places(config, cards, _rank_cards(config, cards, ranks_here(config))))


def resolved(config: Config, cards: int) -> Config:
    """The same settings with a number of replicas, which is all that the processes of a run know."""
    return with_replicas(config, replicas_for(config, cards)) if config.local.is_auto else config


def with_replicas(config: Config, replicas: int) -> Config:
    return replace(config, local=replace(config.local, replicas=replicas))


def uses_cards(section: Rollout | Trainer) -> bool:
    """Where there are some."""
    return section.engine != "emulated" and section.device != "cpu"


def ranks_here(config: Config) -> int:
    """Trainer ranks on the machine that the run is started on."""
    return config.local_ranks


def cards_per_replica(config: Config) -> int:
    """The native engine computes on one; vLLM's own settings may spread a replica over several."""
    spread = ("tensor_parallel_size", "pipeline_parallel_size") if config.rollout.engine == "vllm" else ()
    return prod(int(config.rollout.vllm.get(name, 1)) for name in spread)


def ranks_share_cards(config: Config) -> bool:
    """NCCL wants a card for each rank; where two have the same one, they exchange gradients through gloo."""
    return len(set(config.trainer.cards)) < len(config.trainer.cards)


def visible(cards: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """What makes a process see these cards alone. Their numbers count what the environment shows: in a subset, or a
    list of UUIDs, they are places in that list."""
    if not cards:
        return {}
    names = environment[VISIBLE].split(",") if VISIBLE in environment else None
    return {VISIBLE: ",".join(names[card].strip() if names else str(card) for card in cards)}


# ------------------------------------------------------------------------------------------------------------- the deal


def _deal(config: Config, cards: Sequence[Card], replicas: int, ranks: int) -> Deal:
    if not cards:
        return Deal()
    of_ranks = _rank_cards(config, len(cards), ranks)
    of_replicas = _replica_cards(config, len(cards), replicas, of_ranks)
    shares = MemoryShares(config, of_replicas, of_ranks)
    shares.refuse_nothing_left()
    dealt = Deal(
        tuple([CardShare(place, shares.of_replica(place), _near(cards, place)) for place in of_replicas]),
        tuple([CardShare((card,), shares.of_rank(card), _near(cards, (card,))) for card in of_ranks]),
    )
    refuse_small(config, cards, dealt.replicas, dealt.ranks)
    return dealt


def _rank_cards(config: Config, cards: int, ranks: int) -> list[int]:
    """The card of each rank; none: they compute on the CPU."""
    trainer = config.trainer
    if not ranks or not uses_cards(trainer):
        return []
    if trainer.cards:
        return _named_for_ranks(trainer, cards, ranks)
    if ":" in trainer.device:
        return [_numbered("trainer", trainer.device, cards)] * ranks
    if ranks > cards:
        raise ConfigError(_too_few_cards(cards, ranks))
    return list(range(ranks))


def _named_for_ranks(trainer: Trainer, cards: int, ranks: int) -> list[int]:
    _refuse_unknown("trainer.cards", trainer.cards, cards)
    if len(trainer.cards) != ranks:
        raise ConfigError(
            f"trainer.cards is {list(trainer.cards)}, {counted(len(trainer.cards), 'card')} for "
            f"{counted(ranks, 'rank')} (trainer.ranks); write one card for each rank, such as "
            f"{[rank % cards for rank in range(ranks)]}"
        )
    return list(trainer.cards)


def _replica_cards(config: Config, cards: int, replicas: int, of_ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """The cards of each replica."""
    if not replicas or not uses_cards(config.rollout):
        return []
    places = _places(config, cards, of_ranks)
    return [places[number % len(places)] for number in range(replicas)]


def _places(config: Config, cards: int, of_ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Where a replica can be: so many cards together as one takes."""
    each, named = cards_per_replica(config), _open_to_replicas(config, cards, of_ranks)
    if len(named) < each:
        raise ConfigError(_too_few_for_one(config, each, named, cards))
    places = [tuple(named[at : at + each]) for at in range(0, len(named) - each + 1, each)]
    if config.rollout.cards:
        _refuse_bad_places(config, each, places)
    return places


def _open_to_replicas(config: Config, cards: int, of_ranks: Sequence[int]) -> list[int]:
    rollout = config.rollout
    if rollout.cards:
        _refuse_unknown("rollout.cards", rollout.cards, cards)
        return list(rollout.cards)
    if ":" in rollout.device:
        return [_numbered("rollout", rollout.device, cards)]
    free = [card for card in range(cards) if card not in of_ranks]
    return free or list(range(cards))


def _near(cards: Sequence[Card], place: Sequence[int]) -> str:
    """The CPUs of all their NUMA nodes; nothing if that is not known of one of them."""
    lists = dict.fromkeys(cards[card].cpus for card in place)
    return ",".join(lists) if all(lists) else ""


class MemoryShares:
    """Of the memory of each card, for whoever computes there."""

    def __init__(self, config: Config, of_replicas: Sequence[Sequence[int]], of_ranks: Sequence[int]) -> None:
        self._wanted = config.rollout.memory
        self._replicas = Counter(card for place in of_replicas for card in place)
        self._ranks = Counter(of_ranks)

    def _of_replicas(self, card: int) -> float:
        return self._wanted or (BESIDE_TRAINER if self._ranks[card] else TO_ITSELF)

    def of_replica(self, place: Sequence[int]) -> float:
        """The same on all of its cards."""
        return min(self._of_replicas(card) / self._replicas[card] for card in place)

    def of_rank(self, card: int) -> float:
        """What replicas do not use: they may start, or restart, at any time."""
        return (1.0 - self._of_replicas(card) if self._replicas[card] else 1.0) / self._ranks[card]

    def refuse_nothing_left(self) -> None:
        shared = sorted(card for card in self._ranks if self._replicas[card])
        if shared and self._wanted >= 1:
            raise ConfigError(
                f"rollout.memory is {self._wanted:g}, which leaves the trainer nothing of card {shared[0]}; write "
                f"less, such as {BESIDE_TRAINER:g}, or give the replicas cards of their own (rollout.cards)"
            )


# ------------------------------------------------------------------------------------------------------------- refusals


def _numbered(role: str, device: str, cards: int) -> int:
    number = int(device.partition(":")[2])
    if number >= cards:
        raise ConfigError(f'{role}.device is "{device}", but the last GPU here is "cuda:{cards - 1}"; write that')
    return number


def _refuse_unknown(setting: str, named: Sequence[int], cards: int) -> None:
    unknown = [card for card in named if card >= cards]
    if unknown:
        known = "only card 0" if cards == 1 else f"cards 0 to {cards - 1}"
        raise ConfigError(f"{setting} names card {unknown[0]}, but this process sees {known}; write numbers of those")


def _refuse_lists_without_cards(config: Config, cards: int) -> None:
    for setting, named in (("trainer.cards", config.trainer.cards), ("rollout.cards", config.rollout.cards)):
        if named and not cards:
            raise ConfigError(f"{setting} is {list(named)}, but there is no GPU here that torch can use; leave it out")


def _too_few_cards(cards: int, ranks: int) -> str:
    only = f"is only {cards} GPU" if cards == 1 else f"are only {cards} GPUs"
    shared = [rank % cards for rank in range(ranks)]
    return (
        f"trainer.ranks is {ranks}, but there {only} here, and each rank needs one; write {cards}, or let ranks share "
        f"cards with trainer.cards = {shared}"
    )


def _too_few_for_one(config: Config, each: int, named: Sequence[int], cards: int) -> str:
    if config.rollout.cards:
        return f"rollout.cards is {list(named)}, but a replica takes {each} cards; write {each}, or a multiple of it"
    if cards < each:
        return f"a replica takes {each} cards, but there {'is' if cards == 1 else 'are'} only {cards} here"
    everywhere = list(range(cards // each * each))
    return (
        f"a replica takes {each} cards, but the trainer leaves only {len(named)} of {cards}; write fewer "
        f"trainer.ranks, or let replicas share its cards with rollout.cards = {everywhere}"
    )


def _refuse_bad_places(config: Config, each: int, places: Sequence[Sequence[int]]) -> None:
    named = config.rollout.cards
    if len(named) % each:
        less = list(named[: len(places) * each])
        raise ConfigError(
            f"rollout.cards names {len(named)} cards, which is no multiple of the {each} that a replica takes; "
            f"write {less}, or more of them"
        )
    for place in places:
        if len(set(place)) < each:
            raise ConfigError(
                f"rollout.cards gives one replica the cards {list(place)}, the same one twice; write {each} different "
                "ones for each replica"
            )


def _without_numbers(config: Config) -> Config:
    changed: dict[str, Any] = {
        name: replace(section, cards=(), device=section.device.partition(":")[0])
        for name, section in (("rollout", config.rollout), ("trainer", config.trainer))
    }
    return replace(config, **changed)
