"""Judges: a few processes that score samples and run tools, each question under a deadline.

Used by a replica's loop: `ask`, go on generating, `poll`. Every question gets exactly one answer. A process that hangs
is killed at its question's deadline, one that crashes, or was stopped while it started, is noticed; that question is
`Faulted` with the reason, and those that were waiting behind it go to another process. Processes start ahead (`start`)
or when there is work for them, and end with this one. A task that is `trusted` is asked right here.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import count
from typing import Any, NamedTuple

from tailrace.config.tree import Config
from tailrace.envs.base import Answer, Faulted, Row, Turn
from tailrace.envs.judge import answer_to
from tailrace.envs.judge_process import START_S, JudgeProcess, wait_for
from tailrace.envs.judge_wire import Judged, Question, Ready, Refused
from tailrace.envs.tasks import build_task, may_go_on
from tailrace.watchdog import is_stopped

AHEAD_S = 0.05  # work that a judge is given ahead, by the time its answers have taken
MOST_AHEAD = 256
PAUSE_S = 10.0  # until another start is tried beside judges that do work
LOOK_S = 1.0  # between two looks at a judge that starts
MOST_STOPPED = 3  # looks at which it may be found stopped
STACKS_S = 0.25  # for a judge that is late to write down where it is, before it is killed


class Asked(NamedTuple):
    key: Any
    question: Question


class Judge:
    """A judge process with the questions it has been given."""

    def __init__(self, config: Config, timeout_s: float) -> None:
        self.process = JudgeProcess(config, timeout_s)
        self.pending: deque[Asked] = deque()
        self.ready, self.refusal = False, ""
        self.timeout_s, self.since = timeout_s, time.monotonic()
        self.state = ""  # what it was doing when its time was over
        self.stopped, self._look_at = 0, self.since + LOOK_S  # how often in a row it was found so
        self.pace = AHEAD_S  # seconds per answer, a moving mean; at first nothing is sent ahead

    @property
    def room(self) -> int:
        """Slow questions are not sent ahead, so none waits behind one that hangs; quick ones are, to save time."""
        return min(MOST_AHEAD, max(1, int(AHEAD_S / max(self.pace, 1e-6)))) - len(self.pending)

    @property
    def deadline(self) -> float:
        return self.since + (self.timeout_s if self.ready else START_S) + (STACKS_S if self.state else 0.0)

    @property
    def wake_at(self) -> float:
        """When to look after it even if it says nothing."""
        return self.deadline if self.ready else min(self.deadline, self._look_at)

    @property
    def works(self) -> bool:
        """False if it ended before it was ready, and nobody else's doing explains that."""
        return self.ready or self.stopped > 0 or self.process.was_killed

    def late(self, now: float) -> bool:
        """Its time is over. The stack of a stuck reward goes to the log first, if it can still be had."""
        if not self.pending or (now <= self.deadline and not self._stands_still(now)):
            return False
        if self.state:
            return True
        self.state, asked = self.process.questioned()
        return not asked

    def _stands_still(self, now: float) -> bool:
        """It has long to start; but somebody may have stopped it (SIGSTOP), which is seen from outside."""
        if not self.ready and now >= self._look_at:
            self._look_at = now + LOOK_S
            self.stopped = self.stopped + 1 if is_stopped(self.process.pid) else 0
        return self.stopped >= MOST_STOPPED

    def give(self, asked: list[Asked]) -> None:
        if not self.pending and self.ready:
            self.since = time.monotonic()
        self.pending.extend(asked)
        self.process.send([each.question for each in asked])

    def receive(self) -> list[tuple[Any, Answer]]:
        self.process.flush()
        answers: list[tuple[Any, Answer]] = []
        for reply in self.process.receive() if not self.state else ():  # what it says now comes too late
            self.since = time.monotonic()  # the next question's time starts now
            if isinstance(reply, Judged):
                if not self.pending or self.pending[0].question.id != reply.id:
                    self.process.ended, self.process.broken = True, "answered what it was not asked"
                    return answers
                asked = self.pending.popleft()
                self.pace += 0.2 * (reply.seconds - self.pace)
                answers.append((asked.key, reply.answer))
            elif isinstance(reply, Refused):
                self.refusal = reply.reason
            else:
                assert isinstance(reply, Ready)
                self.ready, self.stopped = True, 0
        return answers

    def end(self) -> str:
        """Kill it. Returns why: what it said, how it ended, or that it took too long."""
        ending = self.process.kill()
        limit_s = LOOK_S * MOST_STOPPED if self.stopped else START_S
        late = f"did not answer within {self.timeout_s:g} s" if self.ready else f"was not ready within {limit_s:g} s"
        state = f": {self.state}" if self.state else ""
        return self.refusal or f"the scoring process {ending or late}{state}"


