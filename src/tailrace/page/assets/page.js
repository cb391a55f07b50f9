// The page of a run: asks /data again and again, and draws what comes. Text goes in through textContent only.
"use strict";

const LOOK_MS = 1000, HIDDEN_MS = 5000, SLOWEST_MS = 10000;
const STATES = { g: "generating", c: "scoring", p: "pulling", t: "training", i: "idle", l: "lost", s: "starting" };
const WORDS = { pulling: "pulling weights" };
const ENDS = [["trained", "trained"], ["dropped_stale", "stale"], ["filtered", "filtered"], ["failed", "failed"], ["in_flight", "flight"]];
const ENDING_WORDS = { flight: "in flight" };
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);
const say = (id, text) => { const it = byId(id); if (it.textContent !== text) it.textContent = text; };

// ------------------------------------------------------------------------------------------------------------- words

const whole = (value) => Math.round(value).toLocaleString("en-US");
const percent = (share) => `${Math.round(100 * share)} %`;
const figure = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

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

// ---------------------------------------------------------------------------------------------------------- building

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

function swatch(state, word) {
  const made = element("span");
  made.append(element("i", state), word);
  return made;
}

// ------------------------------------------------------------------------------------------------------------ charts

const PAD = { left: 44, right: 12, top: 8, bottom: 20 };

function ticks(low, high, most) {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) || rough;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function moments(seconds, most) {
  const rounds = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = rounds.find((each) => seconds / each <= most) || 86400 * Math.ceil(seconds / 86400 / most);
  const found = [];
  for (let at = 0; at <= seconds; at += step) found.push(at);
  return found.map((at) => [at, step < 1 ? `${at.toFixed(1)} s` : seconds < 120 ? `${Math.round(at)} s` : clock(at)]);
}

class Frame {
  // An emptied SVG with axes: x is seconds, y lies between low and high.
  constructor(svg, seconds, low, high) {
    this.svg = svg;
    this.width = Math.max(120, svg.clientWidth);
    this.height = Math.max(80, svg.clientHeight);
    this.seconds = Math.max(seconds, 1e-6);
    [this.low, this.high] = [low, high > low ? high : low + 1];
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
  }
  x(at) { return PAD.left + (at / this.seconds) * (this.width - PAD.left - PAD.right); }
  y(value) { return PAD.top + (1 - (value - this.low) / (this.high - this.low)) * (this.height - PAD.top - PAD.bottom); }
  axes() {
    for (const value of ticks(this.low, this.high, 4)) {
      const y = this.y(value);
      mark(this.svg, "line", { class: "grid", x1: PAD.left, x2: this.width - PAD.right, y1: y, y2: y });
      mark(this.svg, "text", { x: PAD.left - 7, y: y + 4, "text-anchor": "end" }, short(value));
    }
    this.times(this.height - 5);
  }
  times(y) {
    for (const [at, word] of moments(this.seconds, Math.max(2, Math.floor(this.width / 90)))) {
      const x = this.x(at), anchor = at === 0 ? "start" : x > this.width - 30 ? "end" : "middle";
      mark(this.svg, "text", { x, y, "text-anchor": anchor }, word);
    }
  }
  line(kind, points) {
    const path = points.map(([at, value], place) => `${place ? "L" : "M"}${this.x(at).toFixed(1)} ${this.y(value).toFixed(1)}`);
    if (path.length) mark(this.svg, "path", { class: `line ${kind}`, d: path.join("") });
  }
  stairs(kind, began, points) {
    if (!points.length) return;
    const floor = this.y(this.low).toFixed(1);
    let path = `M${this.x(began).toFixed(1)} ${floor}`;
    for (const [at, value] of points) path += `V${this.y(value).toFixed(1)}H${this.x(at).toFixed(1)}`;
    mark(this.svg, "path", { class: `area ${kind}`, d: `${path}V${floor}Z` });
  }
  nothing(word) {
    mark(this.svg, "text", { x: this.width / 2, y: this.height / 2, "text-anchor": "middle" }, word);
  }
}

