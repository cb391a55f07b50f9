"""What every placer is asked for, and the command lines of the two programs that it starts.

Called by the placers alone. Nothing secret is among the words: keys travel in the environment or in a file.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tailrace.config import Config, load
from tailrace.config.dealing import cards_per_replica
from tailrace.errors import TailraceError
from tailrace.launch.folder import run_folder
from tailrace.types import Struct

WAIT_S = 3600  # for which an agent waits for the run: accuracy is measured before the controller listens

NOT_KNOWN_YET = "192.0.2.1"  # stands for the controller's address; documents have it, and no machine


class LaunchError(TailraceError):
    """Why a run cannot be launched on this cluster, for the person who asked for it."""


class NodeShare(Struct):
    """What an agent starts on a node. `replicas`: unset: as many as its cards are good for, `replica_cards` each."""

    replicas: int | None = None
    ranks: int = 0
    replica_cards: int = 1

    def replicas_for(self, cards: int) -> int:
        """On a node with so many cards. One without any generates too, with its processors, unless it trains."""
        if self.replicas is not None:
            return self.replicas
        return max(0 if self.ranks else 1, (cards - self.ranks) // self.replica_cards)

    def cards_for(self, cards: int) -> int:
        """How many of a node's cards such processes take."""
        return min(self.replicas_for(cards) * self.replica_cards + self.ranks, cards)

    def worker_words(self, join: str, cards: int, *more: str) -> list[str]:
        """`tailrace worker` for an agent on such a node, which waits for the run and comes back to it."""
        ranks = ["--ranks", str(self.ranks)] if self.ranks else []
        replicas = ["--replicas", str(self.replicas_for(cards))]
        return ["worker", "--join", join, *replicas, *ranks, "--wait", str(WAIT_S), *more]


class FleetRequest(NamedTuple):
    """What is to be launched. `nodes`: machines, unset: all there are; `replicas` and `ranks`: on each, as in
    `NodeShare`."""

    files: Sequence[str]
    settings: Sequence[str]
    nodes: int | None = None
    replicas: int | None = None
    resume: str = ""  # --resume or --auto-resume
    ranks: int = 0

    @property
    def config(self) -> Config:
        """As the controller will have it, which listens."""
        return load(self.files, self.settings, ["--local.listen", NOT_KNOWN_YET])

    @property
    def listen(self) -> str:
        """The address that somebody has set; empty: the placer finds one."""
        return self.config.local.listen.replace(NOT_KNOWN_YET, "")

    @property
    def folder(self) -> Path:
        return run_folder(self.config, list(self.files))

    def of_controller(self, share: NodeShare | None = None, cards: int = 0) -> list[str]:
        """Settings: where nodes have the ranks, the controller's machine has this share of them, or computes nothing,
        unless it is told to."""
        local = self.config.local
        ranks, replicas = (share.ranks, share.replicas_for(cards)) if share else (0, 0)
        own = ["--local.ranks", str(ranks)] if self.ranks and local.ranks is None else []
        return own + (["--local.replicas", str(replicas)] if self.ranks and local.is_auto else [])

    @property
    def each(self) -> NodeShare:
        return NodeShare(self.replicas, self.ranks, cards_per_replica(self.config))


def train_words(fleet: FleetRequest, listen: str, port: int | str, own: Sequence[str], *more: str) -> list[str]:
    """`tailrace train` for a controller to which agents come; `own`: settings of what its machine computes."""
    resume = [fleet.resume] if fleet.resume else []
    where = ["--local.listen", listen, "--local.port", str(port), *own]
    return ["train", *fleet.files, *fleet.settings, *where, *resume, *more]


def free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
            return probe.getsockname()[1]
    except OSError as error:
        raise LaunchError(f"nobody can listen at {address} here ({error.strerror}); write --local.listen") from None


def quoted(words: Sequence[str]) -> str:
    """As a shell reads them."""
    return shlex.join(words)
