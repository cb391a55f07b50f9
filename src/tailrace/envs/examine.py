"""Is the task of these settings usable? Asked before anything starts, not when the first sample is to be scored.

Called by the composition root. It builds the task, reads the data, renders the first and the longest prompts where a
tokenizer is given, and lets a judge import the reward and look at its parameters. No reward is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.envs.base import Row, Task
from tailrace.envs.imports import described
from tailrace.envs.judge_process import try_out
from tailrace.envs.prompts import Prompts
from tailrace.envs.tasks import build_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATED = 256  # rows to look at where making one costs something


def examine(config: Config, tokenizer: PreTrainedTokenizerBase | None = None, context: int | None = None) -> None:
    """ConfigError with the first thing that is wrong with the task."""
    task = build_task(config)
    first = _first_row(task)
    if tokenizer is not None:
        stored = not config.task.name
        Prompts(task, tokenizer, config, context).check(range(len(task) if stored else min(len(task), GENERATED)))
    if not config.task.name and config.task.reward not in ("", "exact"):
        columns = {name: value for name, value in first.items() if name != "prompt"}
        if reason := try_out(config, Row(0, b"", first["prompt"], columns)):
            raise ConfigError(reason)


def _first_row(task: Task) -> dict[str, Any]:
    """A class of the user's is asked for the first time here: what is wrong with it is no crash of ours."""
    try:
        row = task.row(0) if len(task) else None
    except ConfigError:
        raise
    except Exception as error:  # the border to the user's code
        raise ConfigError(f"the task cannot make its first row: {described(error)}") from error
    if not isinstance(row, dict) or "prompt" not in row:
        raise ConfigError("the task has no rows, or its first has no 'prompt'; a row is a dict with a prompt")
    return row
