"""`tailrace page RUN --save FILE`: the page of a run as one HTML file, with its figures as they are now."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from tailrace.errors import TailraceError
from tailrace.obs.html import report
from tailrace.page.follow import Follower

ASSETS = Path(__file__).parent / "assets"


log = logging.getLogger(__name__)


class ReportError(TailraceError):
    """Why a report cannot be written, for the person who named the file."""


def save_report(run: Path, path: Path) -> int:
    if path.suffix.lower() != ".html":
        raise ReportError(f"--save {path} has an unknown ending; write a name that ends in .html")
    try:
        path.write_text(render_report(run), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"--save {path} cannot be written ({error.strerror}); name another file") from error
    log.info("saved in %s", path)
    return 0


def render_report(run: Path) -> str:
    follower = Follower(run)
    while follower.poll():
        pass
    page, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    body = page.partition("<body>")[2].partition('<div id="tip"')[0]
    return report(f"Tailrace: {run.resolve().name}", body, [script], msgspec.Raw(follower.latest.content))
