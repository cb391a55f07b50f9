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
from collections.abc import Iterator, Sequence
from math import inf
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tailrace.logs import output
from tailrace.obs.activity import WAITING
from tailrace.obs.live import MEAN_STEPS, LiveRun, Notice, ReplicaView, RunView
from tailrace.obs.tables import percent
from tailrace.obs.trained_steps import StepRecord
from tailrace.wording import plain_line

REFRESH_S = 0.25
BAR = 24  # characters
SHORTEST_BAR = 4
SHARE = 5  # "100 %"
COLUMNS = 48  # of the table of replicas, beside the bar, the scoring and what lies between them
GAP = "   "  # between two figures
STATE_STYLES = {
    "generating": "cyan",
    "scoring": "magenta",
    "environment": "magenta",
    "training": "green",
    "pulling": "blue",
    "idle": "yellow",
    "lost": "bold red",
}
WHY_IDLE = {
    "scoring": "judging",
    "environment": "waiting for the environment",
    "idle": "no work admitted",
    "lost": "lost",
}
FIGURES = ("loss", "kl", "entropy", "grad_norm")  # of the trainer, if it measures them


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
        self._steps = len(live.fold.steps)
        self._noticed = live.noticed.total()

    def __call__(self, now: float) -> None:
        self._catch_up(now)

    def _catch_up(self, now: float | None) -> None:
        live = self.live
        new = min(live.noticed.total() - self._noticed, len(live.notices))
        self._noticed = live.noticed.total()
        for one in list(live.notices)[len(live.notices) - new :]:
            if one.level != "detail":
                self._print(f"{clock(one.at)}  {one.text}")
        steps = live.fold.steps[self._steps :]
        self._steps += len(steps)
        for step in steps:
            self._print(step_line(step, live.view(now)))

    def _print(self, line: str) -> None:
        output(plain_line(line), self.stream)

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
        f"idle: trainer {percent(view.trainer_idle)}, replicas {percent(view.rollout_idle)}{_scoring(view)}",
        f"{view.moved:,} moved",
        f"{clock(view.eta_s)} to go" if view.eta_s is not None else "",
    ]
    return "  ".join(word for word in words if word)


def _scoring(view: RunView) -> str:
    share = sum(view.rollout_shares.get(state, 0.0) for state in WAITING)
    return f" (judging {percent(share)})" if share >= 0.005 else ""


# -------------------------------------------------------------------------------------------------------- the screen


class Screen:
    """Drawn in i with rich."""

    def __init__(self, live: LiveRun, console: Console) -> None:
        self.live = live
        self.console = console
        self._drawn = -inf
        self._screen = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __call__(self, now: float) -> None:
        if now - self._drawn >= REFRESH_S:
            self._drawn = now
            self._draw(self.live.view(now))

    def _draw(self, view: RunView) -> None:
        title = f"{self.live.name} · {self.live.config.schedule.kind}"
        height, width = self.console.height, self.console.width
        self._screen.update(picture(view, title, height - 1, width), refresh=True)

    def __enter__(self) -> Self:
        self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._draw(self.live.view().after_end())
        finally:
            self._screen.stop()


def picture(view: RunView, title: str, height: int, width: int) -> RenderableType:
    """All of it in at most `height` lines: replicas and notices are cut where there is little room."""
    above = [_header(view, title, width), _figures(view, width), Text()]
    below = [_trainer(view, width), _idleness(view, width), _groups(view, width)]
    below += [_saved(view, width)] if view.savings else []
    room = height - len(above) - len(below) - 1  # the table has a head
    shown = max(0, min(len(view.replicas), room - 2 if len(view.replicas) > room - 2 else room))
    table = [_replicas(view.replicas[:shown], width)] if shown else []
    hidden = len(view.replicas) - shown
    more = [_line(f"… and {hidden:,} more replicas", "dim")] if hidden else []
    left = room - shown - len(more) - 1
    notices = [Text(), *_notices(view.notices[-left:])] if left > 0 and view.notices else []
    return Group(*[*above, *table, *more, *below, *notices][: max(1, height)])


