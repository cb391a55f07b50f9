"""How many files and sockets this process may have open, and how many of them connections may take.

Whoever listens can be called by anybody. So strangers, those that have not proven who they are, get a small share of
the descriptors, those that have get the rest, and some are for neither: a run that cannot open a file, a pipe or a
process any more cannot start a component again.
"""

from __future__ import annotations

import resource
from typing import NamedTuple

ENOUGH = 1 << 16
RESERVE = 64  # for files, pipes and processes
STRANGERS = 128


class Shares(NamedTuple):
    """How many connections there may be."""

    strangers: int
    known: int


def raise_limit() -> None:
    """To what the system grants without being asked, or to enough."""
    soft, hard = _limits()
    if soft < min(hard, ENOUGH):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, ENOUGH), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def shares() -> Shares:
    room = max(16, min(_limits()[0], ENOUGH) - RESERVE)
    strangers = max(4, min(STRANGERS, room // 4))
    return Shares(strangers, room - strangers)


def _limits() -> tuple[int, int]:
    """Now, and how far it may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return (ENOUGH if soft == unlimited else soft), (ENOUGH if hard == unlimited else hard)
