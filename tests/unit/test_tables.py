"""Every table that a command prints has one look."""

from __future__ import annotations

from io import StringIO

from tailrace.obs.tables import print_results, print_table, render_table


def test_the_first_column_is_left_and_numbers_are_right() -> None:
    assert render_table(("name", "a\nb"), [("x", "1"), ("longer", "1,000")]).splitlines() == [
        "            a",
        "name        b",
        "x           1",
        "longer  1,000",
    ]


def test_facts_have_no_headings_and_stand_left() -> None:
    assert render_table((), [("steps", "2"), ("held-out reward", "0.5")], left=2).splitlines() == [
        "steps            2",
        "held-out reward  0.5",
    ]


def test_numbers_are_never_cut_and_no_colour_leaves_the_terminal() -> None:
    out = StringIO()
    print_table(out, ("schedule", "tokens/s"), [("x" * 300, "1"), ("y", "2")], "title", best=1)
    assert out.getvalue().splitlines() == [
        "title",
        f"{'schedule':<300}  tokens/s",
        f"{'x' * 300}         1",
        f"{'y':<300}         2",
    ]


def test_results_are_compared_with_sync_on_the_same_gpus() -> None:
    def row(schedule: str, gpus: int, rate: float) -> dict:
        shares = {"trainer_idle": 0.5, "rollout_idle": 0.25, "kv_usage": 0.1}
        counts = {"trained": 1234, "dropped": 0, "moved": 0, "staleness": {"mean": 0.5, "p95": 1.0, "max": 2}}
        named = {"schedule": schedule, "gpus": gpus, "repack": False, "tokens_per_s": rate, "step_s": 1500.0}
        return named | shares | counts

    out = StringIO()
    print_results([row("sync", 8, 10.0), row("trajectory", 8, 25.0), row("sync", 16, 50.0)], "run: ", out)
    first, second = out.getvalue().split("\n\n")
    assert first.splitlines()[0] == "run: 8 GPUs"
    assert first.splitlines()[-1].split() == [
        "no",
        "repack",
        "25",
        "2.50x",
        "1,500",
        "50",
        "%",
        "25",
        "%",
        "10",
        "%",
        "0.5/1/2",
        "1,234",
        "0",
        "0",
    ]
    assert second.splitlines()[-1].split()[:3] == ["sync", "50", "1.00x"]
