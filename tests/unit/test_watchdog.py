"""A loop that hangs is named, with its stack; one that is slow, idle or was stopped with its whole process is not."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailrace import watchdog
from tailrace.watchdog import Watchdog, ask_for_stacks, look_at, show_stacks_when_asked

DEADLINE_S = 30.0
CHILD = """
import sys, time
from tailrace.watchdog import Watchdog, show_stacks_when_asked

class Told(Watchdog):
    def _look(self, now):
        super()._look(now)
        print("looked", now, flush=True)

show_stacks_when_asked()
with Told("child", lambda sentence: print("stuck", sentence, flush=True)) as dog:
    print("up", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        dog.expect("a turn", 1.5)
        time.sleep(0.01)
"""


def until(condition, what):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)


@pytest.fixture
def child(tmp_path):
    """A loop that keeps its word, in a process of its own; what it prints goes to files."""
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=out, stderr=err)
    until(lambda: "up\n" in (tmp_path / "out").read_text(), "the child")
    yield process
    process.kill()
    process.wait(DEADLINE_S)


def told(tmp_path, monkeypatch, act):
    """What a watchdog says about a loop that does `act`."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(watchdog, "ASLEEP", 1000)
    sentences = []
    with (tmp_path / "log").open("w") as log, Watchdog("replica 0", sentences.append, log) as dog:
        act(dog, sentences)
    return sentences, (tmp_path / "log").read_text()


def wait_for_the_version(dog, sentences):
    dog.expect("orders", 60)
    dog.expect("loading v3", 0.05, "raise health.pull_deadline_s")
    until(lambda: sentences, "the watchdog")
    until(lambda: "most recent call first" in Path(dog._log.name).read_text(), "the stacks")


def test_a_stuck_loop_is_named_with_its_place_its_past_and_what_to_do(tmp_path, monkeypatch):
    [sentence], log = told(tmp_path, monkeypatch, wait_for_the_version)
    assert "at: loading v3, in " in sentence
    assert "raise health.pull_deadline_s" in sentence
    assert "ago: orders" in log
    assert "in wait_for_the_version" in log
    assert "Thread" in log


def test_a_loop_is_stuck_until_it_goes_on(tmp_path, monkeypatch):
    def act(dog, sentences):
        assert not dog.stuck
        dog.expect("a long step", 0.02)
        until(lambda: "a long step" in dog.stuck, "the loop to be stuck")
        dog.expect("orders", 60)
        until(lambda: not dog.stuck, "the loop to go on")

    sentences, _ = told(tmp_path, monkeypatch, act)
    assert len(sentences) == 1


def test_a_loop_that_keeps_its_word_is_left_alone(tmp_path, monkeypatch):
    def act(dog, sentences):
        for turn in range(30):
            dog.expect(f"turn {turn}", 60)
            time.sleep(0.002)

    sentences, log = told(tmp_path, monkeypatch, act)
    assert (sentences, log) == ([], "")


def test_a_closed_log_does_not_silence_the_report(monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    sentences, log = [], io.StringIO()
    log.close()
    with Watchdog("trainer", sentences.append, log) as dog:
        dog.expect("a step", 0.0)
        until(lambda: sentences, "the watchdog")


def looks_after(moment, out):
    """How often the child's watchdog has looked since, on the clock that all processes share."""
    whole = out.read_text().rpartition("\n")[0]  # the child may be in the middle of a line
    looks = [line.split()[1] for line in whole.splitlines() if line.startswith("looked ")]
    return sum(float(look) > moment for look in looks)


def test_a_process_that_was_stopped_and_goes_on_does_not_call_itself_stuck(child, tmp_path):
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: "is stopped" in look_at(child.pid), "the stop")
    assert f"kill -CONT {child.pid}" in look_at(child.pid)
    assert not ask_for_stacks(child.pid)
    time.sleep(2.0)  # more than a turn may take
    moment = time.monotonic()
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: looks_after(moment, tmp_path / "out") >= 3, "three looks of its watchdog")
    assert "stuck" not in (tmp_path / "out").read_text()
    child.kill()
    child.wait(DEADLINE_S)
    assert "is gone" in look_at(child.pid)


def test_a_process_writes_its_stacks_when_asked(child, tmp_path):
    assert ask_for_stacks(child.pid)
    seen = look_at(child.pid)
    assert "sleeps" in seen or "computes" in seen
    until(lambda: "most recent call first" in (tmp_path / "err").read_text(), "the stacks")


def test_who_would_die_of_being_asked_is_not_asked():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert not ask_for_stacks(process.pid)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def test_asking_for_ones_own_stacks(tmp_path):
    with (tmp_path / "log").open("w+") as log:
        show_stacks_when_asked(log)
        try:
            signal.raise_signal(signal.SIGUSR1)
            until(lambda: "test_asking_for_ones_own_stacks" in (tmp_path / "log").read_text(), "the stacks")
        finally:
            import faulthandler

            faulthandler.unregister(signal.SIGUSR1)
