"""When silence counts as death, and when the dead are started again.

A component counts as lost when it has missed `strikes` heartbeats, or when it does not answer a command in time. How
long each has been silent is for the driver to say, just before the timer at which the lost are found (`Heartbeats`). It
is started again after a pause that doubles with each start in a row, whether it died at work or before it was up; after
`max_restarts` it is left alone, with the reason, because a component that always dies costs more than it gives. Good
work resets the count.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Protocol

from tailrace.config.tree import Health

ROUNDING_S = 1e-6  # `last_seen` is now less an age: what is due exactly now must not need a second look


class Restartable(Protocol):
    """The fields of a replica, relay or trainer that this file reads and writes."""

    incarnation: int
    last_seen: float
    reason: str
    restarts: int
    restart_at: float


def late_after(config: Health) -> float:
    """Seconds without a sign of life after which a driver names somebody: later than a heartbeat usually comes, and at
    least one look before it counts as lost."""
    return config.heartbeat_s * min(1.5, config.strikes - 1)


def silent(config: Health, now: float, component: Restartable) -> bool:
    return now >= silent_at(config, component) - ROUNDING_S


def silent_at(config: Health, component: Restartable) -> float:
    """When it will count as lost, should nothing more be heard of it."""
    return component.last_seen + config.heartbeat_s * config.strikes


def next_look(config: Health, now: float, living: Iterable[Restartable]) -> float:
    """Once per heartbeat, and sooner if somebody's time is over before that."""
    return min(now + config.heartbeat_s, min((silent_at(config, component) for component in living), default=inf))


def plan_restart(config: Health, now: float, component: Restartable) -> None:
    """Set when a lost component is to be started."""
    pause = min(config.backoff_s * 2.0**component.restarts, config.backoff_max_s)
    component.restart_at = now + pause


def start_failed(config: Health, now: float, component: Restartable, incarnation: int, reason: str) -> None:
    """It ended before it was up. The pause before the next attempt has grown with this one."""
    component.incarnation = incarnation  # whatever comes of that one is too late
    component.reason = reason
    plan_restart(config, now, component)


def due(now: float, component: Restartable) -> bool:
    return now >= component.restart_at


def note_start(config: Health, now: float, component: Restartable) -> int:
    """A start has been ordered; should nothing come of it, it is ordered again after the longest pause."""
    component.restarts += 1
    component.restart_at = now + config.backoff_max_s + config.pull_deadline_s
    return component.restarts


def hopeless(config: Health, component: Restartable) -> bool:
    return component.restarts >= config.max_restarts
