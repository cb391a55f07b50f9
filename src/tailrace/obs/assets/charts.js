// Charts, timelines, legends and tables: for the page of a run, its report in one file, and the report of simulations.
// The data comes prepared (obs/charts.py, obs/sweep.py). Text goes in through textContent only.
"use strict";

const STATES = {
  g: "generating", c: "scoring", e: "environment", p: "pulling", r: "repacked", t: "training", i: "idle", l: "lost", s: "starting",
};
const STATE_WORDS = { scoring: "judging", environment: "waiting for the environment", pulling: "pulling weights", repacked: "emptied by repack" };
const BRIEF = ["pulling", "repacked", "lost"]; // drawn last, however short they are
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

// ----------------------------------------------------------------------------------------------------------- numbers

const whole = (value) => Math.round(value).toLocaleString("en-US");
const percent = (share) => `${Math.round(100 * share)} %`;
const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

function clock(seconds) {
  const s = Math.max(0, Math.floor(seconds)), two = (n) => String(n).padStart(2, "0");
  const rest = `${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  return s >= 3600 ? `${Math.floor(s / 3600)}:${rest}` : rest.replace(/^0/, "");
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  return size >= 1000 ? whole(value) : String(Number(value.toPrecision(3)));
}

// ---------------------------------------------------------------------------------------------------------- elements

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function mark(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function swatch(state, words) {
  const made = element("span");
  made.append(element("i", state), words);
  return made;
}

function legend(seen) {
  const shown = Object.values(STATES).filter((state) => seen.has(state));
  return shown.map((state) => swatch(state, STATE_WORDS[state] || state));
}

function table(columns, rows) {
  const made = element("table"), head = element("tr"), body = element("tbody"), top = element("thead");
  head.append(...columns.map((title, i) => element("th", i ? "n" : "", title)));
  body.append(...rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell, i) => element("td", i ? "n" : "", cell)));
    return row;
  }));
  top.append(head);
  made.append(top, body);
  return made;
}

// ------------------------------------------------------------------------------------------------------------ charts

const PAD = { left: 44, right: 12, top: 8, bottom: 20 };

function timeTicks(seconds, most) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((each) => seconds / each <= most) || 86400 * Math.ceil(seconds / 86400 / most);
  const found = [];
  for (let i = 0; i * step <= seconds; i++) found.push(i * step);
  return found.map((at) => [at, step < 1 ? `${at.toFixed(1)} s` : seconds < 120 ? `${Math.round(at)} s` : clock(at)]);
}

class Frame {
  // An emptied SVG with two scales, each from the lower to the upper end.
  constructor(svg, across, up, { pad = PAD, log = false, logUp = log } = {}) {
    this.svg = svg;
    this.pad = pad;
    this.width = Math.max(120, svg.clientWidth);
    this.height = Math.max(40, svg.clientHeight);
    const scale = ([low, high], bend) => (value) => (bend(value) - bend(low)) / ((bend(high) - bend(low)) || 1);
    [this.across, this.up] = [scale(across, log ? Math.log : Number), scale(up, logUp ? Math.log : Number)];
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
  }
  x(value) { return this.pad.left + this.across(value) * (this.width - this.pad.left - this.pad.right); }
  y(value) { return this.share(this.up(value)); }
  share(part) { return this.pad.top + (1 - part) * (this.height - this.pad.top - this.pad.bottom); }
  grid(values) {
    for (const value of values) {
      const y = this.y(value), [x1, x2] = [this.pad.left, this.width - this.pad.right];
      mark(this.svg, "line", { class: "grid", x1, x2, y1: y, y2: y });
      this.text(x1 - 7, y + 4, short(value), "end");
    }
  }
  times(seconds, y = this.height - 5) {
    for (const [at, words] of timeTicks(seconds, Math.max(2, Math.floor(this.width / 90)))) {
      const x = this.x(at);
      this.text(x, y, words, at === 0 ? "start" : x > this.width - 30 ? "end" : "middle");
    }
  }
  text(x, y, words, anchor = "start", kind = "") {
    return mark(this.svg, "text", { x, y, "text-anchor": anchor, class: kind }, words);
  }
  line(kind, points) {
    const path = points.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`);
    if (path.length) mark(this.svg, "path", { class: `line ${kind}`, d: path.join("") });
  }
  dots(kind, points, r) {
    return points.map(([x, y]) => mark(this.svg, "circle", { class: `dot ${kind}`, cx: this.x(x).toFixed(1), cy: this.y(y).toFixed(1), r }));
  }
  stairs(kind, from, points) {
    const floor = this.share(0).toFixed(1);
    let path = `M${this.x(from).toFixed(1)} ${floor}`;
    for (const [x, y] of points) path += `V${this.y(y).toFixed(1)}H${this.x(x).toFixed(1)}`;
    if (points.length) mark(this.svg, "path", { class: `area ${kind}`, d: `${path}V${floor}Z` });
  }
}

