"""The actor that holds one node for a run: Ray places it and counts its cards, and it starts `tailrace worker` there.

It moves no data. `run` is one call that lasts as long as the agent, so its answer is the agent's end, and an error
instead of an answer is the node's. When the actor is gone, by whatever means, the kernel ends the agent.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tailrace.launch.placers.bound import bound, tailrace

LAST = 5  # lines of an agent that are told when it has failed
CARDS = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


class AgentOrder(NamedTuple):
    """What an agent is started with. `cards`: how many Ray gave; `threads`: Ray sets its own number, which is not meant
    for a whole node."""

    words: Sequence[str]
    environment: Mapping[str, str]  # secret
    cards: int
    folder: str
    threads: str | None


class AgentEnd(NamedTuple):
    status: int
    last: Sequence[str]  # lines that it wrote


class NodeAgent:
    """An actor with two threads: one is in `run`, the other one hears `stop`."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[str] | None = None

    def cards(self, count: int) -> str:
        """Which of the node's cards are ours."""
        return visible(os.environ, count)

    def where(self) -> str:
        """Answered as soon as the actor is in its place."""
        return socket.gethostname()

    def run(self, order: AgentOrder) -> AgentEnd:
        folder = order.folder if Path(order.folder).is_dir() else None
        self._agent = subprocess.Popen(
            bound(tailrace(order.words)),
            env=environment(os.environ, order),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        last = deque[str](maxlen=LAST)
        assert self._agent.stderr is not None
        for text in self._agent.stderr:
            last.append(text.rstrip())
            sys.stderr.write(text)  # for Ray's own log of this actor
        return AgentEnd(self._agent.wait(), list(last))

    def stop(self) -> None:
        """Leave the run in an orderly way."""
        if self._agent is not None:
            with suppress(ProcessLookupError):
                self._agent.send_signal(signal.SIGTERM)


def visible(environ: Mapping[str, str], count: int) -> str:
    """Ray hides nothing from an actor without cards, so that is done here."""
    return environ.get(CARDS, "") if count else ""


def environment(environ: Mapping[str, str], order: AgentOrder) -> dict[str, str]:
    threads = {THREADS: order.threads} if order.threads else {}
    kept = {name: value for name, value in environ.items() if name != THREADS}
    return {**kept, **threads, **order.environment, CARDS: visible(environ, order.cards)}
