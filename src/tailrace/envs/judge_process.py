"""One judge process as its parent sees it: start, write without waiting, read what is there, kill.

Owned by `judges.py`, which decides what to send and how long to wait; `try_out` is for `examine.py`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from tailrace.config.tree import Config
from tailrace.envs.base import Row
from tailrace.envs.judge_wire import FrameError, Frames, Ready, Refused, Reply, Setup, frame, reply_in
from tailrace.watchdog import ask_for_stacks, look_at

START_S = 120.0  # until a judge must be ready: a reward may import large packages on a busy machine
ENDING_S = 5.0  # for a judge that has closed its pipe to be gone, on a busy machine
BURIAL_S = 5.0  # for a killed judge to be gone; one that waits for a disk in the kernel may never be


class JudgeProcess:
    """A started judge. Nothing here blocks, except `kill` for a moment."""

    def __init__(self, config: Config, timeout_s: float, row: Row | None = None) -> None:
        self.timeout_s = timeout_s
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tailrace.envs.judge"],  # -P: a `json.py` in the folder replaces nothing
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a group of its own, to be killed as one; Ctrl-C is for the parent to handle
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.sink, self.source = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.sink, False)
        os.set_blocking(self.source, False)
        self.ended, self.broken = False, ""
        self.was_killed = False  # by somebody else, as far as is known once it is gone
        self._frames, self._unsent = Frames(), bytearray()
        self.send(Setup(config, timeout_s, row))

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: Any) -> None:
        self._unsent += frame(message)
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes; the rest waits."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.sink, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()  # it is gone; reading will tell

    def receive(self) -> list[Reply]:
        """Every whole message that has come."""
        replies: list[Reply] = []
        try:
            while data := os.read(self.source, 1 << 18):
                replies += map(reply_in, self._frames.feed(data))
            self.ended = True
        except BlockingIOError:
            pass
        except FrameError as error:
            self.ended, self.broken = True, f"sent something that is no answer ({error})"
        return replies

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """What to wait for, as descriptors and events."""
        reading = [(self.source, select.POLLIN)]
        return [*reading, (self.sink, select.POLLOUT)] if self._unsent else reading

    def questioned(self) -> tuple[str, bool]:
        """What it is doing, in words; True if the stack of it comes to the log in a moment."""
        asked = ask_for_stacks(self.pid)
        return look_at(self.pid) + ("; where it was is in the log" if asked else ""), asked

    def kill(self) -> str:
        """End it and all it started, and say how it had ended by itself if it had."""
        status = self._status()
        self.was_killed = status == -signal.SIGKILL
        with suppress(ProcessLookupError, PermissionError):  # all of it is gone
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=BURIAL_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return self.broken or _ending(status, self.timeout_s)

    def _status(self) -> int | None:
        """Its exit status. One that has closed its pipe is about to end, so that is worth a moment."""
        try:
            return self.process.wait(timeout=ENDING_S if self.ended else 0)
        except subprocess.TimeoutExpired:
            return None


def wait_for(judges: list[JudgeProcess], timeout_s: float) -> None:
    """Until one of them has something to read or room to write, or the time is over."""
    poller = select.poll()
    for judge in judges:
        for descriptor, event in judge.wanted:
            poller.register(descriptor, event)
    poller.poll(max(0.0, timeout_s) * 1000)


def try_out(config: Config, row: Row) -> str:
    """Why no judge would start with these settings, or nothing. No sample is judged."""
    judge = JudgeProcess(config, config.task.reward_timeout_s, row)
    deadline = time.monotonic() + START_S
    reply, ending = None, ""
    try:
        while reply is None and not judge.ended and time.monotonic() < deadline:
            wait_for([judge], deadline - time.monotonic())
            judge.flush()
            reply = next(iter(judge.receive()), None)
    finally:
        ending = judge.kill()
    if isinstance(reply, Refused):
        return reply.reason
    return "" if isinstance(reply, Ready) else f"the scoring process {ending or f'was not ready within {START_S:g} s'}"


def _ending(status: int | None, timeout_s: float) -> str:
    if status is None:
        return ""
    if status >= 0:
        return f"ended by itself with status {status}"
    if -status == signal.SIGALRM:
        return f"did not answer within {timeout_s:g} s"
    cause = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{cause}"