function drawChart(svg, view, data) {
  // A curve over the time of a run.
  const frame = new Frame(svg, [0, Math.max(data.seconds, 1e-6)], [view.low, view.high]);
  const column = (name) => {
    const at = data.columns.indexOf("ended"), which = data.columns.indexOf(name);
    return name ? data.points.map((point) => [point[at], point[which]]).filter(([, value]) => value !== null) : [];
  };
  frame.grid(view.ticks);
  frame.times(data.seconds);
  frame.stairs(view.name, data.first_sample_at, column(view.area));
  frame.dots(view.name, column(view.dots), 2.4);
  frame.line(view.name, column(view.line));
  if (!column(view.line).length) frame.text(frame.width / 2, frame.height / 2, "no data yet", "middle");
}

// ---------------------------------------------------------------------------------------------------------- timeline

function drawLanes(svg, lanes, seconds, { tall, gap, seen, pad = PAD, begins = 0, named = true }) {
  // A row per process, which says what it did; returns the frame, for more to be drawn into it.
  svg.style.height = `${lanes.length * (tall + gap) + pad.bottom + 8}px`;
  const frame = new Frame(svg, [0, Math.max(seconds, 1e-6)], [0, 1], { pad });
  lanes.forEach((lane, i) => {
    const y = i * (tall + gap) + 4;
    if (named && (tall > 9 || i % 4 === 0)) frame.text(pad.left - 7, y + tall / 2 + 4, lane.name, "end");
    drawLane(frame, lane, y, tall + (gap ? 0 : 0.3), seen, begins);
  });
  frame.times(seconds);
  return frame;
}

function drawLane(frame, lane, y, height, seen, begins) {
  const spans = [...lane.states].map((letter, i) => [STATES[letter], i ? lane.ends[i - 1] : lane.start, lane.ends[i]]);
  const known = spans.filter(([state]) => state);
  for (const brief of [false, true]) {
    for (const [state, start, end] of known.filter((span) => BRIEF.includes(span[0]) === brief)) {
      const x = frame.x(start), width = Math.max(frame.x(end) - x, brief ? 1.2 : 0);
      const box = { class: state, x: x.toFixed(2), y, width: width.toFixed(2), height, "shape-rendering": "crispEdges" };
      const words = `${STATE_WORDS[state] || state}\n${lane.name}`, took = (end - start).toFixed(1);
      tips.set(mark(frame.svg, "rect", box), () => `${words}\n${(begins + start).toFixed(1)} s to ${(begins + end).toFixed(1)} s (${took} s)`);
      seen.add(state);
    }
  }
}

// ----------------------------------------------------------------------------------------------------------- tooltip

const tips = new WeakMap(); // a mark -> what it says of itself, given the event

function hover(event) {
  const tip = byId("tip"), words = tips.get(event.target) || tips.get(event.target.closest?.("svg"));
  tip.textContent = words ? words(event) : "";
  tip.hidden = !tip.textContent;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

document.addEventListener("pointermove", hover);
document.documentElement.addEventListener("pointerleave", () => { byId("tip").hidden = true; });

let resized = 0;
function redrawOnResize(draw) {
  addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(draw); });
}

const embedded = () => JSON.parse(byId("data")?.textContent || "null"); // of a report in one file
