"""The settings and the logs of a run. A log is named by a request, but never opened by that name: it is looked for
among those that are there, and only plain files are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

TAIL = 64 << 10  # bytes of a log that are shown


class LogFile(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    changed: float  # seconds since 1970


class LogTail(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    text: str
    cut: bool  # there is more before it


def list_logs(folder: Path) -> list[LogFile]:
    """Of every process of the run on this machine."""
    try:
        entries = sorted(os.scandir(folder / "logs"), key=lambda entry: entry.name)
    except OSError:
        return []
    found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries if entry.name.endswith(".log")]
    return [
        LogFile(name.removesuffix(".log"), one.st_size, one.st_mtime)
        for name, one in found
        if stat.S_ISREG(one.st_mode)
    ]


def log_tail(folder: Path, name: str) -> LogTail | None:
    """None if there is no such log."""
    known = next((one for one in list_logs(folder) if one.name == name), None)
    if known is None:
        return None
    try:
        handle = os.open(folder / "logs" / f"{known.name}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            content = file.read(TAIL)
    except OSError:
        return None
    text = content.decode(errors="replace")
    cut = size > TAIL
    return LogTail(name, size, text.partition("\n")[2] if cut else text, cut)
