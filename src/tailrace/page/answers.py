"""What the page answers to its own script: an address and a query in, JSON out. `app` decides who may ask.

    /runs                              the runs that there are
    /data      run                     all figures of the overview
    /samples   run and a filter        samples (`browse.conditions.SampleFilter`), with the beginning of their texts
    /sample    run, id                 one in full
    /group     run, id                 all of a group in full, side by side
    /prompts   run, order              prompts by pass rate over time
    /curves    run;  /series  run, source, name    every metric by name; the curve of one
    /timeline  run, begin, end, first, count       lanes, as closely as they can be seen
    /config    run;  /logs  run;  /log  run, name
    /index     run                     how far the text index has come, and its size

A query is checked against the type of its fields; what is not in it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from tailrace.browse.conditions import SampleFilter
from tailrace.browse.index import state_of
from tailrace.browse.listing import find_samples
from tailrace.browse.prompts import PromptFilter, prompt_rates
from tailrace.browse.sample import completion_text, view_samples
from tailrace.browse.tokens import SampleTokens, read_tokens
from tailrace.errors import TailraceError
from tailrace.page.files import list_logs, log_tail
from tailrace.page.follow import PageContent
from tailrace.page.runs import RunLibrary
from tailrace.page.series import SeriesQuery, metric_names, series
from tailrace.page.shared_answers import Stamp
from tailrace.page.timeline import TimelineQuery
from tailrace.store.database import file_of
from tailrace.store.journal import Journal
from tailrace.store.trajectories import KnownTrajectory, known_trajectories

BEGINNING = 300  # letters of a sample's text in a list
GROUP_TOKENS = 4000  # of each sample of a group
MOST_FIELDS = 24
MOST_MEMBERS = 200  # of a group
OF_FILES = ("/samples", "/sample", "/group", "/prompts", "/curves", "/series", "/config", "/index")

Query = dict[str, str]
Answer = Callable[[Query], PageContent]
T = TypeVar("T", bound=msgspec.Struct)


class BadQueryError(TailraceError):
    """A query that makes no sense."""


class RunQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class OneQuery(RunQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[int, Meta(ge=0, lt=1 << 53)]


class LogQuery(RunQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=100)]


class RunAnswers:
    def __init__(self, library: RunLibrary) -> None:
        self._library = library
        self.table: dict[str, Answer] = {
            "/data": lambda query: library.follower(_parsed(query, RunQuery).run).latest,
            "/runs": lambda query: _content({"runs": library.list()}),
            "/samples": lambda query: _content(self.samples(query)),
            "/sample": lambda query: _content(self.sample(_parsed(query, OneQuery))),
            "/group": lambda query: _content(self.group(_parsed(query, OneQuery))),
            "/prompts": lambda query: _content(self.prompts(query)),
            "/curves": lambda query: _content(self.metrics(_parsed(query, RunQuery))),
            "/series": lambda query: _content(self.series(_parsed(query, SeriesQuery))),
            "/timeline": lambda query: _content(self.timeline(_parsed(query, TimelineQuery))),
            "/config": lambda query: _content(self.config(_parsed(query, RunQuery))),
            "/logs": lambda query: _content(self.logs(_parsed(query, RunQuery))),
            "/log": lambda query: _content(self.log(_parsed(query, LogQuery))),
            "/index": lambda query: _content(self.index(_parsed(query, RunQuery))),
        }

    def stamp(self, address: str, query: Query) -> Stamp:
        """Of the files that an answer follows from; None: it follows from more."""
        if address not in OF_FILES:
            return None
        folder = file_of(self._run_of(query)[1]).parent
        return tuple([_written(path) for path in sorted(folder.glob("*.db*"))])

    # --------------------------------------------------------------------------------------------------------- samples

    def samples(self, query: Query) -> Any:
        number, path = self._run_of(query)
        found = find_samples(path, _parsed(query, SampleFilter))
        rows = [{"known": one, "text": text} for one, text in self._with_text(number, found.samples)]
        return {"samples": rows, "count": found.count, "more": found.more_than_counted}

    def sample(self, asked: OneQuery) -> Any:
        path = self._library.path(asked.run)
        known = known_trajectories(path, "trajectory", asked.id)
        if not known:
            raise BadQueryError(f"this run has no sample t{asked.id}")
        return view_samples(path, self._library.config(asked.run), known, self._library.decoder(asked.run))[0]

    def group(self, asked: OneQuery) -> Any:
        path = self._library.path(asked.run)
        known = find_samples(path, SampleFilter(group=asked.id, order="oldest", limit=MOST_MEMBERS)).samples
        decoder = self._library.decoder(asked.run)
        return {"samples": view_samples(path, self._library.config(asked.run), known, decoder, GROUP_TOKENS)}

    def prompts(self, query: Query) -> Any:
        number, path = self._run_of(query)
        rates = prompt_rates(path, _parsed(query, PromptFilter))
        return {"prompts": [{"rate": one, "text": self._question(number, one.newest)} for one in rates]}

    def index(self, asked: RunQuery) -> Any:
        path = self._library.path(asked.run)
        return state_of(path)._asdict()

    def _with_text(self, number: int, samples: list[KnownTrajectory]) -> list[tuple[KnownTrajectory, str]]:
        """With the text so far, and how much there is of what is being generated."""
        tokens, decoder = read_tokens(self._library.path(number), samples), self._library.decoder(number)
        return [
            (_so_far(one, each), completion_text(each, decoder, BEGINNING)[:BEGINNING])
            for one, each in zip(samples, tokens, strict=True)
        ]

    def _question(self, number: int, prompt: int) -> str:
        known = known_trajectories(self._library.path(number), "prompt", prompt)[:1]
        rows = [one.row for one in read_tokens(self._library.path(number), known) if one.row is not None]
        return self._library.decoder(number).text(rows[0].ids[:BEGINNING].tolist()) if rows else ""

    def _run_of(self, query: Query) -> tuple[int, Any]:
        """Taken out of the query: the rest of it is a filter."""
        number = _parsed({"run": query.pop("run", "0")}, RunQuery).run
        return number, self._library.path(number)

    # -------------------------------------------------------------------------------------------------------- the rest

    def metrics(self, asked: RunQuery) -> Any:
        return {"metrics": metric_names(self._library.path(asked.run))}

    def series(self, asked: SeriesQuery) -> Any:
        return {"points": series(self._library.path(asked.run), asked)}

    def timeline(self, asked: TimelineQuery) -> Any:
        return self._library.follower(asked.run).timeline(asked)

    def config(self, asked: RunQuery) -> Any:
        journal = Journal(self._library.path(asked.run))
        about = {name: journal.meta.get(name, "") for name in ("tailrace", "driver", "created")}
        return {"config": journal.meta.get("config", ""), "about": about}

    def logs(self, asked: RunQuery) -> Any:
        return {"logs": list_logs(file_of(self._library.path(asked.run)).parent)}

    def log(self, asked: LogQuery) -> Any:
        found = log_tail(file_of(self._library.path(asked.run)).parent, asked.name)
        if found is None:
            raise BadQueryError("this run has no such log")
        return found


def _written(path: Path) -> tuple[str, int, int]:
    try:
        found = path.stat()
        return path.name, found.st_mtime_ns, found.st_size
    except OSError:  # it is gone since
        return path.name, 0, 0


def _so_far(one: KnownTrajectory, tokens: SampleTokens) -> KnownTrajectory:
    """Of a sample that is being generated: how much there is of it."""
    if one.tokens is not None or tokens.stored is None:
        return one
    return msgspec.structs.replace(one, tokens=sum(map(len, tokens.stored.pieces[1:])))


def parse_query(text: str) -> Query:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=MOST_FIELDS)
    except ValueError:
        raise BadQueryError("that query cannot be read") from None
    if len(dict(pairs)) != len(pairs):
        raise BadQueryError("a field is there twice in that query")
    return dict(pairs)


def _parsed(query: Query, kind: type[T]) -> T:
    try:
        return msgspec.convert({name: value for name, value in query.items() if value}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadQueryError(f"that query makes no sense: {error}") from None


def _content(value: Any) -> PageContent:
    content = msgspec.json.encode(value)
    return PageContent(f'"{hashlib.sha256(content).hexdigest()[:32]}"', content)
