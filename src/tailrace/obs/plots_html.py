"""A `Picture` as one self-contained page: inline SVG, a little script for tooltips, the results as a table.

Nothing is loaded from elsewhere, and every text is escaped. Positions are pixels of an SVG that scales with the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import log10
from typing import Any, NamedTuple

from tailrace.obs.plots_picture import (
    CALM,
    Picture,
    Series,
    Strip,
    limits,
    log_ticks,
    spread,
    state_colours,
    state_words,
    ticks,
)

WIDTH = 1080.0
UPPER = 300.0  # height of the lines
HAIR = 1.0  # what is shorter, a pull perhaps, is drawn as wide as this
SHARES = ("trainer_idle", "rollout_idle", "kv_usage")
HEADINGS = {
    "gpus": "GPUs",
    "tokens_per_s": "tokens/s",
    "step_s": "step, s",
    "trainer_idle": "trainer idle",
    "rollout_idle": "rollout idle",
    "kv_usage": "KV use",
    "staleness.mean": "staleness, mean",
    "staleness.p95": "staleness, p95",
    "staleness.max": "staleness, max",
    "trained": "groups trained",
    "dropped": "groups dropped",
    "moved": "trajectories moved",
    "pull_wait_s": "wait per pull, s",
    "publish_stall_s": "stall per publication, s",
    "decoded_tokens_per_s": "decoded tokens/s",
    "dollars_per_million_tokens": "$ per million tokens",
    "virtual_s": "virtual time, s",
}


def page(picture: Picture, rows: Sequence[Mapping[str, Any]]) -> str:
    title = escape(picture.title)
    upper = _bars(picture) if len(picture.gpus) == 1 else _lines(picture)
    parts = [f"<h1>{title}</h1>", f"<h2>{escape(_upper_heading(picture))}</h2>", f'<div class="wide">{upper}</div>']
    if picture.strips:
        parts += [f"<h2>{escape(picture.caption)}</h2>", _legend(picture.states)]
        parts.append(f'<div class="wide">{_strips(picture)}</div>')
    parts += ["<h2>Results</h2>", f'<div class="wide">{_table(rows)}</div>']
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_style(picture)}</style>
</head>
<body>
<main>
{body}
</main>
<div id="tip" hidden></div>
<script>{_SCRIPT}</script>
</body>
</html>
"""


# ---------------------------------------------------------------------------------------------------------- the lines


class _Frame(NamedTuple):
    """Where the axes of the upper part lie, and what maps values to pixels."""

    left: float
    right: float
    x: Callable[[float], float]
    y: Callable[[float], float]


def _upper_heading(picture: Picture) -> str:
    if len(picture.gpus) == 1:
        return f"Training throughput on {picture.gpus[0]:,} GPUs, tokens per second"
    return "Training throughput against GPUs, tokens per second"


def _frame(picture: Picture, low: float, high: float) -> _Frame:
    left, right, top, bottom = _left(picture), _right(picture), 8.0, UPPER - 44
    first, last = float(picture.gpus[0]), float(picture.gpus[-1])
    bend: Callable[[float], float] = log10 if picture.logarithmic else float

    def across(value: float) -> float:
        return left + 14 + (right - left - 28) * (bend(value) - bend(first)) / (bend(last) - bend(first))

    def up(value: float) -> float:
        return bottom - (bottom - top) * (bend(value) - bend(low)) / (bend(high) - bend(low))

    return _Frame(left, right, across, up)


def _left(picture: Picture) -> float:
    """The margin for axes; bars have their schedules' names there."""
    names = max(len(line.name) for line in picture.series) if len(picture.gpus) == 1 else 0
    return max(84.0, 12 + 8.2 * names)


def _right(picture: Picture) -> float:
    """Where axes end and labels begin."""
    return WIDTH - max(268.0, _column(picture) + 160)


def _column(picture: Picture) -> float:
    """Where values begin, from the axes' end: after the longest name."""
    return 26 + 7.6 * max(len(line.name) for line in picture.series)


