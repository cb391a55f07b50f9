"""The view of a run: one plain line per step without a terminal, a screen that fits with one."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.config import load, with_values
from tailrace.launch.view import LiveView
from tailrace.obs.live import LiveRun
from tailrace.obs.terminal import Lines, Screen, clock, picture, watch
from tailrace.protocol import (
    WITH_THE_RUN,
    ControllerRestarted,
    Finished,
    Generate,
    JudgedTurn,
    Parked,
    Progressed,
    ReplicaJoined,
    ReplicaLost,
    Request,
    SampleFailed,
    ScoringStarted,
    SettingsChanged,
    Stop,
    Train,
    Trained,
    TrainerJoined,
    TrainGroup,
    TrajectoryMeta,
)
from tailrace.sim.simulation import Simulation
from tailrace.store.run import RunStore

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
    assert lines[1] == "0:00  all processes are up; the first samples are assigned"
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


def test_what_ended_with_the_run_is_no_fault() -> None:
    live, out = live_run(), StringIO()
    with watch(live, out):
        live.see(0.0, ControllerRestarted(), [])
        live.see(0.0, ReplicaLost(0, 1, WITH_THE_RUN), [])
        live.see(0.0, ReplicaLost(1, 1, "killed by signal 9"), [])
    assert out.getvalue().splitlines() == ["0:00  resumed", "0:00  r1 lost: killed by signal 9"]
    assert live.noticed["warning"] == 1


def test_an_update_that_is_not_finite_is_told_at_once() -> None:
    live, out = live_run(), StringIO()
    show = Lines(live, out)
    live.measure(62.0, 3, "trainer", {"skipped": 0.0, "loss": 0.5})
    live.measure(63.0, 4, "trainer", {"skipped": 1.0, "loss": float("nan"), "grad_norm": float("nan")})
    show(63.0)
    told = "an update of step 5 is skipped: its loss or gradient is not finite; after three in a row the run ends"
    assert out.getvalue() == f"0:00  {told}\n"
    assert drawn(live, 50)


def test_a_mini_batch_without_advantage_leaves_the_figures_of_the_one_before_it() -> None:
    live = live_run()
    live.measure(1.0, 0, "trainer", {"without_advantage": 0.0, "entropy": 0.7, "grad_norm": 0.3, "reward": 0.5})
    live.measure(2.0, 0, "trainer", {"without_advantage": 1.0, "reward": 1.0})
    text = "\n".join(drawn(live, 50, width=200))
    assert "entropy 0.7   grad norm 0.3   without advantage 1 of 2 mini-batches" in text


def test_failures_are_told_ever_more_rarely() -> None:
    live = live_run()
    live.see(0.0, ReplicaJoined(0, 1, 0, 0, 100, 8), [])
    for id in range(150):
        live.see(1.0, Progressed(0, 1, 5, 1, 0), [Generate(0, 1, (Request(id, 1, id, id, 10),))])
        live.see(1.0, SampleFailed(0, id, 1, "it raised"), [])
    assert [one.text.split(";")[0] for one in live.notices] == [
        "all processes are up",
        "1 attempt at samples failed so far",
        "10 attempts at samples failed so far",
        "100 attempts at samples failed so far",
    ]


def test_nothing_in_a_reason_steers_the_terminal() -> None:
    hostile, shown = "it raised \x1b[2J\u202e\r\nstep 9/4", "it raised \\x1b[2J\\u202e step 9/4"
    live, out = live_run(), StringIO()
    with watch(live, out):
        live.see(0.0, ReplicaJoined(0, 1, 0, 0, 100, 8), [Generate(0, 1, (Request(7, 1, 7, 7, 10),))])
        live.see(1.0, SampleFailed(0, 7, 1, hostile), [])
    assert out.getvalue().splitlines()[1] == f"0:01  1 attempt at samples failed so far; t7: {shown}"
    assert any(shown in line for line in drawn(live, 50))


@pytest.mark.parametrize("event", [ControllerRestarted(), SettingsChanged({"run.steps": 2})])
def test_what_comes_after_the_end_counts_once_the_run_goes_on(event: ControllerRestarted | SettingsChanged) -> None:
    live = live_run()
    live.see(0.0, ReplicaJoined(0, 1, 0, 0, 100, 8), [Generate(0, 1, (Request(7, 1, 7, 7, 10),))])
    live.see(0.0, Progressed(0, 1, 5, 1, 0), [Stop("it failed", failed=True)])
    live.see(1.0, SampleFailed(0, 7, 1, "late"), [])
    assert live.view().failures == 0
    live.see(2.0, event, [])
    live.see(3.0, SampleFailed(0, 7, 1, "it raised"), [])
    assert live.view().failures == 1


def test_the_screen_says_it_all(over: LiveRun) -> None:
    text = "\n".join(drawn(over, 50))
    for words in ("step 4/4", "reward", "tokens/s", "staleness", "repacks", "version", "r0 ", "idle", "in flight"):
        assert words in text


@pytest.mark.parametrize("height", [1, 5, 8, 12, 24, 60])
def test_the_screen_never_exceeds_the_terminal(over: LiveRun, height: int) -> None:
    assert 1 <= len(drawn(over, height)) <= height
    assert all(len(line) <= 60 for line in drawn(over, height, width=60))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_what_matters_is_whole_at_any_width(over: LiveRun, width: int) -> None:
    over.measured = {"trainer/loss": 0.5, "trainer/kl": 0.25, "trainer/entropy": 1.5, "trainer/grad_norm": 2.0}
    lines = drawn(over, 30, width)
    text = "\n".join(lines)
    assert all(len(line) <= width for line in lines)
    assert "…" not in text.replace("… and", "")
    view = over.view()
    for words in ("demo", "step 4/4", clock(view.seconds), "reward ", f"tokens/s {view.tokens_per_s:,.0f}"):
        assert words in text
    for words in (f"staleness {view.staleness.mean:.1f}", "version", "loss 0.5", "kl 0.25", "failed samples 0"):
        assert words in text
    assert [line.split() for line in lines if line.startswith("replica ")] == [
        ["replica", "state", "version", "KV", "samples", "waiting", *(["scoring"] if width > 60 else []), "idle"]
    ]
    assert f"{view.ledger.trained} trained" in text
    assert f"{view.ledger.in_flight} in flight" in text
    assert ("grad norm 2" in text) == (width >= 80)
    assert ("░" in text) == (width >= 80)


def test_a_long_name_gives_way_to_how_far_the_run_is(over: LiveRun) -> None:
    console = Console(file=StringIO(), width=60, color_system=None)
    with console.capture() as capture:
        console.print(picture(over.view(), "a-name-that-is-longer-than-anybody-would-want · trajectory", 3, 60))
    assert "… " in capture.get().splitlines()[0]
    assert "step 4/4" in capture.get().splitlines()[0]


def test_the_screen_is_named_after_the_run() -> None:
    config = load([OWN_BOX], ["--run.name="])
    out = StringIO()
    with Screen(LiveRun(config, name="running_total"), Console(file=out, force_terminal=True, width=80, height=20)):
        pass
    assert "running_total · trajectory" in out.getvalue()


def test_a_run_without_a_name_goes_by_its_folder(tmp_path: Path) -> None:
    config = load([OWN_BOX], ["--run.name="])
    with RunStore.create(tmp_path / "running_total", config) as store:
        assert LiveView(store, config).live.name == "running_total"


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
    assert view.notices[-1].text == "repack: 1 sample moved from r0 to r1"
    assert [(one.state, one.running, one.kv) for one in view.replicas] == [("idle", 0, 0.5), ("generating", 1, 0.0)]


def test_a_slow_judge_is_seen() -> None:
    live, out = live_run(), StringIO()
    live.see(0.0, ReplicaJoined(0, 1, 0, 0, 100, 8), [])
    live.see(0.0, Progressed(0, 1, 0, 1, 0), [Generate(0, 1, (Request(7, 1, 0, 0, 10),))])
    live.see(1.0, ScoringStarted(0, 1, (JudgedTurn(7, 1, 0, final=True),)), [])
    live.see(10.0, Progressed(0, 1, 0, 0, 0), [])
    (replica,) = live.view().replicas
    assert (replica.state, replica.running, replica.scoring) == ("scoring", 0, 1)
    text = "\n".join(drawn(live, 30))
    assert "idle 90 % (judging 90 %)" in text
    meta = TrajectoryMeta(7, 1, 20, 0, 0, "stop", 1.0)
    live.see(10.0, TrainerJoined(1, 0), [])
    live.see(10.0, Finished(0, meta), [Train(1, 0, 0, True, (TrainGroup(0, (7,)),))])
    with watch(live, out):
        live.see(10.0, Trained(1, 0, 0), [])
    assert "replicas 90 % (judging 90 %)" in out.getvalue()


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
