"""From settings to a task: a built-in one by its name, the user's own data and reward, or a class of the user's.

With data and reward, nothing of the user's runs until it is needed: the controller asks for rows, which reads the data;
a judge asks for a response, which imports the reward; neither ever does the other's work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from tailrace.config.errors import ConfigError
from tailrace.config.spelling import near
from tailrace.config.tree import Config, TaskSettings
from tailrace.envs.base import Row, Scored, Task, Turn
from tailrace.envs.data import HELD_OUT, Split, read_split
from tailrace.envs.imports import described, find, load_object
from tailrace.envs.rewards import BUILT_IN, Reward, UserReward, load_reward, needs_answer, scored_by
from tailrace.envs.tools import ToolUse


def build_task(config: Config) -> Task:
    """The task of these settings, or ConfigError."""
    settings = config.task
    task = _named(config) if settings.name else _own(settings)
    tool = settings.tools or ("calculator" if settings.name == "calculator" else "")
    if tool:
        return ToolUse(task, tool, settings.max_turns, settings.reward_timeout_s, weak=settings.sandbox == "weak")
    if settings.max_turns > 1 and ":" not in settings.name:
        raise ConfigError(
            f"task.max_turns is {settings.max_turns}, but nothing answers between turns; write task.tools"
        )
    return task


def may_go_on(task: Task, transcript: tuple[Turn, ...]) -> bool:
    """Whether the task may answer with an observation, as far as that can be told without asking it."""
    if transcript[-1].role == "environment":
        return False
    if isinstance(task, ToolUse):
        return task.call_in(transcript) is not None or may_go_on(task.task, transcript)
    return not getattr(task, "single_turn", False)


def prepare(task: Task, row: Row | None = None) -> None:
    """Do now what the first `respond` would have to do, so that settings are refused before a sample needs them."""
    inner = task.task if isinstance(task, ToolUse) else task
    if isinstance(inner, OwnTask):
        inner.prepare(row)


class OwnTask:
    """The user's rows and reward; see `envs.base.Task`."""

    single_turn = True  # a reward gives no observations

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings

    @cached_property
    def rows(self) -> Split:
        return read_split(self.settings, answers=needs_answer(self.settings.reward))

    @cached_property
    def reward(self) -> Reward:
        return load_reward(self.settings.reward, folders(self.settings))

    def prepare(self, row: Row | None = None) -> None:
        """Import the reward now, and see that a row like this has all it wants: ConfigError if not."""
        if isinstance(self.reward, UserReward) and row is not None:
            self.reward.check(row)

    def __len__(self) -> int:
        return len(self.rows.train)

    def row(self, index: int) -> dict[str, Any]:
        return self.rows.train[index]

    def held_out(self) -> list[dict[str, Any]]:
        return self.rows.held_out

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored:
        return scored_by(self.reward, row, transcript)

    score = respond  # a reward sees the whole transcript, however it ends


def folders(settings: TaskSettings) -> tuple[Path, ...]:
    """Where a relative reward is looked for: the working directory, and beside the data."""
    return (Path.cwd(), *((Path(settings.data).parent,) if settings.data else ()))


def _own(settings: TaskSettings) -> OwnTask:
    if not settings.data:
        names = ", ".join(BUILDERS)
        raise ConfigError(f"no task is given; write task.data = 'my.jsonl', or a built-in task.name: {names}")
    if settings.options:
        raise ConfigError(
            f"task.options.{next(iter(settings.options))} belongs to a built-in task; write its task.name"
        )
    if settings.reward not in BUILT_IN:
        find(settings.reward, folders(settings), "task.reward", others=BUILT_IN)
    return OwnTask(settings)


def _named(config: Config) -> Task:
    settings = config.task
    for field in ("data", "eval_data", "reward"):
        if getattr(settings, field):
            raise ConfigError(f"task.{field} is not used by the task '{settings.name}'; remove one of the two")
    if ":" in settings.name:
        return _written_by_user(config)
    if settings.name not in BUILDERS:
        close = near(settings.name, BUILDERS)
        hint = f"did you mean '{close}'?" if close else f"there are {', '.join(BUILDERS)}"
        raise ConfigError(f"task.name = '{settings.name}' is unknown; {hint}")
    return BUILDERS[settings.name](config)


def _written_by_user(config: Config) -> Task:
    name = config.task.name
    maker = load_object(name, folders(config.task), "task.name")
    try:
        task = maker(config.task.options, config.run.seed)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the border to the user's code
        raise ConfigError(f"task.name = '{name}' cannot be made from (options, seed): {described(error)}") from error
    missing = [method for method in ("__len__", "row", "held_out", "respond") if not hasattr(task, method)]
    if missing:
        raise ConfigError(f"task.name = '{name}' has no {missing[0]}; a task has __len__, row, held_out and respond")
    return task


def _running_total(config: Config) -> Task:
    from tailrace.envs.running_total import RunningTotal

    return RunningTotal(config.task.options, config.run.seed)


def _calculator(config: Config) -> Task:
    from tailrace.envs.arithmetic import Arithmetic

    return Arithmetic(config.task.options, config.run.seed, _held_out(config))


def _reasoning_gym(config: Config) -> Task:
    from tailrace.envs.reasoning import ReasoningGym

    return ReasoningGym(config.task.options, config.run.seed, _held_out(config))


def _held_out(config: Config) -> int:
    return HELD_OUT if config.task.eval_rows is None else config.task.eval_rows


BUILDERS: dict[str, Callable[[Config], Task]] = {
    "running_total": _running_total,
    "calculator": _calculator,
    "reasoning_gym": _reasoning_gym,
}
