"""The view of a run: one plain line per step without a terminal, a screen that fits with one."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.config import load, with_values
from tailrace.obs.live import LiveRun
from tailrace.obs.terminal import Lines, Screen, clock, picture, watch
from tailrace.protocol import (
    Generate,
    Parked,
    Progressed,
    ReplicaJoined,
    ReplicaLost,
    Request,
    SampleFailed,
    TrajectoryMeta,
)
from tailrace.sim.cluster import Simulation

OWN_BOX = Path(__file__).parents[2] / "examples" / "clusters" / "own_box.toml"
SHOW_CURSOR = "\x1b[?25h"


def live_run(steps: int = 4) -> LiveRun:
    return LiveRun(with_values(load([OWN_BOX]), {"run.steps": steps, "cluster.gpus": 16, "run.name": "demo"}))


@pytest.fixture(scope="module")
def over() -> LiveRun:
    live = live_run()
    Simulation(live.config, live.see).run()
    return live


def drawn(live: LiveRun, height: int, width: int = 110) -> list[str]:
    console = Console(file=StringIO(), width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(picture(live.view(), "demo", height, width))
    return capture.get().splitlines()


def test_without_a_terminal_every_step_is_one_line() -> None:
    live, out = live_run(), StringIO()
    with watch(live, out) as show:
        Simulation(live.config, lambda now, event, commands: (live.see(now, event, commands), show(now))[0]).run()
    lines = out.getvalue().splitlines()
    assert lines[0] == "0:00  starting the trainer, 2 relays and 12 replicas"
    assert lines[1] == "0:00  everybody is up, and the first samples are on their way"
    assert [line.split("  ")[1] for line in lines[2:]] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert all("tokens/s" in line for line in lines[2:])
    assert "\x1b" not in out.getvalue()


def test_what_happened_since_the_last_look_is_told_at_the_end() -> None:
    live, out = live_run(), StringIO()
    with watch(live, out):
        live.see(5.0, ReplicaLost(0, 1, "its process ended"), [])
    assert out.getvalue() == "0:05  r0 lost: its process ended\n"


def test_what_is_alarming_is_told_at_once() -> None:
    live, out = live_run(), StringIO()
    show = Lines(live, out)
    live.see(1.0, ReplicaJoined(0, 1, 0, 0, 100, 8), [])
    live.see(62.0, ReplicaLost(0, 1, "its process ended"), [])
    show(62.0)
    show(63.0)
    assert out.getvalue() == "1:02  r0 lost: its process ended\n"


def test_failures_are_told_ever_more_rarely() -> None:
    live = live_run()
    live.see(0.0, ReplicaJoined(0, 1, 0, 0, 100, 8), [])
    for id in range(150):
        live.see(1.0, Progressed(0, 1, 5, 1, 0), [Generate(0, 1, (Request(id, 1, id, id, 10),))])
        live.see(1.0, SampleFailed(0, id, 1, "it raised"), [])
    assert [one.text.split(";")[0] for one in live.happenings] == [
        "everybody is up, and the first samples are on their way",
        "1 attempt at samples failed so far",
        "10 attempts at samples failed so far",
        "100 attempts at samples failed so far",
    ]


def test_the_screen_says_it_all(over: LiveRun) -> None:
    text = "\n".join(drawn(over, 50))
    for words in ("step 4/4", "reward", "tokens/s", "staleness", "repacks", "version", "r0 ", "idle", "in flight"):
        assert words in text


@pytest.mark.parametrize("height", [1, 5, 8, 12, 24, 60])
def test_the_screen_never_exceeds_the_terminal(over: LiveRun, height: int) -> None:
    assert 1 <= len(drawn(over, height)) <= height
    assert all(len(line) <= 60 for line in drawn(over, height, width=60))


def test_where_there_is_little_room_some_replicas_are_left_out(over: LiveRun) -> None:
    assert any("more replicas" in line for line in drawn(over, 14))
    assert not any("more replicas" in line for line in drawn(over, 40))


def test_moves_are_told() -> None:
    live = live_run()
    for id in (0, 1):
        live.see(0.0, ReplicaJoined(id, 1, 0, 0, 100, 8), [])
    live.see(1.0, Progressed(0, 1, 50, 1, 0), [Generate(0, 1, (Request(7, 1, 0, 0, 10),))])
    moved = Generate(1, 1, (Request(7, 2, 0, 0, 10, resume=True),))
    live.see(2.0, Parked(0, 1, (TrajectoryMeta(7, 1, 20, 0, 0),)), [moved])
    view = live.view()
    assert view.happenings[-1].text == "repack: 1 sample moved from r0 to r1"
    assert [(one.state, one.running, one.kv) for one in view.replicas] == [("idle", 0, 0.5), ("generating", 1, 0.0)]


def test_it_is_drawn_a_few_times_a_second(over: LiveRun) -> None:
    out = StringIO()
    with Screen(over, Console(file=out, force_terminal=True, width=100, height=30)) as show:
        show(10.0)
        once = len(out.getvalue())
        show(10.1)
        assert len(out.getvalue()) == once
        show(10.3)
        assert len(out.getvalue()) > once


def interrupt(screen: Screen) -> None:
    with screen as show:
        show(10.0)
        raise KeyboardInterrupt


def test_after_an_interrupt_the_cursor_is_back(over: LiveRun) -> None:
    out = StringIO()
    with pytest.raises(KeyboardInterrupt):
        interrupt(Screen(over, Console(file=out, force_terminal=True, width=100, height=30)))
    assert SHOW_CURSOR in out.getvalue()
    assert out.getvalue().rindex(SHOW_CURSOR) > out.getvalue().rindex("\x1b[?25l")


def test_the_clock() -> None:
    assert [clock(seconds) for seconds in (0.4, 65, 3723)] == ["0:00", "1:05", "1:02:03"]