function smoothed(values, weights) {
  // Means over the neighbours: half of a window of eight on either side.
  return values.map((_, place) => {
    let sum = 0, weight = 0;
    for (let at = Math.max(0, place - 4); at <= Math.min(values.length - 1, place + 4); at++) {
      sum += values[at] * weights[at];
      weight += weights[at];
    }
    return weight ? sum / weight : 0;
  });
}

function rewardChart(data, points) {
  const rated = points.filter((point) => point.reward !== null), values = rated.map((point) => point.reward);
  const inside = values.every((value) => value >= 0 && value <= 1);
  const spare = 0.08 * (Math.max(...values) - Math.min(...values) || 1);
  const range = inside || !values.length ? [0, 1.04] : [Math.min(0, Math.min(...values) - spare), Math.max(...values) + spare];
  const frame = new Frame(byId("chart-reward"), data.run.seconds, ...range);
  frame.axes();
  if (!values.length) return frame.nothing("no step with rewards yet");
  for (const point of rated) {
    mark(frame.svg, "circle", { class: "dot reward", cx: frame.x(point.at).toFixed(1), cy: frame.y(point.reward).toFixed(1), r: 2.4 });
  }
  const smooth = smoothed(values, values.map(() => 1));
  frame.line("reward", rated.map((point, place) => [point.at, smooth[place]]));
}

function rateChart(data, points, began) {
  const rates = points.map((point) => point.rate);
  const frame = new Frame(byId("chart-rate"), data.run.seconds, 0, 1.12 * Math.max(1, ...rates));
  frame.axes();
  if (!points.length) return frame.nothing("no step yet");
  frame.stairs("rate", began, points.map((point) => [point.at, point.rate]));
  const spent = points.map((point, place) => point.at - (place ? points[place - 1].at : began));
  const smooth = smoothed(rates, spent);
  frame.line("rate", points.map((point, place) => [point.at, smooth[place]]));
}

function ageChart(data, points, began) {
  const most = Math.max(1, ...points.map((point) => point.oldest));
  const frame = new Frame(byId("chart-age"), data.run.seconds, 0, 1.12 * most);
  frame.axes();
  if (!points.length) return frame.nothing("no step yet");
  frame.stairs("age", began, points.map((point) => [point.at, point.oldest]));
  frame.line("age", points.map((point) => [point.at, point.age]));
}

// ---------------------------------------------------------------------------------------------------------- timeline

function timeline(data) {
  const svg = byId("timeline"), lanes = data.lanes;
  const tall = lanes.length > 24 ? 9 : lanes.length > 10 ? 14 : 20, gap = lanes.length > 24 ? 1 : 3;
  const height = lanes.length * (tall + gap) + 8 + 20;
  svg.style.height = `${height}px`;
  const frame = new Frame(svg, data.run.seconds, 0, 1);
  const seen = new Set();
  lanes.forEach((lane, place) => {
    const y = place * (tall + gap) + (place ? 6 : 0);
    if (tall > 9 || place % 4 === 0) mark(svg, "text", { x: PAD.left - 7, y: y + tall / 2 + 4, "text-anchor": "end" }, lane.name);
    drawLane(frame, lane, y, tall, seen);
  });
  frame.times(height - 4);
  legend(seen);
}

function drawLane(frame, lane, y, tall, seen) {
  const brief = [];
  let start = lane.start;
  lane.ends.forEach((end, place) => {
    const state = STATES[lane.states[place]] || "idle";
    seen.add(state);
    (state === "pulling" || state === "lost" ? brief : null)?.push([state, start, end]);
    box(frame, state, start, end, y, tall, 0);
    start = end;
  });
  for (const [state, from, to] of brief) box(frame, state, from, to, y, tall, 1.2);
}

function box(frame, state, start, end, y, tall, least) {
  const x = frame.x(start), width = Math.max(frame.x(end) - x, least);
  mark(frame.svg, "rect", { class: state, x: x.toFixed(2), y, width: width.toFixed(2), height: tall, "shape-rendering": "crispEdges" });
}

function legend(seen) {
  const shown = Object.values(STATES).filter((state) => seen.has(state));
  byId("legend").replaceChildren(...shown.map((state) => swatch(state, WORDS[state] || state)));
}

// ------------------------------------------------------------------------------------------------------------- parts

