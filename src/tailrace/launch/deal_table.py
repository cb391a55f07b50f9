"""A deal as a table for people: which process gets which GPU, how much of its memory, and which CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import indent

from tailrace.config.dealing import Deal, uses_cards
from tailrace.config.tree import Config
from tailrace.launch.cards import Dealt
from tailrace.obs.tables import percent, render_table
from tailrace.types import Card, CardShare

COLUMNS = ("process", "GPU", "kind", "share", "memory", "CPUs near it")
ON_CPU = "the CPU"


def describe_deal(dealt: Dealt) -> str:
    title = "GPUs of a run with these settings"
    rows = [*_rows(dealt), *_idle(dealt)]
    lines = [render_table(COLUMNS, rows, left=3) if dealt.deal != Deal() else _why_none(dealt.config), *dealt.notes]
    return "\n".join([title, *[indent(line, "  ") for line in lines]])


def _why_none(config: Config) -> str:
    if not uses_cards(config.rollout) and not uses_cards(config.trainer):
        return "none: neither replicas nor the trainer compute on GPUs"
    return "none here: replicas and trainer compute on the CPU; --cards 8x80 shows the deal for eight GPUs of 80 GB"


def _rows(dealt: Dealt) -> Iterator[tuple[str, ...]]:
    config, deal, cards = dealt.config, dealt.deal, dealt.cards
    ranks = [f"trainer rank {rank}" for rank in range(config.trainer.ranks)]
    yield from _of_role(ranks if len(ranks) > 1 else ["trainer"], deal.ranks, cards)
    yield from _of_role([f"replica {number}" for number in range(config.local.replicas)], deal.replicas, cards)


def _of_role(names: Sequence[str], placements: Sequence[CardShare], cards: Sequence[Card]) -> Iterator[tuple[str, ...]]:
    if names and not placements:
        which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].rpartition(' ')[2]}"
        yield which, "", ON_CPU, "", "", "-"
        return
    for name, placement in zip(names, placements, strict=False):  # more names: those are on other machines
        yield name, *_cells(placement, cards)


def _cells(placement: CardShare, cards: Sequence[Card]) -> tuple[str, ...]:
    numbers = ",".join(map(str, placement.cards))
    kinds = ", ".join(dict.fromkeys(cards[card].name for card in placement.cards))
    memory = placement.memory * sum(cards[card].memory for card in placement.cards)
    return numbers, kinds, percent(placement.memory), f"{memory / 2**30:,.1f} GiB", _near(placement, cards)


def _near(placement: CardShare, cards: Sequence[Card]) -> str:
    if not placement.cpus:
        return "not known"
    nodes = sorted({cards[card].node for card in placement.cards})
    return f"{placement.cpus} (NUMA node {', '.join(map(str, nodes))})" if nodes != [-1] else placement.cpus


def _idle(dealt: Dealt) -> Iterator[tuple[str, ...]]:
    for number in dealt.deal.unused(len(dealt.cards)):
        yield "nobody", str(number), dealt.cards[number].name, "", "", "-"
