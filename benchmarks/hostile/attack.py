"""Attacks: a decoder in a process of its own, which may crash, hang or grow, and is counted."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

import msgspec

from hostile.inputs import Decoder, inputs

HANG_S = 10.0
BROKEN = 3  # the status of a process in which this program itself failed
ROOM = 2 << 30  # bytes of address space on top of what a decoder's process has: beyond that it counts as a crash


class Result(msgspec.Struct):
    name: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    crashes: int = 0
    hangs: int = 0
    peak_mb: float = 0.0
    seconds: float = 0.0
    examples: list[str] = []


COUNTS = struct.Struct("<5q")  # the input under way, accepted, refused, crashes, kilobytes that memory grew by


def attack(decoder: Decoder, count: int, seed: int) -> Result:
    result = Result(decoder.name, examples=[])
    began = time.monotonic()
    with mmap.mmap(-1, 4096) as shared, tempfile.TemporaryDirectory(prefix="tailrace-fuzz-") as folder:
        first = 0
        while first < count:
            first = _attack_apart(decoder, Path(folder), shared, result, first, count, seed)
    result.inputs, result.seconds = count, round(time.monotonic() - began, 1)
    return result


def _attack_apart(
    decoder: Decoder, folder: Path, shared: mmap.mmap, result: Result, first: int, count: int, seed: int
) -> int:
    """In a child, until all is done or the child is dead or stuck. Returns which input is next."""
    shared[: COUNTS.size] = COUNTS.pack(first, 0, 0, 0, 0)
    report = folder.with_name(f"{folder.name}.report")
    child = os.fork()
    if not child:
        try:
            _attack_here(decoder, folder, shared, report, first, count, seed)
        except BaseException:
            report.write_text(traceback.format_exc())
            os._exit(BROKEN)
        os._exit(0)
    status = _wait(child, shared)
    if status is not None and os.waitstatus_to_exitcode(status) == BROKEN:
        raise RuntimeError(f"{decoder.name} cannot be attacked:\n{report.read_text()}")
    at, accepted, refused, crashes, grown = COUNTS.unpack(shared[: COUNTS.size])
    result.accepted, result.refused = result.accepted + accepted, result.refused + refused
    result.crashes, result.peak_mb = result.crashes + crashes, max(result.peak_mb, round(grown / 1024, 1))
    if report.exists():
        result.examples = (result.examples + report.read_text().splitlines())[:10]
        report.unlink()
    if status == 0:
        return count
    kind = "hang" if status is None else f"ended with status {status}"
    result.hangs, result.crashes = result.hangs + (status is None), result.crashes + (status is not None)
    result.examples = [*result.examples, f"input {at}: {kind}"][:10]
    return at + 1


def _wait(child: int, shared: mmap.mmap) -> int | None:
    """Its status; None if it was stuck and had to be killed."""
    last, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        at = COUNTS.unpack(shared[: COUNTS.size])[0]
        if at != last:
            last, since = at, time.monotonic()
        elif time.monotonic() - since > HANG_S * (6 if at == 0 else 1):  # the first one may import torch
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


def _attack_here(
    decoder: Decoder, folder: Path, shared: mmap.mmap, report: Path, first: int, count: int, seed: int
) -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    seeds, decode = decoder.prepare(folder)
    for each in seeds:
        assert decode(each) is not False, f"{decoder.name} refuses what is valid"
    _limit_memory()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted = refused = crashes = 0
    stream = inputs(decoder, seeds, seed, first)
    for at in range(first, count):
        data = next(stream)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
        shared[: COUNTS.size] = COUNTS.pack(at, accepted, refused, crashes, grown)
        try:
            fine = decode(data) is not False
            accepted, refused = accepted + fine, refused + (not fine)
        except decoder.errors:
            refused += 1
        except Exception as error:
            crashes += 1
            with report.open("a") as file:
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}:{place.lineno}"
                file.write(f"input {at}: {type(error).__name__}: {str(error)[:150]!r} at {where} from {data[:60]!r}\n")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
    shared[: COUNTS.size] = COUNTS.pack(count, accepted, refused, crashes, grown)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
