"""Whether what must lie on a card can lie in the shares that were dealt, as far as settings alone tell.

`dealing` asks before anything starts. Only what is certain is counted: weights in a replica; weights, gradients and
both moments in a trainer rank. What comes beside them (KV, activations) is found out where it is needed. Where the
shape of the model is not known, nothing is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.types import Card, CardShare

TRAINED_BYTES = 16  # of a parameter: weight, gradient and two moments, in float32
FEWER = "fewer replicas (local.replicas, or --replicas of a worker)"
MOST_OF_A_CARD = 0.95  # that a share can be raised to beside nobody


def refuse_small(
    config: Config, cards: Sequence[Card], replicas: Sequence[CardShare], ranks: Sequence[CardShare]
) -> None:
    """Trainer ranks first: what they need decides about the rest."""
    for number, rank in enumerate(ranks):
        _refuse_small_rank(config, cards, number, rank)
    for number, replica in enumerate(replicas):
        _refuse_small_replica(config, cards, number, replica, replicas)


def _refuse_small_rank(config: Config, cards: Sequence[Card], number: int, rank: CardShare) -> None:
    whole = TRAINED_BYTES * config.model.parameters
    needed, there = whole / config.trainer.ranks, _room(cards, rank)
    if needed > there:
        name = f"trainer rank {number}" if config.trainer.ranks > 1 else "the trainer"
        raise ConfigError(
            f"{name} has {_amount(there, rank)}, but weights, gradients and moments take {needed / 1e9:,.1f} GB; "
            f"{_for_a_rank(config, cards, rank, whole)}"
        )


def _for_a_rank(config: Config, cards: Sequence[Card], rank: CardShare, whole: float) -> str:
    """What would do: more of its card, or more ranks."""
    memory = cards[rank.cards[0]].memory
    if rank.memory < 1 and whole / config.trainer.ranks <= memory:
        return "lower rollout.memory, or give replicas and ranks cards of their own (rollout.cards, trainer.cards)"
    enough = ceil(whole / memory)
    there = f", of which {len(cards)} are here" if enough > len(cards) else ""
    return f"write trainer.ranks = {enough}, on as many cards{there}, or take a smaller model"


def _refuse_small_replica(
    config: Config, cards: Sequence[Card], number: int, replica: CardShare, replicas: Sequence[CardShare]
) -> None:
    needed = (4 if config.rollout.precision == "float32" else 2) * config.model.parameters
    there, beside = _room(cards, replica), sum(replica.cards[0] in other.cards for other in replicas)
    if needed > there:
        raise ConfigError(
            f"replica {number} has {_amount(there, replica)}, but its weights take {needed / 1e9:,.1f} GB; "
            f"{_for_a_replica(needed, there, replica.memory, beside)}"
        )


def _for_a_replica(needed: float, there: float, share: float, beside: int) -> str:
    """What would do: `beside` replicas have so much of a card each; fewer of them, more for all, or another card."""
    if fit := int(beside * there / needed):
        return f"write {FEWER}, at most {fit} on a card"
    enough = ceil(100 * beside * share * needed / there) / 100
    if enough <= MOST_OF_A_CARD:
        return f"write rollout.memory = {enough:g}, or give it cards without a trainer (rollout.cards)"
    return "take a smaller model, or GPUs with more memory"


def _room(cards: Sequence[Card], placement: CardShare) -> float:
    return placement.memory * sum(cards[card].memory for card in placement.cards)


def _amount(room: float, placement: CardShare) -> str:
    noun, which = "card" if len(placement.cards) == 1 else "cards", " and ".join(map(str, placement.cards))
    return f"{room / 1e9:,.1f} GB ({100 * placement.memory:.3g} % of {noun} {which})"