def _lines(picture: Picture) -> str:
    low, high = limits(picture)
    frame = _frame(picture, low, high)
    out = []
    for value in log_ticks(low, high) if picture.logarithmic else ticks(low, high, 5):
        y = frame.y(value)
        out.append(f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        out.append(_text(frame.left - 10, y + 4, f"{value:,.10g}", "soft end"))
    bottom = UPPER - 44
    out.append(f'<path class="axis" d="M{frame.left:.1f} {bottom}H{frame.right:.1f}"/>')
    out += [_text(frame.x(count), bottom + 19, f"{count:,}", "soft mid") for count in picture.gpus]
    out.append(_text((frame.left + frame.right) / 2, bottom + 38, "GPUs", "soft mid"))
    ends = [frame.y(line.points[-1][1]) for line in picture.series] + [frame.y(rate) for _, rate in picture.ideal[1:]]
    places = spread(ends, 18, 8, bottom - 4)
    if picture.ideal:
        out.append(f'<path class="ideal" d="{_path(picture.ideal, frame)}"/>')
        out.append(_text(frame.right + 14, places[-1] + 4, "ideal scaling", "soft"))
    column = frame.right + _column(picture)
    order = sorted(range(len(picture.series)), key=lambda i: picture.series[i].name == "trajectory")
    lines = [_line(i, picture.series[i], frame, places[i], column) for i in order]
    return _svg(UPPER, "Throughput by schedule", [*out, '<g class="lines">', *lines, "</g>"])


def _line(number: int, line: Series, frame: _Frame, label: float, column: float) -> str:
    hero = line.name == "trajectory"
    path = _path(line.points, frame)
    parts = [f'<g class="line c{number}{" hero" * hero}">', f'<path class="near" d="{path}"/><path d="{path}"/>']
    for count, rate in line.points:
        tip = escape(f"{line.name}\n{rate:,.0f} tokens/s\n{count:,} GPUs")
        place = f'cx="{frame.x(count):.1f}" cy="{frame.y(rate):.1f}"'
        parts.append(f'<circle {place} r="{5.5 if hero else 4.5}" data-tip="{tip}"/>')
    parts.append(_text(frame.right + 14, label + 4, line.name, "name") + _text(column, label + 4, line.label))
    return "".join([*parts, "</g>"])


def _path(points: Iterable[tuple[int, float]], frame: _Frame) -> str:
    return "M" + "L".join(f"{frame.x(count):.1f} {frame.y(rate):.1f}" for count, rate in points)


def _bars(picture: Picture) -> str:
    left, right = _left(picture), _right(picture)
    top = max(line.points[-1][1] for line in picture.series) or 1.0
    out = []
    for i, line in enumerate(picture.series):
        rate = line.points[-1][1]
        wide = (right - left) * rate / top
        tip = escape(f"{line.name}\n{rate:,.0f} tokens/s\n{line.points[-1][0]:,} GPUs")
        out.append(f'<g class="bar c{i}">' + _text(left - 10, 32 * i + 19, line.name, "name end"))
        out.append(f'<rect x="{left:.1f}" y="{32 * i + 4}" width="{wide:.1f}" height="21" rx="1.5" data-tip="{tip}"/>')
        out.append(_text(left + wide + 9, 32 * i + 19, line.label) + "</g>")
    return _svg(32.0 * len(picture.series) + 6, "Throughput by schedule", out)


# --------------------------------------------------------------------------------------------------------- the strips


def _legend(states: Sequence[str]) -> str:
    keys = [f'<span><i class="{_class(state)}"></i>{escape(state_words(state))}</span>' for state in states]
    return f'<div class="legend">{"".join(keys)}</div>'


def _strips(picture: Picture) -> str:
    left, right = _left(picture), _right(picture)
    scale = (right - left) / max(picture.seconds, 1e-9)
    out, top = [], 4.0
    for number, strip in enumerate(picture.strips):
        tall = min(124.0, max(78.0, 2.6 * len(strip.lanes)))
        out.append(_strip(number, strip, (left, right), top, tall, scale))
        top += tall + 20
    bottom = top - 12
    out.append(f'<path class="axis" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>')
    for at in ticks(0, picture.seconds, 8):
        x = left + at * scale
        out.append(
            f'<path class="axis" d="M{x:.1f} {bottom:.1f}v4"/>' + _text(x, bottom + 19, f"{at:,.10g}", "soft mid")
        )
    out.append(_text((left + right) / 2, bottom + 37, "seconds", "soft mid"))
    return _svg(bottom + 46, "What each replica does", out)


def _strip(number: int, strip: Strip, sides: tuple[float, float], top: float, tall: float, scale: float) -> str:
    left, right = sides
    lane = tall / len(strip.lanes)
    high = lane * 0.87 if lane > 4 else lane + 0.3  # overlapping, or hairlines of the page shine through
    place = f'transform="translate({left:.1f} {top:.1f})"'
    data = f'data-name="{escape(strip.name)}" data-from="{strip.begins:.3f}" data-scale="{scale:.9g}"'
    out = [f'<g class="strip" {place} {data}>']
    for row, (replica, marks) in enumerate(strip.lanes):
        out.append(f'<g data-replica="{replica}" transform="translate(0 {row * lane:.2f})">')
        for state, start, end in sorted(marks, key=lambda mark: mark.state not in CALM):
            wide = max(HAIR, (end - start) * scale)
            exact = f' data-s="{end - start:.3g}"' * (wide == HAIR)
            size = f'x="{start * scale:.2f}" width="{wide:.2f}" height="{high:.2f}"'
            out.append(f'<rect class="{_class(state)}" {size}{exact}/>')
        out.append("</g>")
    out.append("</g>")
    middle = top + tall / 2
    words = strip.axis.split("\n")
    for i, word in enumerate(words):
        out.append(_text(left - 10, middle + 4 + 14 * (i - (len(words) - 1) / 2), word, "soft end small"))
    y = middle + 4 - 8.5 * len(strip.notes)
    out.append(f'<g class="s{number}">' + _text(right + 14, y, strip.name, "name") + "</g>")
    for i, note in enumerate(strip.notes, 1):
        out.append(_text(right + 14, y + 17 * i, note, "small" if i == 1 else "small soft"))
    return "\n".join(out)


def _class(state: str) -> str:
    """A class name that is safe whatever the state is called."""
    return "z" + "".join(c if c.isascii() and c.isalnum() else "-" for c in state)


# ---------------------------------------------------------------------------------------------------------- the table


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    flat = [dict(_flat(row)) for row in rows]
    keys = list(dict.fromkeys(["schedule", "gpus", *(key for row in flat for key in row)]))
    head = "".join(f"<th>{escape(HEADINGS.get(key, key.replace('_', ' ').replace('.', ' ')))}</th>" for key in keys)
    lines = ["".join(f"<td>{escape(_cell(key, row.get(key)))}</td>" for key in keys) for row in flat]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if key in SHARES:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.2f}"


