"""What a process says, configured in one place: log records by level, and the output of a command.

A module logs with `logging.getLogger(__name__)`. Commands show records as `tailrace: text` on standard error; a
component of a run writes time, level and text to its standard error, which is its file in the run's logs/ folder.
`--log-level` sets the level, and `TAILRACE_LOG_LEVEL` hands it to the processes that a command starts.

A record that cannot be written (a full disk, a closed log, a pipe without a reader) is lost; it never ends a run.
Commands that keep a run alive call `queue_output`, so that a pipe that nobody empties does not hold it up either.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from tailrace.errors import TailraceError
from tailrace.queued_stream import QueuedStream
from tailrace.wording import plain

VARIABLE = "TAILRACE_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
DEFAULT = "info"
TERMINAL = "tailrace: %(message)s"
FILE = "%(asctime)s %(levelname)s %(message)s"


class LogLevelError(TailraceError):
    """A level that there is not."""


class SafeHandler(logging.Handler):
    """Writes to a stream; without one, to what standard error is at that moment."""

    def __init__(self, layout: str, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream
        self.setFormatter(logging.Formatter(layout))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = self._stream or sys.stderr
            stream.write(f"{plain(self.format(record))}\n")  # in one piece: several processes may have the same file
            stream.flush()
        except (OSError, ValueError):
            pass
        except Exception:
            self.handleError(record)


def for_command() -> None:
    """Records go to the terminal of whoever typed the command."""
    _install(SafeHandler(TERMINAL))


def for_component() -> None:
    """Records go to the log of this component of a run."""
    _install(SafeHandler(FILE))


def set_level(name: str | None) -> None:
    """Here and in all processes that are started from here; None: the level of the environment."""
    if name is not None:
        os.environ[VARIABLE] = _checked(name, "--log-level")
    logging.getLogger("tailrace").setLevel(_level().upper())


def open_log(path: Path) -> TextIO:
    """To append to. Nothing is buffered, so closing it on a full disk raises nothing."""
    return io.TextIOWrapper(path.open("ab", 0), encoding="utf-8", errors="backslashreplace", write_through=True)


def to_stream(stream: TextIO) -> logging.Logger:
    """Records go to this log file alone."""
    logger = logging.Logger("tailrace", _level().upper())
    logger.addHandler(SafeHandler(FILE, stream))
    return logger


def output(text: object, stream: TextIO | None = None) -> None:
    """The result of a command, or a line of its view: on standard output, unless that is somewhere else."""
    out = stream or sys.stdout
    out.write(f"{text}\n")  # in one piece
    out.flush()


def queue_output() -> None:
    """From here on nothing that this process writes to its standard streams holds it up."""
    sys.stdout, sys.stderr = _queued(sys.stdout), _queued(sys.stderr)


def drain_output() -> None:
    """At the end of a process: what was written goes out, if anybody reads; the streams are as they were."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, QueuedStream):
            stream.drain()
    sys.stdout, sys.stderr = _replaced(sys.stdout), _replaced(sys.stderr)


def _level() -> str:
    return _checked(os.environ.get(VARIABLE) or DEFAULT, VARIABLE)


def _checked(level: str, source: str) -> str:
    if level.lower() not in LEVELS:
        raise LogLevelError(f"{source} is '{level[:80]}'; write {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    return level.lower()


def _install(handler: SafeHandler) -> None:
    """Instead of an earlier one."""
    root = logging.getLogger()
    for each in [each for each in root.handlers if isinstance(each, SafeHandler)]:
        root.removeHandler(each)
    root.addHandler(handler)
    logging.getLogger("tailrace").setLevel(DEFAULT.upper())
    with suppress(LogLevelError):  # that is told by `set_level`
        set_level(None)


def _queued(stream: TextIO) -> TextIO:
    try:
        return stream if isinstance(stream, QueuedStream) else cast(TextIO, QueuedStream(stream))
    except (AttributeError, OSError, ValueError):  # closed, or nothing that could block
        return stream


def _replaced(stream: TextIO) -> TextIO:
    return stream.replaced if isinstance(stream, QueuedStream) else stream
