"""A run as rows: `tailrace.Run("runs/my")`, while it goes on or afterwards.

Rows are plain dictionaries of numbers and text, so `pandas.DataFrame(run.metrics)` and
`datasets.Dataset.from_list(list(run.samples()))` work as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from threading import Thread
from typing import Any, Literal, cast

from msgspec.structs import astuple

from tailrace.api.inputs import apart
from tailrace.api.process import CommandProcess
from tailrace.api.steps import Row, StepRows
from tailrace.config import Config, ConfigError
from tailrace.config.fields import UNSET
from tailrace.config.files import Given
from tailrace.config.keywords import read_keywords
from tailrace.config.load import with_given
from tailrace.config.render import literal
from tailrace.launch.folder import CHECKPOINTS, has_run
from tailrace.obs.ending import ending_of
from tailrace.store.database import FILE, has_table, reading, slices
from tailrace.store.journal import Journal
from tailrace.store.metrics import measurements
from tailrace.store.trajectories import KNOWN, KnownTrajectory, failed_attempts

Callback = Callable[["RecordedRun", Row], object]
LOOK_S = 0.2
STATES = ("running", "finished", "failed", "trained", "stale", "filtered", "stopped", "lost", "evaluated")


class RecordedRun:
    """A run by its folder. `wait`, `stop` and callbacks are for a run that this program has started."""

    def __init__(
        self, path: str | PathLike[str], process: CommandProcess | None = None, rows: StepRows | None = None
    ) -> None:
        """`process`: what `tailrace.train` has started, which may not have begun the run yet. `rows`: of a run that
        goes on, after the steps that it has."""
        self.path = Path(fspath(path))
        self._process, self._rows = process, rows
        self._follower: Thread | None = None
        self._failure: BaseException | None = None
        if process is None and not has_run(self.path):
            raise ConfigError(f"{self.path} has no run; name the directory of one, such as runs/my")

    def __repr__(self) -> str:
        return f"<tailrace.Run {self.path} {self.state}>"

    # -------------------------------------------------------------------------------------------------------- reading

    @property
    def config(self) -> Config:
        """All settings, as the run has them now."""
        return Journal(self.path).config

    @property
    def state(self) -> str:
        """`starting`, `running`, `complete`, `interrupted` or `failed`."""
        if not has_run(self.path):
            return "starting" if self._process and self._process.alive else "failed"
        return ending_of(Journal(self.path).meta, self.path, None).state

    @property
    def metrics(self) -> list[Row]:
        """One row for each complete step: `step`, `time` (seconds of the run), what trainer and controller measured, as
        the mean over its mini-batches, and of the samples that it trained on how many they were (`samples`), their mean
        `reward` and `completion_tokens`, the share that was cut off (`truncated`), and `staleness_max`."""
        return StepRows(self.path).new() if has_run(self.path) else []

    def measurements(self) -> Iterator[Row]:
        """Every single measurement: `now` (seconds of the run), `step`, `source`, `name`, `value`."""
        return (one._asdict() for one in measurements(self.path)) if has_run(self.path) else iter(())

    def samples(self, state: str | None = None, text: bool = True) -> Iterator[Row]:
        """Every sample, oldest first: its ids, `state`, `reward`, `tokens`, `finish`, the versions that generated it,
        the step that trained it; with `text`, its `prompt`, `completion` and the other columns of its row of data.

        `state`: only those that are `running`, `finished`, `failed`, `trained`, `stale`, `filtered`, `stopped`,
        `lost` or `evaluated`.
        """
        if state not in (None, *STATES):
            raise ConfigError(f"state is {state!r}; write one of {', '.join(STATES)}")
        return self._with_text(_known(self.path, state), text)

    def failures(self, text: bool = True) -> Iterator[Row]:
        """Every attempt whose reward or environment failed, with its `reason`: rows as those of `samples`. A sample
        that failed was generated anew, so it may be here several times, and among `samples` with a reward."""
        return self._with_text((_named(astuple(one)) for one in failed_attempts(self.path)), text)

    def _with_text(self, rows: Iterator[Row], text: bool) -> Iterator[Row]:
        if not text:
            return rows
        from tailrace.api.texts import with_texts

        return with_texts(self.path, self.config, rows)

    @property
    def checkpoints(self) -> list[Row]:
        """One row for each: `version`, `path` and `bytes`, the oldest first."""
        from tailrace.trainer.manifest import found_in, step_of

        return [
            {"version": step_of(path), "path": str(path), "bytes": sum(file.stat().st_size for file in path.iterdir())}
            for path in found_in(self.path / CHECKPOINTS)
        ]

    # --------------------------------------------------------------------------------------------------------- acting

    def resume(
        self, *, wait: bool = True, show: bool = True, callbacks: Sequence[Callback] = (), **settings: Any
    ) -> RecordedRun:
        """Go on where it stopped, or further than its end: `run.resume(steps=60, learning_rate=1e-6)`."""
        settings, objects = apart(settings)
        if objects:
            key = next(iter(objects))
            raise ConfigError(f"a run keeps its {key}; tailrace.fork(run, ...) makes another one that has this")
        given = read_keywords(settings)
        with_given(self.config, given)  # what is wrong with them is said here
        words = ["train", str(self.path), "--resume", *as_words(given)]
        return started(self.path, words, wait, show, callbacks)

    def export(self, out: str | PathLike[str], version: int | Literal["best"] | None = None) -> Path:
        """Write a version, the best that was evaluated, or the newest, as a directory that transformers loads."""
        from tailrace.launch.models import export

        export(self.path, version, Path(fspath(out)))
        return Path(fspath(out))

    def wait(self, timeout_s: float | None = None) -> RecordedRun:
        """Until it is over, or for so long. RunFailedError if it failed; what a callback raised is raised here."""
        process = self._own()
        if process.wait(timeout_s) and self._follower is not None:
            self._follower.join()
        if not process.alive:
            self._raise()
            process.check()
        return self

    def stop(self) -> RecordedRun:
        """Interrupt it as Ctrl-C would, and wait until everything is written down; it can be resumed."""
        self._own().interrupt()
        return self.wait()

    def _own(self) -> CommandProcess:
        if self._process is None:
            raise ConfigError(f"{self.path} was not started by this program; end it where it was started")
        return self._process

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _follow(self, callbacks: Sequence[Callback]) -> None:
        """Until its end: every complete step to every callback."""
        process = self._own()
        while True:
            ended = process.wait(LOOK_S if callbacks else None)
            for row in self._new_rows() if callbacks else ():
                if True in [callback(self, row) for callback in callbacks]:
                    process.interrupt()
            if ended:
                return

    def _new_rows(self) -> list[Row]:
        if self._rows is None and has_run(self.path):
            self._rows = StepRows(self.path)
        return self._rows.new() if self._rows else []

    def follow(self, callbacks: Sequence[Callback]) -> RecordedRun:
        """Wait for the end, and call these after every step. Whatever is raised here interrupts the run first."""
        try:
            self._follow(callbacks)
        except BaseException:
            self._own().interrupt()
            self._own().wait()
            raise
        return self.wait()

    def follow_apart(self, callbacks: Sequence[Callback]) -> RecordedRun:
        """The same beside the caller."""
        self._follower = Thread(target=self._call_apart, args=(callbacks,), daemon=True)
        self._follower.start()
        return self

    def _call_apart(self, callbacks: Sequence[Callback]) -> None:
        try:
            self._follow(callbacks)
        except BaseException as error:  # the border to the caller's code: raised by `wait`
            self._failure = error
            self._own().interrupt()


def refuse_callbacks(callbacks: Any) -> None:
    """Before anything is started."""
    if callable(callbacks) or not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks is {type(callbacks).__name__}; write a list of functions: callbacks=[function]")
    wrong = next((one for one in cast("Sequence[Any]", callbacks) if not callable(one)), None)
    if wrong is not None:
        raise ConfigError(f"callbacks has {wrong!r}, which is no function; each is called as callback(run, row)")


def started(path: Path, words: Sequence[str], wait: bool, show: bool, callbacks: Sequence[Callback]) -> RecordedRun:
    """The run that this command makes or goes on with."""
    refuse_callbacks(callbacks)
    rows = StepRows(path) if has_run(path) else None
    if rows is not None:
        rows.new()  # those that it has already are told to nobody
    run = RecordedRun(path, CommandProcess(words, show), rows)
    return run.follow(callbacks) if wait else run.follow_apart(callbacks)


def as_words(given: Mapping[str, Given]) -> list[str]:
    """Settings as they are written on a command line."""
    return [word for key, one in given.items() for word in (f"--{key}", _word(one.value))]


def _word(value: Any) -> str:
    if value is None:
        return UNSET
    return value if isinstance(value, str) else literal(value)


# --------------------------------------------------------------------------------------------------------------- rows


def _known(run: Path, state: str | None) -> Iterator[Row]:
    """A slice at a time: there may be millions, and the run may go on."""
    with reading(run / FILE) as database:
        if not has_table(database, "trajectories"):  # as a simulation has not
            return
    wanted = f"AND state = '{state}'" if state else ""
    query = f"SELECT {KNOWN} FROM trajectories WHERE id > ? {wanted} ORDER BY id LIMIT ?"
    for rows in slices(run / FILE, query, -1):
        yield from map(_named, rows)


def _named(values: Iterable[Any]) -> Row:
    names = ["prompt_id" if name == "prompt" else name for name in KnownTrajectory.__struct_fields__]
    return dict(zip(names, values, strict=True))
