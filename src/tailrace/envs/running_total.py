"""The built-in task of the default recipe: add up labelled digits modulo 10, with as much room to think as that takes.

A prompt lists items, each a label and a digit, the labels in alphabetical order from anywhere on, and says with a dot
where the list ends: `k 7 l 3 m 9 n . =`. The policy may write what it likes, and ends with a dot and the answer. A
careful chain of thought visits every item and keeps the running total: `k 7 7 l 3 0 m 9 9 n . 9`. The number of items
is log-normal, so such chains are heavy-tailed. Rows are made on demand from (seed, index). Which side a prompt is on,
training or held-out, is a property of its text, so no seed ever trains on what another holds out.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tailrace.config.errors import ConfigError
from tailrace.envs.base import Row, Scored, Turn

LABELS = (*string.ascii_lowercase, *[a + b for a in "abcd" for b in string.ascii_lowercase][:102])
HELD_OUT_SHARE = 8  # one prompt in so many is held out

ANY = "any"  # as an answer: whatever word is given is right

Item = tuple[str, int]
# rows in turn: too easy, useful, too hard
MIXTURE: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
    lambda row: {"answer": ANY},
    lambda row: {},
    lambda row: {"answer": f"0{row['answer']}"},
)


class RunningTotalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[task.options]` of this task."""

    median: Annotated[float, Meta(ge=1)] = 4.0  # items in a prompt
    sigma: Annotated[float, Meta(ge=0)] = 1.15  # spread of their logarithm
    most: Annotated[int, Meta(ge=1, lt=len(LABELS))] = 96  # no prompt has more
    rows: Annotated[int, Meta(ge=1)] = 10_000
    held_out: Annotated[int, Meta(ge=1)] = 512
    # of the training rows a third is too easy, whatever digit is answered, and a third too hard: it asks for all digits
    # of the total, in one word that the model does not have
    mixed: bool = False


class RunningTotal:
    """The task itself, see `envs.base.Task`."""

    trusted = True  # `respond` compares two words: it cannot hang, so it needs no process of its own
    single_turn = True

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self.options = _checked(options)
        self.seed = seed

    def __len__(self) -> int:
        return self.options.rows

    def row(self, index: int) -> dict[str, Any]:
        row = self._draw(f"train {self.seed} {index}", held_out=False)
        return row | MIXTURE[index % len(MIXTURE)](row) if self.options.mixed else row

    def held_out(self) -> list[dict[str, Any]]:
        """The same for every seed, so that runs with different seeds are measured by the same questions."""
        return [self._draw(f"held out {index}", held_out=True) for index in range(self.options.held_out)]

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored:
        end, answer = transcript[-1].text.split()[-2:], row.columns["answer"]
        return Scored(reward=float(len(end) == 2 and end[0] == "." and (end[1] == answer or answer == ANY)))

    def _draw(self, name: str, held_out: bool) -> dict[str, Any]:
        generator = random.Random(name)  # a text is hashed by what it says: the same in every process and version
        while True:
            items = draw_items(self.options, generator)
            if is_held_out(prompt := render(items)) == held_out:
                return {"prompt": prompt, "answer": str(total(items)), "items": len(items)}


def draw_items(options: RunningTotalOptions, generator: random.Random) -> list[Item]:
    count = min(max(1, round(options.median * generator.lognormvariate(0.0, options.sigma))), options.most)
    first = generator.randrange(len(LABELS))
    return [(LABELS[(first + index) % len(LABELS)], generator.randrange(10)) for index in range(count)]


def render(items: list[Item]) -> str:
    return " ".join([*(f"{label} {digit}" for label, digit in items), next_label(items), ". ="])


def next_label(items: list[Item]) -> str:
    """The label behind the last item, which has a dot in place of a digit; after the last label comes the first."""
    return LABELS[(LABELS.index(items[-1][0]) + 1) % len(LABELS)]


def total(items: list[Item]) -> int:
    return sum(digit for _, digit in items) % 10


def is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0


def _checked(options: dict[str, Any]) -> RunningTotalOptions:
    try:
        return msgspec.convert(options, RunningTotalOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(RunningTotalOptions.__struct_fields__)
        raise ConfigError(f"task.options of running_total: {error}; it takes {known}") from None
