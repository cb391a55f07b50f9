"""What a filter of samples says in SQL: conditions on a table of samples, their order, and the index that serves both.

Conditions are on the table `trajectories` of run.db (as t) or on `settled` of the index beside it (as s), which has the
same columns. The index is chosen here, and not by SQLite, which does not know how many rows a value has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tailrace.browse.index_file import BrowseError
from tailrace.store.trajectories import KnownTrajectory
from tailrace.types import EVALUATION

Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Words = Annotated[str, Meta(max_length=400)]
Order = Literal["newest", "oldest", "best", "worst", "longest", "shortest"]
Purpose = Literal["training", "evaluation", "all"]
NUMBERS: dict[Purpose, tuple[int, int]] = {  # of samples and prompts
    "training": (0, EVALUATION),
    "evaluation": (EVALUATION, 1 << 46),
    "all": (0, 1 << 46),
}
State = Literal[
    "", "running", "finished", "trained", "failed", "stale", "filtered", "stopped", "lost", "evaluated", "ended"
]
Finish = Literal["", "stop", "length"]
Term = tuple[str, Any]  # a condition, and its value if it has one
ORDERS: dict[Order, str] = {
    "newest": "{0}.id DESC",
    "oldest": "{0}.id",
    "best": "{0}.reward DESC NULLS LAST, {0}.id DESC",
    "worst": "{0}.reward NULLS LAST, {0}.id DESC",
    "longest": "{0}.tokens DESC NULLS LAST, {0}.id DESC",
    "shortest": "{0}.tokens NULLS LAST, {0}.id DESC",
}
WIDEST = "(SELECT CAST(value AS INTEGER) FROM search.meta WHERE key = 'widest')"


class SampleFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is set has to hold."""

    text: Words = ""  # words of the completion; "in quotes": a phrase; ending in *: a beginning
    asked: Words = ""  # words of the prompt
    prompt: Number | None = None
    row: Number | None = None  # of the data: all visits of one prompt
    group: Number | None = None
    step: Number | None = None  # that trained it
    version: Number | None = None  # that sampled some of its tokens
    state: State = ""
    finish: Finish = ""
    of: Purpose | None = None  # unset: what the rest of the filter is about, else training
    error: Words = ""  # part of the reason why it failed
    failed: bool = False
    min_reward: Finite | None = None
    max_reward: Finite | None = None
    min_tokens: Number | None = None
    max_tokens: Number | None = None
    order: Order = "newest"
    offset: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


# ------------------------------------------------------------------------------------------------------------ in order


def order_of(asked: SampleFilter, table: str) -> str:
    return ORDERS[asked.order].format(table)


def place(asked: SampleFilter, one: KnownTrajectory) -> tuple[Any, ...]:
    """What to sort by in Python, for the same order."""
    if asked.order in ("newest", "oldest"):
        return (one.id if asked.order == "oldest" else -one.id,)
    value = one.reward if asked.order in ("best", "worst") else one.tokens
    sign = -1 if asked.order in ("best", "longest") else 1
    return (value is None, sign * (value or 0), -one.id)


# ---------------------------------------------------------------------------------------------------------- conditions


def is_of_failures(asked: SampleFilter) -> bool:
    """Attempts that ended without a reward, also of samples that were generated anew since."""
    return asked.failed or bool(asked.error) or asked.state == "failed"


def is_by_text(asked: SampleFilter) -> bool:
    return bool(asked.text or asked.asked or asked.row is not None)


def reads_all(asked: SampleFilter) -> bool:
    """In run.db itself, which has no index for this: only for prompts and numbers."""
    if asked.text or asked.prompt is not None or asked.row is not None:
        return False
    return bool(list(terms(asked, "t"))) or asked.order not in ("newest", "oldest")


def settled_index(asked: SampleFilter) -> str:
    """By what has few samples; else they are gone through in the order that is asked for."""
    few = (
        ("group", asked.group is not None),
        ("step", asked.step is not None),
        ("version", asked.version is not None),
        ("failed", is_of_failures(asked)),
        (asked.order, asked.order not in ("newest", "oldest")),
    )
    return next((f"INDEXED BY settled_{name}" for name, given in few if given), "NOT INDEXED")


def terms(asked: SampleFilter, table: str) -> Iterator[Term]:
    """On the columns that both tables have."""
    for condition, value in _terms(asked):
        yield condition.format(table), value


def _terms(asked: SampleFilter) -> Iterator[Term]:
    if asked.asked:
        yield "{0}.prompt_id IN (SELECT rowid FROM search.questions WHERE questions MATCH ?)", in_words(asked.asked)
    if asked.row is not None:
        yield "{0}.prompt_id IN (SELECT prompt FROM search.visits WHERE row = ?)", asked.row
    if asked.version is not None:
        yield "{0}.oldest <= ?", asked.version
        yield "{0}.newest >= ?", asked.version
    if is_of_failures(asked):
        yield "{0}.state = 'failed'", None
    yield from _comparisons(asked)


def _comparisons(asked: SampleFilter) -> Iterator[Term]:
    pairs = (("prompt_id = ?", asked.prompt), ("group_id = ?", asked.group), ("step = ?", asked.step))
    states = ("state != ?", "running") if asked.state == "ended" else ("state = ?", asked.state or None)
    texts = (states, ("finish = ?", asked.finish or None))
    rewards = (("reward >= ?", asked.min_reward), ("reward <= ?", asked.max_reward))
    lengths = (("tokens >= ?", asked.min_tokens), ("tokens <= ?", asked.max_tokens))
    for condition, value in (*pairs, *texts, *rewards, *lengths):
        if value is not None:
            yield f"{{0}}.{condition}", value


def purpose_of(asked: SampleFilter) -> Purpose:
    """Samples of evaluations have the highest numbers, and may be the most: unless they are asked for, the newest
    sample is the newest that was made to be trained on."""
    named = (asked.prompt or 0, asked.group or 0)
    return asked.of or ("evaluation" if asked.state == "evaluated" or max(named) >= EVALUATION else "training")


def purpose_terms(asked: SampleFilter, number: str, bits: int = 0) -> Iterator[Term]:
    """`bits`: that follow the number of the sample."""
    first, end = NUMBERS[purpose_of(asked)]
    yield f"{number} >= ?", first << bits
    yield f"{number} < ?", end << bits


def run_terms(asked: SampleFilter) -> Iterator[Term]:
    """On run.db: all."""
    yield from terms(asked, "t")
    yield from purpose_terms(asked, "t.id")
    if asked.error:
        yield "instr(lower(t.reason), lower(?)) > 0", asked.error


def settled_terms(asked: SampleFilter) -> Iterator[Term]:
    """On the table of the index. No sample has tokens of more versions than the widest: that ends the range."""
    yield from terms(asked, "s")
    yield from purpose_terms(asked, "s.id")
    if asked.version is not None:
        yield f"s.newest <= ? + {WIDEST}", asked.version


def in_words(text: str) -> str:
    """What a person typed as a query of FTS5, in which nothing of it is syntax: words and "phrases", all of them."""
    parts = [part for place, part in enumerate(text.split('"')) for part in ([part] if place % 2 else part.split())]
    found = [_quoted(part) for part in parts if any(letter.isalnum() for letter in part)]
    if not found:
        raise BrowseError(f"'{text[:80]}' has no letter or digit to look for")
    return " AND ".join(found)


def _quoted(part: str) -> str:
    return f'"{part}"' + ("*" if part.endswith("*") else "")
