"""Before a run starts: which GPUs this machine has, how many replicas that makes, and who gets which.

Here `local.replicas = "auto"` becomes the number that the run is begun with and stays with: one that is resumed has as
many as before, dealt anew to the cards that are there now. A controller that takes over from one that died does not
look again; it reads what that one has noted, so that its deal is the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.config.dealing import Deal, deal_here, resolved, uses_cards, with_replicas
from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.errors import UsageError
from tailrace.model.device import check_devices, has_device_files, survey_apart, survey_for
from tailrace.store.journal import CARDS, FILE, Journal, Meta
from tailrace.types import Card

log = logging.getLogger(__name__)

IMAGINED = re.compile(r"(\d{1,4})x(\d{1,4}(?:\.\d+)?)")
MOST = 1024


class Dealt(NamedTuple):
    """Settings with a number of replicas, and who gets which of the cards."""

    config: Config
    cards: tuple[Card, ...] = ()
    deal: Deal = Deal()
    notes: tuple[str, ...] = ()


def deal_cards(config: Config, folder: Path, resume: bool, begun: bool) -> Dealt:
    """`begun`: the run goes on, with another controller."""
    earlier = Journal(folder) if (resume or begun) and (folder / FILE).is_file() else None
    if earlier is not None and config.local.is_auto:
        config = with_replicas(config, earlier.config.local.replicas)
    if earlier is not None and begun:
        cards = msgspec.json.decode(earlier.meta.get(CARDS, "[]"), type=tuple[Card, ...])
        return dealt_among(config, cards)
    seen = survey_for(config)
    dealt = dealt_among(config, seen.cards if seen else ())
    return dealt._replace(notes=(check_devices(config, seen), *dealt.notes))


def dealt_among(config: Config, cards: tuple[Card, ...]) -> Dealt:
    """With these cards, wherever they are."""
    config = resolved(config, len(cards))
    deal = deal_here(config, cards)
    return Dealt(config, cards, deal, tuple(_unused(config, deal, cards)))


def _unused(config: Config, deal: Deal, cards: Sequence[Card]) -> list[str]:
    idle = deal.unused(len(cards))
    if not idle or not uses_cards(config.rollout):
        return []
    which = f"GPU {idle[0]} has" if len(idle) == 1 else f"GPUs {', '.join(map(str, idle))} have"
    return [f'{which} nothing to do; local.replicas = "auto" uses all that the trainer leaves, trainer.ranks more']


def record_cards(meta: Meta, cards: Sequence[Card]) -> None:
    """For a controller that has to take over."""
    meta.set(CARDS, msgspec.json.encode(cards).decode())


def cards_of_worker() -> tuple[Card, ...]:
    """On a machine that will join a run whose settings it does not know yet."""
    if not find_spec("torch") or not has_device_files():
        return ()
    try:
        return survey_apart().cards
    except ConfigError as error:
        log.warning("%s", error)
        return ()


def imagined(text: str) -> tuple[Card, ...]:
    """`8x80`: eight cards of 80 GB; `4x80,4x24` are of two kinds."""
    found: list[Card] = []
    for part in text.split(","):
        match = IMAGINED.fullmatch(part.strip())
        if not match or not 1 <= int(match[1]) <= MOST or not float(match[2]):
            raise UsageError(f"--cards is '{text}'; write how many and the GB of each, such as 8x80, or 4x80,4x24")
        found += [Card(f"GPU of {match[2]} GB", int(float(match[2]) * 2**30))] * int(match[1])
    return tuple(found)
