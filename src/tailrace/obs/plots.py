"""Draw what `tailrace simulate` found: throughput against GPUs above, what the replicas did below.

`draw` is called by the command line with plain data; the suffix of the path decides how it is drawn. What is drawn
is settled once, in `plots_picture`; `plots_png` and `plots_html` only put it on paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailrace.obs.plots_picture import compose


def draw(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    timelines: Mapping[str, Sequence[tuple[int, str, float, float]]],
    title: str,
) -> None:
    """Write a figure of `rows` (results as JSON) and `timelines` (by schedule: replica, state, start, end)."""
    if path.suffix.lower() not in (".png", ".html"):
        raise ValueError(f"{path}: a plot ends in .png or .html")
    if not rows:
        raise ValueError("nothing to draw: there are no results")
    picture = compose(rows, timelines, title)
    if path.suffix.lower() == ".html":
        from tailrace.obs.plots_html import page

        path.write_text(page(picture, rows), encoding="utf-8")
        return
    try:
        from tailrace.obs.plots_png import save
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ValueError("drawing a .png needs matplotlib; install tailrace[plot], or write --plot out.html") from error
    save(picture, path)
