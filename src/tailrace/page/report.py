"""`tailrace report` and `tailrace page --save`: the page as one HTML file, with its figures as they are now.

The file has what the page's script would ask the server for, bounded: figures, all metrics of the first run, those of
the others that are compared with it, the timeline of the first lanes, settings, and some samples in full.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from tailrace.browse.index import build
from tailrace.errors import TailraceError
from tailrace.obs.html import report
from tailrace.page.answers import Query, RunAnswers
from tailrace.page.app import ASSETS, SCRIPTS
from tailrace.page.runs import RunLibrary

SAMPLES = 40  # in full, and as many groups as they are of
METRICS = 200  # curves of a run

log = logging.getLogger(__name__)


class ReportError(TailraceError):
    """Why a report cannot be written, for the person who named the file."""


def save_report(runs: Sequence[Path], path: Path) -> int:
    if path.suffix.lower() != ".html":
        raise ReportError(f"{path} has an unknown ending; write a name that ends in .html")
    try:
        path.write_text(render_report(runs), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}); name another file") from error
    log.info("saved in %s", path)
    return 0


def render_report(runs: Sequence[Path]) -> str:
    library = RunLibrary(runs)
    page = (ASSETS / "page.html").read_text(encoding="utf-8")
    body = page.partition("<body>")[2].partition('<div id="tip"')[0]
    scripts = [(ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS[1:]]
    style = (ASSETS / "work.css").read_text(encoding="utf-8")
    name = runs[0].resolve().name
    return report(f"Tailrace: {name}", body, scripts, collected(library), style)


def collected(library: RunLibrary) -> dict[str, msgspec.Raw]:
    """By the addresses and queries for which the script asks."""
    answers = Collection(library)
    numbers = [one.number for one in library.list()]
    for number in numbers:
        answers.add_run(number)
    answers.add("/runs", {})
    answers.add_samples()
    for address in ("/prompts", "/index", "/config", "/logs"):
        answers.add(address, {}, whole=True)
    answers.add("/timeline", {"count": "128"}, whole=True)
    answers.add_logs()
    return answers.found


class Collection:
    def __init__(self, library: RunLibrary) -> None:
        self._library = library
        self._table = RunAnswers(library).table
        self.found: dict[str, msgspec.Raw] = {}

    def add(self, address: str, query: Query, whole: bool = False) -> Any:
        """The answer, under its address and query; `whole`: under its address, whatever is asked for there."""
        text = urlencode(query)
        try:
            content = self._table[address](dict(query)).content
        except TailraceError:
            return {}
        self.found[f"{address}?{text}" if text and not whole else address] = msgspec.Raw(content)
        return msgspec.json.decode(content)

    def add_run(self, number: int) -> None:
        """Its figures and curves."""
        follower = self._library.followed_to_the_end(number)
        self.found[f"/data?run={number}"] = msgspec.Raw(follower.latest.content)
        names = self.add("/curves", {"run": str(number)}).get("metrics", [])
        pairs = [(source, one["name"]) for one in names for source in one["sources"]]
        for source, name in pairs[:METRICS]:
            self.add("/series", {"run": str(number), "source": source, "name": name})

    def add_logs(self) -> None:
        for one in msgspec.json.decode(self.found["/logs"])["logs"]:
            self.add("/log", {"run": "0", "name": one["name"]})

    def add_samples(self) -> None:
        with suppress(TailraceError, OSError):
            list(build(self._library.path(0)))
        found = self.add("/samples", {"limit": str(SAMPLES)}, whole=True)
        rows = [row["known"] for row in found.get("samples", [])]
        for id in sorted({row["id"] for row in rows}):
            self.add("/sample", {"id": str(id), "run": "0"})
        for id in sorted({row["group"] for row in rows}):
            self.add("/group", {"id": str(id), "run": "0"})
