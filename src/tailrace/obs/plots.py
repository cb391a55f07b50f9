"""Draw what `tailrace simulate` found, as a bitmap or as an HTML report: the suffix of the path decides.

What is drawn is settled once, in `sweep`; `png` and the script `sweep.js` only draw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailrace.obs.html import asset, report
from tailrace.obs.sweep import ReplicaSpans, sweep_charts


def draw(path: Path, rows: Sequence[Mapping[str, Any]], timelines: Mapping[str, ReplicaSpans], title: str) -> None:
    """Write a figure of `rows` (results as JSON) and `timelines` (by schedule: replica, state, start, end)."""
    if path.suffix.lower() not in (".png", ".html"):
        raise ValueError(f"{path}: a plot ends in .png or .html")
    if not rows:
        raise ValueError("nothing to draw: there are no results")
    charts = sweep_charts(rows, timelines, title)
    if path.suffix.lower() == ".html":
        path.write_text(report(title, asset("sweep.html"), [asset("sweep.js")], charts), encoding="utf-8")
        return
    try:
        from tailrace.obs.png import save_sweep
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ValueError("drawing a .png needs matplotlib; install tailrace[plot], or write --plot out.html") from error
    save_sweep(charts, path)
