"""The view of a running run: a compact screen on a terminal, one plain line per step anywhere else.

    with watch(live) as show:
        ...
        show(now)          # as often as you like; drawn at most every REFRESH_S

The controller calls it from its own loop, so nothing here has a thread or a clock. The screen is never taller than the
terminal, and however the block is left, by Ctrl-C too, the cursor is back and the last look stays where it was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from math import inf
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tailrace.obs.account import StepRecord
from tailrace.obs.live import Happening, LiveRun, ReplicaView, RunView

REFRESH_S = 0.25
BAR = 24  # characters
STATE_STYLES = {"generating": "cyan", "training": "green", "pulling": "blue", "idle": "yellow", "lost": "bold red"}
WHY_IDLE = {"idle": "no work admitted", "lost": "lost"}
FIGURES = ("loss", "entropy", "kl", "grad_norm")  # of the trainer, if it measures them


class Show(Protocol):
    """Either view."""

    def __call__(self, now: float) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def watch(live: LiveRun, stream: TextIO | None = None) -> Show:
    """The view that fits where it goes."""
    out = sys.stdout if stream is None else stream
    if out.isatty() and os.environ.get("TERM") != "dumb":
        return Screen(live, Console(file=out))
    return Lines(live, out)


# ------------------------------------------------------------------------------------------------------ plain lines


class Lines:
    """One line per step, and one for everything notable."""

    def __init__(self, live: LiveRun, stream: TextIO) -> None:
        self.live = live
        self.stream = stream
        self._steps = len(live.account.steps)
        self._happened = live.happened

    def __call__(self, now: float) -> None:
        self._catch_up(now)

    def _catch_up(self, now: float | None) -> None:
        live = self.live
        new = min(live.happened - self._happened, len(live.happenings))
        self._happened = live.happened
        for one in list(live.happenings)[len(live.happenings) - new :]:
            if one.weight != "small":
                self._print(f"{clock(one.at)}  {one.text}")
        steps = live.account.steps[self._steps :]
        self._steps += len(steps)
        for step in steps:
            self._print(step_line(step, live.view(now)))

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._catch_up(None)


def step_line(step: StepRecord, view: RunView) -> str:
    ages = step.staleness
    kv = [replica.kv for replica in view.replicas]
    words = [
        f"{clock(step.ended)}  step {step.step + 1}/{view.total_steps}",
        f"reward {number(step.reward)}",
        f"{view.tokens_per_s:,.0f} tokens/s",
        f"staleness {ages.mean:.1f} (max {ages.max})",
        f"KV {percent(sum(kv) / len(kv) if kv else 0.0)}",
        f"idle: trainer {percent(view.trainer_idle)}, replicas {percent(view.rollout_idle)}",
        f"{view.moved:,} moved",
        f"{clock(view.eta_s)} to go" if view.eta_s is not None else "",
    ]
    return "  ".join(word for word in words if word)


# -------------------------------------------------------------------------------------------------------- the screen


class Screen:
    """Drawn in place with rich."""

    def __init__(self, live: LiveRun, console: Console) -> None:
        self.live = live
        self.console = console
        self._drawn = -inf
        self._screen = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __call__(self, now: float) -> None:
        if now - self._drawn >= REFRESH_S:
            self._drawn = now
            self._draw(now)

    def _draw(self, now: float | None) -> None:
        title = f"{self.live.config.run.name or 'run'} · {self.live.config.schedule.kind}"
        height, width = self.console.height, self.console.width
        self._screen.update(picture(self.live.view(now), title, height - 1, width), refresh=True)

    def __enter__(self) -> Self:
        self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._draw(None)
        finally:
            self._screen.stop()


def picture(view: RunView, title: str, height: int, width: int) -> RenderableType:
    """All of it in at most `height` lines: replicas and happenings give way where there is little room."""
    above = [_header(view, title, width), _figures(view), Text()]
    below = [_trainer(view), _idleness(view), _groups(view)]
    room = height - len(above) - len(below) - 1  # the table has a head
    shown = max(0, min(len(view.replicas), room - 2 if len(view.replicas) > room - 2 else room))
    table = [_replicas(view.replicas[:shown])] if shown else []
    hidden = len(view.replicas) - shown
    more = [_line(f"… and {hidden:,} more replicas", "dim")] if hidden else []
    left = room - shown - len(more) - 1
    happenings = [Text(), *_happenings(view.happenings[-left:])] if left > 0 and view.happenings else []
    return Group(*[*above, *table, *more, *below, *happenings][: max(1, height)])


def _line(text: str = "", style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _header(view: RunView, title: str, width: int) -> Text:
    done = view.steps / max(1, view.total_steps)
    length = max(8, min(40, width - len(title) - 44))
    full = round(done * length)
    line = _line()
    line.append(title, "bold")
    line.append("  " + "━" * full, "green").append("━" * (length - full), "bright_black")
    line.append(f"  step {view.steps}/{view.total_steps}", "bold")
    line.append(f"  {clock(view.seconds)}")
    if view.stopped:
        line.append(f"  {view.stopped}", "bold")
    elif view.eta_s is not None:
        line.append(f", {clock(view.eta_s)} to go", "dim")
    return line


def _figures(view: RunView) -> Text:
    ages = view.staleness
    line = _line()
    _say(line, "reward", number(view.reward), f"({number(view.smooth_reward)} of late)")
    _say(line, "tokens/s", f"{view.tokens_per_s:,.0f}")
    _say(line, "staleness", f"{ages.mean:.1f}", f"(p95 {ages.p95:.0f}, max {ages.max})")
    _say(line, "repacks", f"{view.repacks:,}", f"({view.moved:,} moved)")
    _say(line, "version", f"{view.version}" if view.version >= 0 else "-")
    return line


def _say(line: Text, name: str, value: str, more: str = "") -> None:
    line.append("   " if len(line) else "").append(f"{name} ", "dim").append(value, "bold")
    if more:
        line.append(f" {more}", "dim")


def _replicas(replicas: tuple[ReplicaView, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("replica", "state", "version"):
        table.add_column(name, no_wrap=True)
    table.add_column("KV", no_wrap=True, min_width=BAR + 6)
    for name in ("samples", "waiting", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in replicas:
        version = f"v{one.version}" if one.version >= 0 else "-"
        counts = (f"{one.running:,}", f"{one.waiting:,}", percent(one.idle))
        table.add_row(f"r{one.id}", _state(one.state), version, _bar(one.kv), *counts)
    return table


def _state(state: str) -> Text:
    return _line(state, STATE_STYLES.get(state, "dim"))


def _bar(share: float) -> Text:
    full = round(share * BAR)
    colour = "red" if share > 0.95 else "cyan"
    return Text("█" * full, colour).append("░" * (BAR - full), "bright_black").append(f" {percent(share):>5}", "")


def _trainer(view: RunView) -> Text:
    line = _line("trainer  ", "dim").append_text(_state(view.trainer))
    _say(line, "idle", percent(view.trainer_idle), "waiting for data" if view.trainer == "idle" else "")
    _say(line, "stall per publication", f"{view.publish_stall_s:.3f} s")
    for name in FIGURES:
        value = next((v for key, v in view.measured.items() if key.rpartition("/")[2] == name), None)
        if value is not None:
            _say(line, name.replace("_", " "), f"{value:.3g}")
    return line


def _idleness(view: RunView) -> Text:
    line = _line("replicas ", "dim")
    line.append(f"idle {percent(view.rollout_idle)}", "bold")
    shares = view.rollout_shares
    why = [f"{words} {percent(shares[state])}" for state, words in WHY_IDLE.items() if shares.get(state, 0.0) >= 0.005]
    line.append(f" ({', '.join(why)})" if why else "", "dim")
    _say(line, "pulling", percent(shares.get("pulling", 0.0)))
    _say(line, "failed samples", f"{view.failed_samples:,}", f"({view.failures:,} attempts)")
    return line


def _groups(view: RunView) -> Text:
    tally = view.ledger
    line = _line("groups   ", "dim")
    line.append(f"{tally.started:,} started", "bold").append(" = ", "dim")
    line.append(f"{tally.trained:,} trained + {tally.dropped_stale:,} stale + {tally.filtered:,} filtered + ")
    line.append(f"{tally.failed:,} failed + {tally.in_flight:,} in flight")
    return line


def _happenings(happenings: tuple[Happening, ...]) -> Iterator[Text]:
    for one in happenings:
        yield _line(f"{clock(one.at):>8}  ", "dim").append(one.text, "red" if one.weight == "alarming" else "")


# --------------------------------------------------------------------------------------------------------- wording


def clock(seconds: float) -> str:
    """`3:05`, or `1:02:03` beyond an hour."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