function head(data) {
  const { about, run } = data;
  say("name", about.name);
  const { state, reason } = about.ended;
  say("state", state);
  byId("state").className = `pill ${state}`;
  document.title = `${about.name} · ${state}`;
  say("about", [`schedule ${data.schedule}`, `begun ${about.created.replace("T", " ").replace("+00:00", " UTC")}`].join(" · "));
  byId("bar").style.width = `${Math.min(100, (100 * run.steps) / Math.max(1, run.total_steps))}%`;
  const words = [`step ${whole(run.steps)} of ${whole(run.total_steps)}`, clock(run.seconds)];
  if (run.eta_s !== null && state === "running") words.push(`about ${clock(run.eta_s)} to go`);
  if (reason && state !== "failed") words.push(reason);
  if (about.behind) words.push("reading the history …");
  say("pace", words.join(" · "));
  say("fatal", state === "failed" ? reason : "");
  say("read", `${whole(data.read)} events read`);
}

function tiles(data) {
  const { run, about } = data, { before, after } = about.accuracy, mean = about.mean_reward;
  say("reward", figure(run.smooth_reward, 3));
  say("reward-more", run.reward === null ? "no step yet" : `last step ${figure(run.reward, 3)}`);
  const change = (from, to) => `${figure(from, 2)} → ${to === null ? "…" : figure(to, 2)}`;
  say("accuracy", before === null && after === null ? "–" : change(before, after));
  const rewards = mean.before === null && mean.after === null ? "" : `, mean reward ${change(mean.before, mean.after)}`;
  say("accuracy-more", before === null ? "not measured" : `share of rewards above ${about.right_above}${rewards}`);
  say("rate", whole(run.tokens_per_s));
  say("rate-more", `${short(run.trained_tokens)} in all`);
  say("staleness", figure(run.staleness.mean, 2));
  say("staleness-more", `p95 ${run.staleness.p95}, max ${run.staleness.max} of ${data.max_staleness}`);
  say("version", run.version < 0 ? "–" : `v${run.version}`);
  const held = run.replicas.map((replica) => replica.version), oldest = Math.min(...held);
  say("version-more", !held.length || oldest < 0 ? "no replica has one yet" : `replicas: v${oldest} to v${Math.max(...held)}`);
  say("idle", percent(run.rollout_idle));
  const scoring = run.rollout_shares.scoring || 0;
  say("idle-more", `replicas${scoring >= 0.005 ? ` (scoring ${percent(scoring)})` : ""}; trainer ${percent(run.trainer_idle)}`);
  say("faults", whole(data.faults));
  byId("faults").className = data.faults ? "alarm" : "";
  say("faults-more", `${whole(run.failed_samples)} failed samples, ${whole(run.failures)} attempts`);
}

function replicas(data) {
  byId("replicas").replaceChildren(...data.run.replicas.map(replicaRow));
  const hidden = data.replicas - data.run.replicas.length;
  say("replicas-more", hidden > 0 ? `and ${whole(hidden)} more` : "");
}

function replicaRow(replica) {
  const row = element("tr"), state = element("td"), kv = element("td"), meter = element("div", "meter");
  state.append(element("i", replica.state), WORDS[replica.state] || replica.state);
  const level = element("div", replica.kv > 0.9 ? "full" : "");
  level.style.width = `${100 * replica.kv}%`;
  meter.append(level);
  kv.append(meter, percent(replica.kv));
  row.append(element("td", "", `r${replica.id}`), state, element("td", "", replica.version < 0 ? "–" : `v${replica.version}`), kv);
  for (const text of [whole(replica.running), whole(replica.waiting), whole(replica.scoring), percent(replica.idle)]) row.append(element("td", "n", text));
  return row;
}

function ledger(data) {
  const counts = data.ledger, started = element("b", "", `${whole(counts.started)} started`);
  const bar = [], words = [started, "="];
  ENDS.forEach(([key, kind], place) => {
    const part = element("div", kind);
    part.style.flexGrow = String(counts[key]);
    if (counts[key]) bar.push(part);
    if (place) words.push("+");
    words.push(swatch(kind, `${whole(counts[key])} ${ENDING_WORDS[kind] || kind}`));
  });
  byId("ledger-bar").replaceChildren(...bar);
  byId("ledger").replaceChildren(...words.map((word) => (typeof word === "string" ? element("span", "soft", word) : word)));
}

