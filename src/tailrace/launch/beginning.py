"""How a run is to be begun: anew, where another one stopped, or from a version of another one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Origin(NamedTuple):
    """Which version of which run another one is made from; without a version: the newest."""

    run: Path
    version: int | str | None  # or "best"


class Beginning(NamedTuple):
    """What to do about a run of this name that is there already; or which other one a new run is made from."""

    resume: bool = False
    auto: bool = False  # resume it if there is one, else begin it
    accept: bool = False  # a run that is resumed may have other inputs than before
    origin: Origin | None = None
    files: tuple[str, ...] = ()  # of settings
