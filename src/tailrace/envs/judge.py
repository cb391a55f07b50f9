"""A judge: a process that runs the user's rewards and tools, one question at a time, and can be killed at any moment.

Started by `judge_process.py` as `python -m tailrace.envs.judge`. The channel lies on descriptors of its own: what the
user's code prints goes to standard error, what it reads from standard input is nothing. It ends when its parent does:
at the end of its input, in the middle of a question too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgspec

from tailrace.config.errors import ConfigError
from tailrace.envs.base import UNSCORED, Answer, Faulted, Observed, Row, Scored, Task, Turn
from tailrace.envs.imports import described
from tailrace.envs.judge_wire import Frames, Judged, Question, Ready, Refused, Setup, frame
from tailrace.envs.rewards import RewardError, finite, parts_of
from tailrace.envs.tasks import build_task, prepare
from tailrace.watchdog import show_stacks_when_asked

Send = Callable[[bytes], None]


def main() -> None:
    show_stacks_when_asked()
    source, sink = _take_channel()
    frames: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read, args=(source, frames), daemon=True).start()

    def send(data: bytes) -> None:
        while data:
            data = data[os.write(sink, data) :]

    setup = msgspec.msgpack.decode(frames.get(), type=Setup)
    task = _built(setup, send)
    if task is not None:
        _serve(task, frames, send, setup.timeout_s)


def answer_to(task: Task, row: Row, transcript: tuple[Turn, ...]) -> Answer:
    """What the task says, or the reason why it says nothing."""
    try:
        ended = transcript[-1].role != "policy"  # the budget ended it: there is nobody left to answer
        return _checked(_last_score(task, row, transcript) if ended else task.respond(row, transcript))
    except RewardError as error:
        return Faulted(str(error))
    except (Exception, SystemExit) as error:  # the border to the user's code
        return Faulted(f"the reward raised {described(error)}")


def _checked(answer: Any) -> Answer:
    """A class of the user's may answer anything, with any kind of number in it."""
    if isinstance(answer, Scored):
        return Scored(finite(answer.reward, "the task scored", answer.reward), parts_of(answer.parts))
    if not isinstance(answer, Answer):
        raise RewardError(f"the task answered {type(answer).__name__} instead of Scored or Observed")
    if isinstance(answer, Observed) and not isinstance(answer.text, str):
        raise RewardError(f"the task answered Observed with {type(answer.text).__name__} instead of text")
    return answer


def _last_score(task: Task, row: Row, transcript: tuple[Turn, ...]) -> Answer:
    score = getattr(task, "score", None)
    return Faulted(UNSCORED) if score is None else score(row, transcript)


def _take_channel() -> tuple[int, int]:
    """Both ends of the channel on descriptors that no print, no read and no child of the user's code reaches."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return source, sink


def _read(source: int, frames: SimpleQueue[bytes]) -> None:
    """In a thread, so that the end of the parent is seen while a reward runs."""
    parts = Frames()
    while data := os.read(source, 1 << 16):
        for each in parts.feed(data):
            frames.put(each)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with everything that the user's code has started
    os._exit(0)


def _built(setup: Setup, send: Send) -> Task | None:
    try:
        task = build_task(setup.config)
        prepare(task, setup.row)
    except ConfigError as error:
        send(frame(Refused(str(error))))
    except (Exception, SystemExit) as error:  # the border to the user's code
        send(frame(Refused(f"the task cannot be built: {described(error)}")))
    else:
        send(frame(Ready()))
        return task
    return None


def _serve(task: Task, frames: SimpleQueue[bytes], send: Send, timeout_s: float) -> None:
    questions = msgspec.msgpack.Decoder(list[Question])
    while True:
        for question in questions.decode(frames.get()):
            # The parent's deadline comes first. The alarm is for code that holds the interpreter when nobody is left.
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 5)
            send(_judged(task, question))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _judged(task: Task, question: Question) -> bytes:
    start = time.perf_counter()
    answer = answer_to(task, question.row, question.transcript)
    seconds = time.perf_counter() - start
    try:
        return frame(Judged(question.id, answer, seconds))
    except UnicodeEncodeError as error:
        return frame(Judged(question.id, Faulted(f"the answer is not valid text: {error}"), seconds))


if __name__ == "__main__":
    main()
