"""Schedules side by side: which ones are run, and the table of what came of them."""

from __future__ import annotations

from io import StringIO

import pytest

from tailrace.config import load
from tailrace.launch.bench import WITHOUT_REPACK, BenchRow, _plans, print_rows
from tailrace.obs.ending import RunEnding
from tailrace.obs.fold import GroupCounts
from tailrace.obs.savings import Savings
from tailrace.obs.summary import HeldOut, Summary
from tailrace.obs.trained_steps import Staleness

BLANK = dict.fromkeys(
    ("wall_s", "steps", "trained_groups", "trained_samples", "trained_tokens", "repacks", "moved", "publish_stall_s"), 0
)


def summary(tokens_per_s: float) -> Summary:
    nobody = dict.fromkeys(
        ("trainer_idle", "rollout_idle", "rollout_scoring", "failed_samples", "failed_attempts"), 0
    ) | {"ledger": GroupCounts(0, 0, 0, 0, 0, 0, 0, 0)}
    whole = {"ended": RunEnding("complete"), "staleness": Staleness(), "savings": Savings()}
    unmeasured = dict.fromkeys(("accuracy", "mean_reward"), HeldOut(None, None))
    return Summary(**BLANK, **nobody, **whole, **unmeasured, strangers={}, tokens_per_s=tokens_per_s)


def test_a_schedule_that_cannot_run_with_these_settings_is_left_out_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    config = load([], ["--model.preset=qwen2.5-7b", "--schedule.max_staleness=0"])
    assert [name for name, _ in _plans(config)] == [
        "sync",
        "stream",
        "partial",
        "trajectory",
        "adaptive",
        WITHOUT_REPACK,
    ]
    assert "note: one_step is left out: schedule.max_staleness is 0" in caplog.text


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"sync": 100.0, "partial": 250.0}, ["1.00x", "2.50x"]),
        ({"partial": 250.0}, ["-"]),
        ({"sync": 0.0, "partial": 250.0}, ["-", "-"]),
    ],
)
def test_rows_are_held_against_sync_where_it_was_run(rates: dict[str, float], expected: list[str]) -> None:
    out = StringIO()
    print_rows([BenchRow(name, summary(rate)) for name, rate in rates.items()], out)
    assert [line.split()[2] for line in out.getvalue().splitlines()[2:]] == expected
