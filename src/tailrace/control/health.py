"""When silence counts as death, and when the dead are started again.

A part counts as lost when it has missed `strikes` heartbeats, or when it does not answer a command in time. It is
started again after a pause that doubles with each start in a row; after `max_restarts` a replica is left alone, with
the reason, because a part that always dies costs more than it gives. Good work resets the count.
"""

from __future__ import annotations

from typing import Protocol

from tailrace.config.tree import Health


class Restartable(Protocol):
    """The fields of a replica, relay or trainer that this file reads and writes."""

    last_seen: float
    restarts: int
    restart_at: float


def silent(config: Health, now: float, part: Restartable) -> bool:
    return now - part.last_seen > config.heartbeat_s * config.strikes


def plan_restart(config: Health, now: float, part: Restartable) -> None:
    """Set when a lost part is to be started."""
    pause = min(config.backoff_s * 2.0**part.restarts, config.backoff_max_s)
    part.restart_at = now + pause


def due(now: float, part: Restartable) -> bool:
    return now >= part.restart_at


def note_start(config: Health, now: float, part: Restartable) -> int:
    """A start has been ordered; should nothing come of it, it is ordered again after the longest pause."""
    part.restarts += 1
    part.restart_at = now + config.backoff_max_s + config.pull_deadline_s
    return part.restarts


def hopeless(config: Health, part: Restartable) -> bool:
    return part.restarts >= config.max_restarts
