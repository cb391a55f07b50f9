"""Settings that differ between schedules: `[per_schedule.partial]` with `trainer.forward_passes = 0`.

They take effect wherever a Config is made, so a comparison of schedules and a run of one of them agree. What such a
setting is for the schedules without a value of their own is kept beside them (`otherwise`), because the Config of one
schedule is made from that of another (`with_values`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from tailrace.config.fields import fields, read
from tailrace.config.files import flat
from tailrace.config.tree import Config

SECTION = "per_schedule."
OTHERWISE = "per_schedule.otherwise."


def split_key(key: str) -> tuple[str, str]:
    """`per_schedule.sync.run.steps` as its table and the setting; no setting where there is no such table."""
    owner = next((each for each in fields() if each.startswith(SECTION) and key.startswith(f"{each}.")), "")
    return owner, key.removeprefix(f"{owner}.") if owner else ""


def apply(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, with the values of its own schedule, and those of the others remembered."""
    given = dict(_spread(settings))
    differing = {split_key(key)[1] for key in given if key.startswith(SECTION)}
    if not differing:
        return given
    kind = given.get("schedule.kind", Config().schedule.kind)
    others = {key: given.get(OTHERWISE + key, given.get(key, read(Config(), key))) for key in sorted(differing)}
    own = {key: given.get(f"{SECTION}{kind}.{key}", others[key]) for key in others}
    return {**given, **{OTHERWISE + key: value for key, value in others.items()}, **own}


def _spread(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A Config has these tables whole; setting by setting they are easier to change."""
    for key, value in settings.items():
        if key.startswith(SECTION) and isinstance(value, dict):
            yield from flat(cast("dict[str, Any]", value), f"{key}.")
        else:
            yield key, value
