"""The endless shuffled sequence of prompts, by index.

Owned by the controller, which asks for the rows from some index on and may ask again after a restart: a row depends on
the run's seed and its index alone. Every epoch shows every training row exactly once, in an order of its own.
"""

from __future__ import annotations

import random
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.config.errors import ConfigError
from tailrace.config.tree import HELD_OUT, Config
from tailrace.envs.base import Row, Task
from tailrace.envs.data import eval_rows
from tailrace.envs.rendering import Rendering
from tailrace.scoring import EvalSet
from tailrace.types import EVALUATION, id_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEPT_BYTES = 32 << 20  # of tokens of rendered rows


class Prompts:
    """Rendered rows of a task. `context`: most tokens the model can attend to; without it, what the tokenizer says."""

    def __init__(
        self, task: Task, tokenizer: PreTrainedTokenizerBase, config: Config, context: int | None = None
    ) -> None:
        self.task, self.config = task, config
        self.rendering = Rendering(tokenizer, config.task)
        self.context = context or tokenizer.model_max_length  # the model knows better: many tokenizers say too little
        self._kept: dict[int, Row] = {}
        self._room = KEPT_BYTES

    def rows(self, start: int, count: int) -> list[Row]:
        """The rows at indices `start`, `start + 1`, ..."""
        return [self._row(index) for index in range(start, start + count)]

    @cached_property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """What is never trained on: the task's held-out rows, if it has some, and those of `[eval.sets]`."""
        return tuple([EvalSet(name, len(rows)) for name, rows in self._eval_rows.items()])

    @cached_property
    def _eval_rows(self) -> dict[str, list[dict[str, Any]]]:
        held_out = self.task.held_out()
        own = {HELD_OUT: held_out} if held_out else {}
        return own | eval_rows(self.config)

    @cached_property
    def _named_eval_rows(self) -> list[tuple[str, dict[str, Any]]]:
        """All of them in the order of their numbers, each with what to call it in an error."""
        named = {name: f"eval.sets.{name}, row" if name != HELD_OUT else "held-out row" for name in self._eval_rows}
        return [
            (f"{named[name]} {number}", row)
            for name, rows in self._eval_rows.items()
            for number, row in enumerate(rows, start=1)
        ]

    def held_out(self) -> list[Row]:
        """The rows of all sets; their ids are no index of the sequence."""
        return self.eval_rows(EVALUATION, len(self._named_eval_rows))

    def eval_rows(self, start: int, count: int) -> list[Row]:
        """Those with the ids `start`, `start + 1`, ..."""
        first = start - EVALUATION
        named = self._named_eval_rows[first : first + count]
        return [self._rendered(start + number, row, what) for number, (what, row) in enumerate(named)]

    def check(self, indices: range) -> None:
        """Render the first of these training rows, and the longest of them and of the held-out ones: what is too long,
        or cannot travel to a replica, is best known before a start."""
        lengths = [len(str(self.task.row(index).get("prompt"))) for index in indices]
        for number in {0, *_longest(lengths)}:
            _check_travels(self._training_row(indices[number], index=indices[number]))
        for number in _longest([len(str(row.get("prompt"))) for _, row in self._named_eval_rows]):
            _check_travels(self.eval_rows(EVALUATION + number, 1)[0])

    def number(self, index: int) -> int:
        """Which row of the data the sequence shows at an index."""
        size = len(self.task)
        epoch, position = divmod(index + self.config.task.start, size)
        return order(self.config.run.seed, epoch, size)[position] if self.config.task.shuffle else position

    def _row(self, index: int) -> Row:
        return self._training_row(self.number(index), index)

    def _training_row(self, row: int, index: int) -> Row:
        """Kept as long as there is room: a prompt that is mostly skipped comes up again and again."""
        known = self._kept.get(row)
        if known is None:
            known = self._rendered(index, self.task.row(row), f"training row {row + 1}")
            if self._room > 0:
                self._kept[row] = known
                self._room -= len(known.tokens)
        return msgspec.structs.replace(known, id=index)

    def _rendered(self, index: int, row: dict[str, Any], what: str) -> Row:
        if "prompt" not in row:
            raise ConfigError(f"{what} has no 'prompt'; it has {', '.join(row) or 'nothing'}")
        tokens = self.rendering.prompt_tokens(row["prompt"])
        self._check_length(len(tokens), what)
        columns = {name: value for name, value in row.items() if name != "prompt"}
        return Row(index, id_bytes(tokens), row["prompt"], columns)

    def _check_length(self, tokens: int, what: str) -> None:
        if not tokens:
            raise ConfigError(f"the prompt of {what} has no tokens; the policy needs at least one to go on from")
        answer = self.config.workload.max_completion_tokens
        if tokens + answer > self.context:
            raise ConfigError(
                f"the prompt of {what} has {tokens} tokens, and with workload.max_completion_tokens = {answer} that is "
                f"more than the model's context of {self.context}; shorten the prompt or write a smaller maximum"
            )


def _longest(lengths: list[int]) -> list[int]:
    """The indices of the longest few: what is longest in letters is about the longest in tokens."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])[:8]


def _check_travels(row: Row) -> None:
    for name, value in row.columns.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise ConfigError(f"column '{name}' of a row cannot be sent to a replica: {error}; write text") from None


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """The permutation of an epoch. Seeded by a text, which Python hashes the same way everywhere."""
    indices = list(range(size))
    random.Random(f"prompts {seed} {epoch}").shuffle(indices)
    return tuple(indices)