function facts(data) {
  const { run } = data, measured = run.measured;
  const rows = [
    ["samples trained", whole(run.trained_samples)], ["tokens finished", short(run.finished_tokens)],
    ["trainer", run.trainer], ["repacks", `${whole(run.repacks)}, ${whole(run.moved)} moved`],
    ["stall per publication", `${(1000 * run.publish_stall_s).toFixed(1)} ms`],
  ];
  for (const name of ["loss", "entropy", "kl", "grad_norm"]) {
    if (typeof measured[name] === "number") rows.push([name.replace("_", " "), String(Number(measured[name].toPrecision(3)))]);
  }
  if (run.without_advantage) rows.push(["without advantage", `${whole(run.without_advantage)} of ${whole(run.mini_batches)} mini-batches`]);
  byId("facts").replaceChildren(...rows.map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    return pair;
  }));
}

function listed(id, lines) {
  const list = byId(id), top = list.scrollTop;
  list.replaceChildren(...lines);
  list.scrollTop = top;
}

function events(data) {
  byId("sentences").classList.add("who");
  listed("happenings", data.run.happenings.toReversed().map(([at, text, weight]) => eventLine(at, [element("span", weight, text)])));
  const told = data.sentences.toReversed();
  listed("sentences", told.map((one) => eventLine(one.at, [element("b", "", one.who), element("span", "", one.text)])));
}

function eventLine(at, rest) {
  const line = element("li");
  line.append(element("time", "", clock(at)), ...rest);
  return line;
}

// ----------------------------------------------------------------------------------------------------------- tooltip

let shown = null; // the newest data
let points = [];

function nearest(event) {
  const svg = event.currentTarget, box = svg.getBoundingClientRect();
  const share = (event.clientX - box.left - PAD.left) / Math.max(1, box.width - PAD.left - PAD.right);
  const at = share * (shown ? shown.run.seconds : 0);
  return points.reduce((best, point) => (!best || Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best), null);
}

function hover(event) {
  const point = nearest(event), tip = byId("tip");
  tip.hidden = !point;
  if (!point) return;
  tip.textContent = `step ${point.step} at ${clock(point.at)}\nreward ${figure(point.reward, 3)}\n${whole(point.rate)} tokens/s\nstaleness ${figure(point.age, 2)}, max ${point.oldest}`;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

for (const id of ["chart-reward", "chart-rate", "chart-age"]) {
  byId(id).addEventListener("pointermove", hover);
  byId(id).addEventListener("pointerleave", () => { byId("tip").hidden = true; });
}

// ------------------------------------------------------------------------------------------------------------ looking

function draw() {
  if (!shown) return;
  const began = points.length ? Math.max(0, shown.began) : 0;
  head(shown);
  tiles(shown);
  rewardChart(shown, points);
  rateChart(shown, points, began);
  ageChart(shown, points, began);
  timeline(shown);
  replicas(shown);
  ledger(shown);
  facts(shown);
  events(shown);
}

function trouble(text) {
  say("trouble", text);
  byId("trouble").hidden = !text;
}

let tag = "", wait = LOOK_MS, timer = 0;

async function ask() {
  const answer = await fetch("/data", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
  if (answer.status === 401) return location.reload(); // the form is there
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(`the page answered ${answer.status}`);
  const data = await answer.json();
  tag = answer.headers.get("ETag") || "";
  points = data.curve.map(([step, at, reward, rate, age, oldest]) => ({ step, at, reward, rate, age, oldest }));
  shown = data;
}

async function look() {
  clearTimeout(timer);
  try {
    await ask();
    draw();
    trouble(shown && shown.about.trouble ? `The run cannot be read any further: ${shown.about.trouble}` : "");
    wait = LOOK_MS;
  } catch (error) {
    trouble(`No answer from the page (${error.message}); these are the last figures it gave.`);
    wait = Math.min(2 * wait, SLOWEST_MS);
  }
  timer = setTimeout(look, document.hidden ? HIDDEN_MS : wait);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
let resized = 0;
addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(draw); });
look();
