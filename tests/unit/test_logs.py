"""What a process says: by level, in one form, and never at the price of a run."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tailrace import logs
from tailrace.cli import main
from tailrace.queued_stream import QueuedStream

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) ")
log = logging.getLogger("tailrace.some.module")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(logs.VARIABLE, "")
    yield
    monkeypatch.undo()
    logs.for_command()


def say_everything() -> None:
    for level in logs.LEVELS:
        log.log(logging.getLevelName(level.upper()), "at %s", level)


@pytest.mark.parametrize("count", range(len(logs.LEVELS)))
def test_a_command_shows_what_its_level_lets_through(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    logs.for_command()
    logs.set_level(logs.LEVELS[count])
    say_everything()
    assert capsys.readouterr().err.splitlines() == [f"tailrace: at {level}" for level in logs.LEVELS[count:]]
    assert os.environ[logs.VARIABLE] == logs.LEVELS[count], "for those whom it starts"


def test_what_a_record_repeats_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.for_command()
    log.error("there is no run %s", "\x1b]0;title\x07\u202e")
    assert capsys.readouterr().err == "tailrace: there is no run \\x1b]0;title\\x07\\u202e\n"


def test_notes_are_shown_by_default_and_what_others_log_only_as_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    logs.for_command()
    logs.for_command()  # replaces the first
    log.info("a note")
    logging.getLogger("elsewhere").info("a detail")
    logging.getLogger("elsewhere").warning("a warning")
    assert capsys.readouterr().err == "tailrace: a note\ntailrace: a warning\n"


def test_a_component_writes_time_level_and_text_at_the_level_that_it_was_started_with(tmp_path: Path) -> None:
    program = (
        "import logging; from tailrace.logs import for_component\n"
        "for_component(); log = logging.getLogger('tailrace.x')\n"
        "log.info('a detail')\nlog.warning('a warning')\n"
        "try: 1 / 0\nexcept ZeroDivisionError: log.exception('an error')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {logs.VARIABLE: "warning"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, *trace = done.stderr.splitlines()
    assert [LINE.match(line) is not None for line in (first, second)] == [True, True]
    assert (first[24:], second[24:]) == ("WARNING a warning", "ERROR an error")
    assert trace[-1].startswith("ZeroDivisionError")


def test_a_record_that_cannot_be_written_is_lost_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with logs.open_log(Path("/dev/full")) as stream:
        logs.to_stream(stream).error("the disk is full")  # nor does closing it raise anything
    logs.to_stream(stream).error("it is closed")
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), open(writer, "w", buffering=1) as pipe:  # closing tries once more
        logs.to_stream(pipe).error("nobody reads this")
    assert capsys.readouterr().err == ""


def test_a_wrong_call_is_told_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logs.to_stream(sys.stderr).error("%d words", "no number")
    assert "TypeError: %d format" in capsys.readouterr().err


def test_a_log_is_appended_to_and_takes_names_that_are_no_text(tmp_path: Path) -> None:
    for name in ("one", "caf\udce9"):
        with logs.open_log(tmp_path / "log") as stream:
            logs.to_stream(stream).info("about %s", name)
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first.endswith("INFO about one")
    assert second.endswith(r"INFO about caf\udce9")


@pytest.mark.parametrize(
    ("words", "variable", "sentence"),
    [
        (["doctor", "--log-level", "loud"], "", "--log-level is 'loud'; write debug, info, warning or error"),
        (["doctor"], "loud", "TAILRACE_LOG_LEVEL is 'loud'; write debug, info, warning or error"),
        (["doctor", "--log-level"], "", "argument --log-level: expected one argument; see tailrace doctor --help"),
    ],
)
def test_a_level_that_there_is_not_is_refused(words, variable, sentence, monkeypatch, capsys) -> None:
    monkeypatch.setenv(logs.VARIABLE, variable)
    assert main(words) == 2
    assert capsys.readouterr().err == f"tailrace: {sentence}\n"


def test_every_command_takes_a_level_and_errors_are_shown_at_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["simulate", "x"], ["plan", "x"], ["eval", "x"], ["fit", "x"], ["story", "x", "p3"]):
        assert main([*words, "--log-level", "ERROR"]) == 2
        assert re.fullmatch("tailrace: .*x.*\n", capsys.readouterr().err)


def test_lines_that_nobody_reads_give_way_to_newer_ones_and_are_counted():
    reader, writer = os.pipe()
    with open(writer, "w") as pipe, open(reader) as end:
        stream = QueuedStream(pipe)
        for number in range(10_000):  # more than the pipe and the queue hold
            stream.write(f"{number:99}\n")
        stream.drain(0.01)
        shown = threading.Thread(target=lambda: (stream.drain(60), pipe.close()))
        shown.start()
        lines = end.read().splitlines()
        shown.join()
    notes = [line for line in lines if line.endswith("lines were not shown")]
    assert notes
    lost = sum(int(note.split()[0].replace(",", "")) for note in notes)
    assert lost + len(lines) - len(notes) == 10_000
    assert int(lines[-1]) == 9_999


def test_writing_goes_on_when_the_reader_is_gone():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        stream = QueuedStream(pipe)
        for _ in range(2):
            stream.write("nobody\n")
            stream.drain()


def test_a_forked_child_writes_its_own_lines_alone():
    program = (
        "import os; from tailrace import logs; logs.queue_output(); logs.output('parent')\n"
        "if not (child := os.fork()): logs.output('child'); logs.drain_output(); os._exit(0)\n"
        "os.waitpid(child, 0); logs.drain_output()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["child", "parent"]