class Judges:
    """The pool. `ask` and `poll` never block, `poll` for at most `timeout_s`."""

    def __init__(self, config: Config, workers: int | None = None, timeout_s: float | None = None) -> None:
        self.config, self.task = config, build_task(config)
        self.workers = config.task.reward_workers if workers is None else workers
        self.timeout_s = config.task.reward_timeout_s if timeout_s is None else timeout_s
        self._trusted: bool = getattr(self.task, "trusted", False)
        self._judges: list[Judge] = []
        self._queue: deque[Asked] = deque()
        self._done: list[tuple[Any, Answer]] = []
        self._ids = count()
        self._pause_until = 0.0

    @property
    def outstanding(self) -> int:
        """Questions whose answers `poll` has not returned yet."""
        return len(self._queue) + len(self._done) + sum(len(judge.pending) for judge in self._judges)

    def start(self) -> None:
        """All of them, without waiting: what a reward imports may take seconds."""
        if not self._trusted:
            self._judges += [Judge(self.config, self.timeout_s) for _ in range(self.workers - len(self._judges))]

    def ask(self, key: Any, row: Row, transcript: tuple[Turn, ...]) -> bool:
        """Returns whether the answer is certain to end the episode."""
        if self._trusted:
            self._done.append((key, answer_to(self.task, row, transcript)))
        else:
            self._queue.append(Asked(key, Question(next(self._ids), row, transcript)))
            self._hand_out()
        return not may_go_on(self.task, transcript)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Any, Answer]]:
        """Answers, each once. Waits until there is one, but never when nothing is outstanding."""
        until = time.monotonic() + timeout_s
        self._turn()
        while not self._done and self.outstanding and time.monotonic() < until:
            nearest = min((judge.wake_at for judge in self._judges if judge.pending), default=until)
            wait_for([judge.process for judge in self._judges], min(until, nearest) - time.monotonic())
            self._turn()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End every process. What was asked stays unanswered."""
        for judge in self._judges:
            judge.end()
        self._judges.clear()
        self._queue.clear()

    def _turn(self) -> None:
        """Take answers, end what is late or gone, and hand out what waits."""
        for judge in list(self._judges):
            self._done += judge.receive()
        now = time.monotonic()
        for judge in list(self._judges):
            if judge.process.ended or judge.late(now):
                self._end(judge)
        self._hand_out()

    def _end(self, judge: Judge) -> None:
        self._judges.remove(judge)
        reason = judge.end()
        if judge.pending and judge.works:
            self._done.append((judge.pending.popleft().key, Faulted(reason)))
        self._queue.extendleft(reversed(judge.pending))
        if not judge.works:
            self._start_failed(reason)

    def _start_failed(self, reason: str) -> None:
        """No judge can work, unless another one does: then this was an accident."""
        self._pause_until = time.monotonic() + PAUSE_S
        if not any(judge.ready for judge in self._judges):
            self._done += [(asked.key, Faulted(reason)) for asked in self._queue]
            self._queue.clear()

    def _hand_out(self) -> None:
        while self._queue and (judge := self._free()):
            share = -(-len(self._queue) // self.workers)
            judge.give([self._queue.popleft() for _ in range(min(judge.room, share, len(self._queue)))])

    def _free(self) -> Judge | None:
        """The least busy judge that has room; a new one rather than a busy one."""
        judge = min(self._judges, key=lambda each: len(each.pending), default=None)
        if judge is None or (judge.pending and self._may_start()):
            judge = Judge(self.config, self.timeout_s)
            self._judges.append(judge)
        return judge if judge.room > 0 else None

    def _may_start(self) -> bool:
        return len(self._judges) < self.workers and time.monotonic() >= self._pause_until
