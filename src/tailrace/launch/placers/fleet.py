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
from tailrace.errors import TailraceError
from tailrace.launch.folder import run_folder

WAIT_S = 3600  # for which an agent waits for the run: accuracy is measured before the controller listens


class LaunchError(TailraceError):
    """Why a run cannot be launched on this cluster, for the person who asked for it."""


class FleetRequest(NamedTuple):
    """What is to be launched. `nodes`: machines, unset: all there are; `replicas`: on each, unset: one per card."""

    files: Sequence[str]
    settings: Sequence[str]
    nodes: int | None = None
    replicas: int | None = None
    resume: str = ""  # --resume or --auto-resume

    @property
    def config(self) -> Config:
        return load(self.files, self.settings)

    @property
    def folder(self) -> Path:
        return run_folder(self.config, list(self.files))

    def replicas_for(self, cards: int) -> int:
        """On a node with so many cards. One without any generates too, with its processors."""
        return self.replicas or max(1, cards)

    def cards_for(self, cards: int) -> int:
        """How many of a node's cards such replicas take."""
        return min(self.replicas_for(cards), cards)


def train_words(fleet: FleetRequest, listen: str, port: int | str, *more: str) -> list[str]:
    """`tailrace train` for a controller to which agents come."""
    resume = [fleet.resume] if fleet.resume else []
    return ["train", *fleet.files, *fleet.settings, "--local.listen", listen, "--local.port", str(port), *resume, *more]


def worker_words(join: str, replicas: int | str, *more: str) -> list[str]:
    """`tailrace worker` for an agent, which waits for the run and comes back to it."""
    return ["worker", "--join", join, "--replicas", str(replicas), "--wait", str(WAIT_S), *more]


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
