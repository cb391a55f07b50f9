"""Where a run's prompts come from: its task, or numbers alone for an emulated engine."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from tailrace.config.errors import ConfigError
from tailrace.config.tree import HELD_OUT, Config
from tailrace.envs.inputs import Pins, pinned, refuse_changed
from tailrace.scoring import EvalSet
from tailrace.types import EVALUATION, TOKEN_BYTES, Row
from tailrace.wording import counted

if TYPE_CHECKING:
    from tailrace.envs.prompts import Prompts


class PromptSource(Protocol):
    """Where prompts come from. The run is over after `total` of them; None: never. Asked by one thread at a time."""

    @property
    def total(self) -> int | None: ...

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """What is only evaluated, never trained on."""
        ...

    def rows(self, start: int, count: int) -> list[Row]:
        """Of the sequence; from `EVALUATION` on, those of the evaluation's sets."""
        ...

    def number(self, index: int) -> int:
        """Which row of the data is shown at an index: the same number at every visit; -1: none comes twice."""
        ...


def open_source(config: Config) -> PromptSource:
    """Build the task and look at its first prompts: what is wrong with them is best known before anything starts."""
    if config.rollout.engine == "emulated":
        return Blanks(config)
    if not config.model.path:
        raise ConfigError("no model is given to train; write model.path, a Hugging Face model directory")
    _require("torch", "transformers", "safetensors")
    from tailrace.envs.examine import examine
    from tailrace.envs.prompts import Prompts
    from tailrace.envs.tasks import build_task
    from tailrace.model.load import context_length, load_tokenizer

    tokenizer, context = load_tokenizer(config.model.path), context_length(config.model.path)
    examine(config, tokenizer, context)
    source = Limited(Prompts(build_task(config), tokenizer, config, context), config.task.epochs, config.task.start)
    _refuse_too_few(config, source.total)
    return source


def _refuse_too_few(config: Config, total: int | None) -> None:
    prompts, epochs = config.workload.prompts_per_step, config.task.epochs
    if total is not None and total < prompts:
        raise ConfigError(
            f"the data has {total // epochs:,} rows to train on, so task.epochs = {epochs} gives {total:,} prompts, "
            f"and one step takes {prompts:,} (workload.prompts_per_step); write fewer of these, or more epochs"
        )


def steps_short(config: Config, source: PromptSource) -> str:
    """A sentence where the prompts will not last for all steps; nothing where they will."""
    total = source.total
    if total is None or total >= config.run.steps * config.workload.prompts_per_step:
        return ""
    enough, left = divmod(total, config.workload.prompts_per_step)
    rest = f"; {left:,} will be left over" if left else ""
    steps = counted(config.run.steps, "step")
    return f"task.epochs gives {counted(total, 'prompt')}, enough for {enough:,} of {steps}{rest}"


def _require(*packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"training needs {' and '.join(missing)}; install them with pip install 'tailrace[train]'")


class Limited:
    """The prompts of a task, `task.epochs` times over, less those before `task.start`."""

    def __init__(self, prompts: Prompts, epochs: int, start: int = 0) -> None:
        self._prompts = prompts
        self.total = max(0, epochs * len(prompts.task) - start) if epochs else None

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        return self._prompts.eval_sets

    def rows(self, start: int, count: int) -> list[Row]:
        return (self._prompts.eval_rows if start >= EVALUATION else self._prompts.rows)(start, count)

    def number(self, index: int) -> int:
        return self._prompts.number(index)


class Later:
    """Opened when prompts are first needed: a controller that takes over a run must be back at once. It has to be the
    source that the run began with: `pins` are of its inputs."""

    def __init__(self, config: Config, pins: Pins | None) -> None:
        self._config = config
        self._pins = pins

    @cached_property
    def _source(self) -> PromptSource:
        refuse_changed(self._pins, pinned(self._config))
        return open_source(self._config)

    @property
    def total(self) -> int | None:
        return self._source.total

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        return self._source.eval_sets

    def rows(self, start: int, count: int) -> list[Row]:
        return self._source.rows(start, count)

    def number(self, index: int) -> int:
        return self._source.number(index)


class Blanks:
    """Prompts without words, as long as the workload says; `task.eval_rows` of them only evaluated."""

    def __init__(self, config: Config) -> None:
        self.total: int | None = None
        self._tokens = bytes(TOKEN_BYTES * max(1, config.workload.prompt_tokens))
        self._rows = config.workload.difficulty.rows
        self.eval_sets = (EvalSet(HELD_OUT, config.task.eval_rows),) if config.task.eval_rows else ()

    def rows(self, start: int, count: int) -> list[Row]:
        return [Row(index, self._tokens, "") for index in range(start, start + count)]

    def number(self, index: int) -> int:
        return index % self._rows if self._rows else -1
