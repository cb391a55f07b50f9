"""Prompts by pass rate over time, from the index beside a run.

A row of the data is visited again and again; every visit is a prompt id of its own, with a group of samples. `passed`
counts samples whose reward is above 0.5; an attempt that failed counts as a sample that did not pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tailrace.browse.conditions import NUMBERS, Purpose
from tailrace.browse.index_file import opened_index

VISITS = 40  # of a prompt that are shown, the last ones

PromptOrder = Literal["hardest", "easiest", "failing", "rising", "falling"]
ORDERS: dict[PromptOrder, str] = {
    "hardest": "passed * 1.0 / samples, samples DESC",
    "easiest": "passed * 1.0 / samples DESC, samples DESC",
    "failing": "failed DESC, samples DESC",
    "rising": "later - earlier DESC NULLS LAST",
    "falling": "later - earlier NULLS LAST",  # one visit neither rises nor falls
}
SUMS = """SELECT name, row, count(*) AS visits, sum(samples) AS samples, sum(passed) AS passed, sum(failed) AS failed,
       sum(rewards) / sum(samples) AS reward, max(prompt) AS newest"""
NAMED = """(SELECT *, CASE row WHEN -1 THEN prompt ELSE row END AS name FROM visits
             WHERE samples > 0 AND prompt >= :first AND prompt < :end)"""
RATES = f"{SUMS} FROM {NAMED} GROUP BY name"
HALVES = f"""{SUMS},
       avg(passed * 1.0 / samples) FILTER (WHERE place * 2 > total) AS later,
       avg(passed * 1.0 / samples) FILTER (WHERE place * 2 <= total) AS earlier
FROM (SELECT *, row_number() OVER (PARTITION BY name ORDER BY prompt) AS place,
             count(*) OVER (PARTITION BY name) AS total FROM {NAMED})
GROUP BY name
"""


class PromptFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    order: PromptOrder = "hardest"
    of: Purpose = "training"
    offset: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


class Visit(msgspec.Struct, frozen=True, array_like=True):
    prompt: int
    version: int
    samples: int
    passed: int
    failed: int


class PromptRate(msgspec.Struct, frozen=True):
    row: int  # of the data; -1: it does not come again
    visits: int
    samples: int
    passed: int
    failed: int
    reward: float
    newest: int  # the prompt id of the last visit
    history: list[Visit]


def prompt_rates(run: Path, asked: PromptFilter) -> list[PromptRate]:
    with opened_index(run) as connection:
        rates = HALVES if asked.order in ("rising", "falling") else RATES  # which takes a fifth of the time
        query = f"{rates} ORDER BY {ORDERS[asked.order]} LIMIT :limit OFFSET :offset"
        first, end = NUMBERS[asked.of]
        values = {"first": first, "end": end, "limit": asked.limit, "offset": asked.offset}
        rows = connection.execute(query, values).fetchall()
        past = "SELECT prompt, version, samples, passed, failed FROM visits WHERE samples > 0 AND "
        found: list[PromptRate] = []
        for _, row, visits, samples, passed, failed, reward, newest, *_ in rows:
            which, value = ("row = ?", row) if row >= 0 else ("prompt = ?", newest)
            last = connection.execute(f"{past}{which} ORDER BY prompt DESC LIMIT {VISITS}", (value,)).fetchall()
            history = [Visit(*each) for each in reversed(last)]
            found.append(PromptRate(row, visits, samples, passed, failed, reward, newest, history))
    return found