def _line(text: str = "", style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _header(view: RunView, title: str, width: int) -> Text:
    """How far it is matters most: the bar gives way to it, and then the end of a long name."""
    step, far = f"  step {view.steps}/{view.total_steps}", f"  {clock(view.seconds)}"
    to_go = f", {clock(view.eta_s)} to go" if view.eta_s is not None else ""
    rest = f"  {plain_line(view.stopped)}" if view.stopped else to_go
    needed = len(step) + len(far) + (0 if view.stopped else len(rest))
    name = title if len(title) + needed <= width else f"{title[: max(8, width - needed - 1)]}…"
    length = min(40, width - len(name) - len(step) - len(far) - len(rest) - 2)
    full = round(view.steps / max(1, view.total_steps) * length)
    line = _line().append(name, "bold")
    if length >= SHORTEST_BAR:
        line.append("  " + "━" * full, "green").append("━" * (length - full), "bright_black")
    return line.append(step, "bold").append(far).append(rest, "bold" if view.stopped else "dim")


class Item(NamedTuple):
    """A figure with its name, and more about it where there is room."""

    name: str
    value: str
    more: str = ""

    @property
    def length(self) -> int:
        return len(" ".join(filter(None, self)))


def _row(items: Sequence[Item], width: int, begin: Text | None = None) -> Text:
    """The figures in their order; the last ones say less, and then nothing, until the line fits."""
    line = begin or _line()
    shown = list(items)
    for i in reversed(range(len(shown))):
        if _length(shown, len(line)) > width:
            shown[i] = shown[i]._replace(more="")
    while shown and _length(shown, len(line)) > width:
        shown.pop()
    for item in shown:
        line.append(GAP if len(line) else "").append(f"{item.name} ", "dim").append(item.value, "bold")
        line.append(f" {item.more}" if item.more else "", "dim")
    return line


def _length(items: Sequence[Item], used: int) -> int:
    return used + sum(item.length for item in items) + len(GAP) * (len(items) - (not used))


def _figures(view: RunView, width: int) -> Text:
    ages = view.staleness
    items = [
        Item("reward", number(view.reward), f"({MEAN_STEPS}-step mean {number(view.mean_reward)})"),
        Item("tokens/s", f"{view.tokens_per_s:,.0f}"),
        Item("staleness", f"{ages.mean:.1f}", f"(p95 {ages.p95:.0f}, max {ages.max})"),
        Item("version", f"{view.version}" if view.version >= 0 else "-"),
        Item("repacks", f"{view.repacks:,}", f"({view.moved:,} moved)"),
    ]
    return _row(items, width)


def _replicas(replicas: tuple[ReplicaView, ...], width: int) -> Table:
    """The bar is as long as the other columns leave it; without room for one there is the share alone."""
    counts = ["samples", "waiting", "scoring", "idle"]
    columns = COLUMNS + len("scoring")
    if width < columns + 7:  # the state says so too
        counts.remove("scoring")
        columns = COLUMNS
    gaps = 3 + len(counts)
    gap = 2 if width >= columns + 2 * gaps else 1
    bar = max(0, min(BAR, width - columns - gaps * gap))
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for name in ("replica", "state", "version"):
        table.add_column(name, no_wrap=True)
    table.add_column("KV", no_wrap=True, min_width=bar + SHARE)
    for name in counts:
        table.add_column(name, justify="right", no_wrap=True)
    for one in replicas:
        version = f"v{one.version}" if one.version >= 0 else "-"
        cells = {"samples": one.running, "waiting": one.waiting, "scoring": one.scoring}
        figures = [f"{cells[name]:,}" if name in cells else percent(one.idle) for name in counts]
        table.add_row(f"r{one.id}", _state(one.state), version, _bar(one.kv, bar), *figures)
    return table


def _state(state: str) -> Text:
    return _line(state, STATE_STYLES.get(state, "dim"))


def _bar(share: float, length: int) -> Text:
    full = round(share * length)
    colour = "red" if share > 0.95 else "cyan"
    return Text("█" * full, colour).append("░" * (length - full), "bright_black").append(f"{percent(share):>{SHARE}}")


def _trainer(view: RunView, width: int) -> Text:
    items = [Item("idle", percent(view.trainer_idle), "waiting for data" if view.trainer == "idle" else "")]
    for name in FIGURES:
        value = next((v for key, v in view.measured.items() if key.rpartition("/")[2] == name), None)
        if value is not None:
            items.append(Item(name.replace("_", " "), f"{value:.3g}"))
    if view.without_advantage:
        idle = f"{view.without_advantage:,}"
        items.append(Item("without advantage", idle, f"of {view.mini_batches:,} mini-batches"))
    items.append(Item("stall per weight publish", f"{view.publish_stall_s:.3f} s"))
    return _row(items, width, _line("trainer  ", "dim").append_text(_state(view.trainer)))


def _idleness(view: RunView, width: int) -> Text:
    shares = view.rollout_shares
    why = [f"{words} {percent(shares[state])}" for state, words in WHY_IDLE.items() if shares.get(state, 0.0) >= 0.005]
    items = [
        Item("idle", percent(view.rollout_idle), f"({', '.join(why)})" if why else ""),
        Item("failed samples", f"{view.failed_samples:,}", f"({view.failures:,} attempts)"),
        Item("pulling", percent(shares.get("pulling", 0.0))),
    ]
    return _row(items, width, _line("replicas", "dim"))


def _groups(view: RunView, width: int) -> Text:
    """Where the line is too short for all of them, those of which there are none are left out."""
    groups = view.ledger
    ends = [(groups.trained, "trained"), (groups.dropped_stale, "stale"), (groups.filtered, "filtered")]
    ends += [(groups.stopped, "stopped early")] * bool(groups.stopped)
    ends += [(groups.failed, "failed"), *[(groups.lost, "lost")] * bool(groups.lost), (groups.in_flight, "in flight")]
    begin = f"groups   {groups.started:,} started = "
    for kept in (ends, [end for end in ends if end[0]]):
        text = " + ".join(f"{count:,} {what}" for count, what in kept)
        if len(begin) + len(text) <= width:
            break
    return _line("groups   ", "dim").append(f"{groups.started:,} started", "bold").append(" = ", "dim").append(text)


def _saved(view: RunView, width: int) -> Text:
    saved = view.savings
    items = [
        Item("prompts skipped", f"{saved.skipped_prompts:,}"),
        Item("samples not generated", f"{saved.unstarted_samples:,}", f"(about {saved.tokens:,} tokens)"),
        Item("not trained on", f"{saved.left_out_samples:,}"),
    ]
    return _row(items, width, _line("saved   ", "dim"))


def _notices(notices: tuple[Notice, ...]) -> Iterator[Text]:
    for one in notices:
        style = "red" if one.level == "warning" else ""
        yield _line(f"{clock(one.at):>8}  ", "dim").append(plain_line(one.text), style)


# --------------------------------------------------------------------------------------------------------- wording


def clock(seconds: float) -> str:
    """`3:05`, or `1:02:03` beyond an hour."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"
