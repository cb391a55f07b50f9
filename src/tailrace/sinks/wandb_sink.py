"""Weights & Biases, online or offline as its own settings say (WANDB_MODE). Files lie in RUN/log/wandb."""

from __future__ import annotations

import os
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tailrace.sinks.base import Logged, SampleText, TrackedRun

COLUMNS = list(SampleText.__struct_fields__)
OFFLINE = ("offline", "disabled", "dryrun")


class WandbSink:
    """The x-axis is `step`: an evaluation ends when later steps have been logged."""

    def __init__(self, run: TrackedRun, position: int) -> None:
        import wandb

        self._table = wandb.Table
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            dir=str(run.folder),
            config=dict(run.settings),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        self._rows = position

    def log(self, row: Logged) -> None:
        values: dict[str, Any] = {"step": row.step, **row.values}
        if row.samples:
            data: list[Any] = [[getattr(one, name) for name in COLUMNS] for one in row.samples]
            values["samples"] = self._table(columns=list[Any](COLUMNS), data=data)
        self._run.log(values)
        self._rows += 1

    def flush(self) -> int:
        return self._rows

    def close(self, ended: bool) -> None:
        self._run.finish(exit_code=0)


def note() -> str:
    """A sentence where nothing says how to log in: wandb would end with an error, beside the run."""
    if os.environ.get("WANDB_MODE", "online") in OFFLINE or os.environ.get("WANDB_API_KEY") or _is_in_netrc():
        return ""
    return "log.to has wandb, and no API key is found; run wandb login, or set WANDB_MODE=offline before the command"


def _is_in_netrc() -> bool:
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