# ------------------------------------------------------------------------------------------------------ svg and style


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    inner = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH:g} {height:.1f}" role="img" aria-label="{escape(label)}">\n{inner}\n</svg>'


def _text(x: float, y: float, words: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(words)}</text>'


def _style(picture: Picture) -> str:
    pairs = {f"c{i}": line.colours for i, line in enumerate(picture.series)}
    pairs |= {f"s{i}": strip.colours for i, strip in enumerate(picture.strips)}
    pairs |= {_class(state): state_colours(state) for state in picture.states}
    light, dark = ("".join(f".{name}{{--c:{pair[i]}}}" for name, pair in pairs.items()) for i in (0, 1))
    return f"{_STYLE}{light}\n@media (prefers-color-scheme: dark) {{{dark}}}\n"


_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #222; --soft: #6b6b6b; --grid: #e6e6e6; --ideal: #b0b0b0;
  --raised: #fff; }
@media (prefers-color-scheme: dark) { :root { --page: #15171b; --ink: #e8e8e6; --soft: #9a9da3; --grid: #2a2d33;
  --ideal: #6a6d73; --raised: #23262c; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 24px 56px; }
h1 { font-size: 22px; line-height: 1.3; margin: 0; }
h2 { font-size: 15px; font-weight: 500; margin: 30px 0 10px; }
.wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 760px; height: auto; }
text { fill: var(--ink); font-size: 13px; font-variant-numeric: tabular-nums; }
text.soft { fill: var(--soft); } text.small { font-size: 12px; }
text.mid { text-anchor: middle; } text.end { text-anchor: end; }
text.name { fill: var(--c); font-weight: 650; font-size: 13px; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); } .grid, .axis { stroke-width: 1; fill: none; }
.ideal { stroke: var(--ideal); stroke-width: 1.4; stroke-dasharray: 6 5; fill: none; }
.line path { fill: none; stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round; }
.line.hero path { stroke-width: 3.4; }
.line path.near { stroke: transparent; stroke-width: 16; }
.line circle { fill: var(--c); stroke: var(--page); stroke-width: 1.5; }
.line { transition: opacity .12s; } .lines:has(.line:hover) .line:not(:hover) { opacity: .22; }
.bar rect { fill: var(--c); }
.strip rect { fill: var(--c); shape-rendering: crispEdges; } .strip rect:hover { opacity: .72; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0 0 10px; color: var(--soft); font-size: 12.5px; }
.legend i { display: inline-block; width: 15px; height: 10px; margin-right: 7px; background: var(--c); }
table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { font-weight: 500; color: var(--soft); white-space: normal; vertical-align: bottom; line-height: 1.25;
  min-width: 58px; }
th:nth-child(-n+3) { min-width: 0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0;
  background: var(--page); font-weight: 600; }
#tip { position: fixed; pointer-events: none; padding: 6px 10px; border-radius: 5px; background: var(--raised);
  border: 1px solid var(--grid); box-shadow: 0 3px 12px rgb(0 0 0 / .18); font-size: 12.5px; line-height: 1.4;
  white-space: pre; font-variant-numeric: tabular-nums; }
#tip::first-line { font-weight: 650; }
"""

_SCRIPT = """
const tip = document.getElementById("tip");
const number = new Intl.NumberFormat("en-US", {minimumFractionDigits: 1, maximumFractionDigits: 1});
function words(mark) {
  if (mark.dataset.tip) return mark.dataset.tip;
  const lane = mark.closest("[data-replica]");
  if (!lane) return "";
  const strip = lane.closest(".strip").dataset, start = +strip.from + mark.getAttribute("x") / strip.scale;
  const took = +(mark.dataset.s ?? mark.getAttribute("width") / strip.scale);
  const state = document.querySelector(".legend ." + mark.getAttribute("class")).parentNode.textContent;
  return `${state}\\nreplica ${lane.dataset.replica}, ${strip.name}\\n` +
    `${number.format(start)} s to ${number.format(start + took)} s (${number.format(took)} s)`;
}
document.addEventListener("pointermove", event => {
  const said = event.target instanceof SVGElement ? words(event.target) : "";
  tip.hidden = !said;
  if (!said) return;
  tip.textContent = said;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10
    : event.clientY + 18) + "px";
});
document.documentElement.addEventListener("pointerleave", () => { tip.hidden = true; });
"""
