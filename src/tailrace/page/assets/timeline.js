// The timeline of a run, zoomed and panned: a lane per process, coloured by state or version, repack moves as arrows.
// Drawn on a canvas, and only the lanes that are on the screen, so that a thousand replicas stay fluid.
"use strict";

const LEFT = 64, AXIS = 24, MOST_LANES = 128, SETTLED_MS = 120, CLOSEST_S = 0.002;

const laneView = {
  every: 1000,
  data: null, // the newest answer
  begin: 0,
  end: 0, // 0: until now, and it goes on
  run: 0,
  async look(values) {
    if (this.run !== view.run) [this.run, this.begin, this.end, this.data] = [view.run, 0, 0, null];
    if (values.begin !== undefined || values.end !== undefined) [this.begin, this.end] = [Number(values.begin) || 0, Number(values.end) || 0];
    await this.load();
  },
  async load() {
    const { first, count } = visibleLanes();
    this.data = await ask("/timeline", { run: view.run, begin: this.begin.toFixed(4), end: this.end.toFixed(4), first, count });
    this.draw();
  },
  get until() { return this.end || (this.data ? this.data.seconds : 1); },
  draw() {
    if (!this.data) return;
    const tall = this.data.total * laneHeight() + AXIS;
    byId("lanes-space").style.height = `${tall}px`;
    byId("lanes").style.height = `min(62vh, ${Math.max(tall, 60) + 2}px)`;
    drawLaneCanvas(this.data, this.begin, this.until);
    say("lanes-window", `${clock(this.begin)} to ${clock(this.until)} of ${clock(this.data.seconds)}; lanes ${this.data.lanes.length ? `${this.data.lanes[0].name} to ${this.data.lanes.at(-1).name}` : "none"} of ${whole(this.data.total)}; ${whole(this.data.moves.length)} repack moves`);
  },
};

function laneHeight() {
  // Few lanes are large, hundreds small.
  const total = laneView.data ? laneView.data.total : 0;
  return Number(byId("lanes-height").value) || (total <= 24 ? 20 : total <= 50 ? 12 : 5);
}

function visibleLanes() {
  const box = byId("lanes"), tall = laneHeight();
  const first = Math.max(0, Math.floor(box.scrollTop / tall) - 1);
  return { first, count: Math.min(MOST_LANES, Math.ceil(box.clientHeight / tall) + 3) };
}

// ------------------------------------------------------------------------------------------------------------- drawing

const laneColours = {};

function stateColour(state) {
  if (!laneColours[state]) laneColours[state] = getComputedStyle(document.documentElement).getPropertyValue(`--${state}`).trim();
  return laneColours[state];
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const state of Object.keys(laneColours)) delete laneColours[state];
  laneView.draw();
});

function drawLaneCanvas(data, begin, end) {
  const canvas = byId("lanes-canvas"), box = byId("lanes"), width = box.clientWidth, height = box.clientHeight, scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * scale, height * scale];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const paint = canvas.getContext("2d"), x = (at) => LEFT + ((at - begin) / Math.max(1e-9, end - begin)) * (width - LEFT - 8);
  paint.scale(scale, scale);
  paint.clearRect(0, 0, width, height);
  const seen = new Set(), tall = laneHeight(), y = (lane) => lane * tall - box.scrollTop;
  paint.save();
  paint.beginPath();
  paint.rect(0, 0, width, height - AXIS);
  paint.clip();
  data.lanes.forEach((lane, i) => paintLane(paint, lane, y(data.first + i), tall, x, seen));
  for (const move of data.moves) paintMove(paint, move, x, y, tall, height - AXIS);
  paint.restore();
  paintAxis(paint, begin, end, x, width, height);
  byId("lanes-legend").replaceChildren(...(byVersion() ? versionLegend(data) : legend(seen)));
}

const byVersion = () => byId("lanes-colour").value === "version";

function spanColour(state, version) {
  return byVersion() && version >= 0 && (state === "generating" || state === "training") ? `hsl(${versionHue(version)} 55% 55%)` : stateColour(state);
}

function paintLane(paint, lane, top, tall, x, seen) {
  const gap = tall > 8 ? 2 : 0;
  let start = lane.start;
  const brief = [];
  [...lane.states].forEach((letter, i) => {
    const state = STATES[letter], from = start, to = lane.ends[i];
    start = to;
    if (!state) return;
    seen.add(state);
    if (BRIEF.includes(state)) return brief.push([state, lane.versions[i], from, to]);
    fill(state, lane.versions[i], from, to);
  });
  brief.forEach((span) => fill(...span, 1.5));
  function fill(state, version, from, to, least = 0) {
    const left = Math.max(LEFT, x(from)), right = Math.max(x(to), left + least);
    if (right <= LEFT) return;
    paint.fillStyle = spanColour(state, version);
    paint.fillRect(left, top + gap / 2, right - left, tall - gap);
  }
  paint.fillStyle = stateColour("ground");
  paint.fillRect(0, top, LEFT - 2, tall);
  if (tall >= 10) write(paint, lane.name, LEFT - 8, top + tall / 2 + 4, "right");
}

function paintMove(paint, move, x, y, tall, bottom) {
  const [left, arrived, source, target] = move, from = [x(left), y(source) + tall / 2], to = [x(arrived), y(target) + tall / 2];
  if ((from[1] < -tall && to[1] < -tall) || (from[1] > bottom + tall && to[1] > bottom + tall) || to[0] < LEFT) return;
  paint.strokeStyle = paint.fillStyle = stateColour("ink");
  paint.globalAlpha = 0.75;
  paint.lineWidth = 1.2;
  const bend = 10 + Math.min(14, Math.abs(to[1] - from[1]) / 12);
  paint.beginPath();
  paint.moveTo(...from);
  paint.bezierCurveTo(from[0] + bend, from[1], to[0] + bend, to[1], to[0] + 2, to[1]);
  paint.stroke();
  paint.beginPath();
  paint.moveTo(to[0], to[1]);
  paint.lineTo(to[0] + 6, to[1] - 3.5);
  paint.lineTo(to[0] + 6, to[1] + 3.5);
  paint.fill();
  paint.globalAlpha = 1;
}

function paintAxis(paint, begin, end, x, width, height) {
  paint.fillStyle = stateColour("card");
  paint.fillRect(0, height - AXIS, width, AXIS);
  const seconds = end - begin, steps = timeTicks(seconds, Math.max(2, Math.floor(width / 110)));
  const step = steps.length > 1 ? steps[1][0] : seconds || 1;
  for (let at = Math.ceil(begin / step) * step; at <= end + 1e-9; at += step) {
    const words = step < 1 ? `${at.toFixed(step < 0.1 ? 3 : 1)} s` : clock(at);
    write(paint, words, Math.min(x(at), width - 24), height - 7, "center");
  }
}

function write(paint, words, x, y, align) {
  paint.fillStyle = stateColour("soft");
  paint.font = "11px system-ui, sans-serif";
  paint.textAlign = align;
  paint.fillText(words, x, y);
}

function versionLegend(data) {
  const found = [...new Set(data.lanes.flatMap((lane) => lane.versions))].filter((version) => version >= 0).sort((a, b) => a - b);
  const shown = found.length > 24 ? [...found.slice(0, 12), ...found.slice(-12)] : found;
  return shown.map((version) => {
    const made = swatch("", `v${version}`);
    made.firstChild.style.background = `hsl(${versionHue(version)} 55% 55%)`;
    return made;
  });
}

// ------------------------------------------------------------------------------------------------------------- looking closer

function zoom(factor, middle) {
  const { begin, until } = laneView, total = laneView.data ? laneView.data.seconds : until, at = middle ?? (begin + until) / 2;
  const size = Math.min(total, Math.max(CLOSEST_S, (until - begin) * factor)), share = (at - begin) / Math.max(1e-9, until - begin);
  move(Math.max(0, Math.min(total - size, at - share * size)), size, total);
}

function pan(share) {
  const { begin, until } = laneView, size = until - begin, total = laneView.data ? laneView.data.seconds : until;
  move(Math.max(0, Math.min(total - size, begin + share * size)), size, total);
}

let settling = 0;

function move(begin, size, total) {
  laneView.begin = begin;
  laneView.end = begin + size >= total ? (begin <= 0 ? 0 : total) : begin + size;
  laneView.draw(); // with what is there, at once
  clearTimeout(settling);
  settling = setTimeout(() => laneView.load().catch((error) => trouble(error.message)), SETTLED_MS);
}

function timeAt(event) {
  const box = byId("lanes-canvas").getBoundingClientRect();
  return laneView.begin + ((event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - 8)) * (laneView.until - laneView.begin);
}

function laneWords(event) {
  const { data } = laneView, box = byId("lanes-canvas").getBoundingClientRect(), at = timeAt(event);
  if (!data || event.clientX - box.left < LEFT) return "";
  const number = Math.floor((event.clientY - box.top + byId("lanes").scrollTop) / laneHeight()), lane = data.lanes[number - data.first];
  const near = (laneView.until - laneView.begin) * 0.006;
  const moved = data.moves.filter(([left, arrived, source, target]) => (source === number && Math.abs(left - at) < near) || (target === number && Math.abs(arrived - at) < near));
  const words = moved.slice(0, 4).map(([left, , source, target, count]) => `repack at ${left.toFixed(1)} s: ${count} samples from ${laneName(source)} to ${laneName(target)}`);
  const place = lane ? lane.ends.findIndex((end) => end >= at) : -1;
  if (place >= 0 && at >= lane.start) {
    const state = STATES[lane.states[place]], from = place ? lane.ends[place - 1] : lane.start;
    if (state) words.unshift(lane.name, `${STATE_WORDS[state] || state}${lane.versions[place] >= 0 ? `, v${lane.versions[place]}` : ""}`, `${from.toFixed(2)} s to ${lane.ends[place].toFixed(2)} s (${(lane.ends[place] - from).toFixed(2)} s)`);
  }
  return words.join("\n");
}

const laneName = (number) => { const { data } = laneView, lane = data.lanes[number - data.first]; return lane ? lane.name : `lane ${number}`; };

const KEYS = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), Home: () => { laneView.begin = laneView.end = 0; zoom(1); } };

function listenToLanes() {
  const box = byId("lanes"), canvas = byId("lanes-canvas");
  box.addEventListener("keydown", (event) => { const act = KEYS[event.key]; if (act) { event.preventDefault(); act(); } });
  box.addEventListener("scroll", () => { laneView.draw(); clearTimeout(settling); settling = setTimeout(() => laneView.load().catch(() => {}), SETTLED_MS); });
  box.addEventListener("wheel", (event) => {
    if (event.deltaX && Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); pan(event.deltaX / 800); }
    else if (event.ctrlKey || event.shiftKey) { event.preventDefault(); zoom(Math.exp((event.deltaY || event.deltaX) / 400), timeAt(event)); }
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = [event.clientX, laneView.begin]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return;
    const size = laneView.until - laneView.begin, total = laneView.data.seconds, by = ((held[0] - event.clientX) / Math.max(1, canvas.clientWidth - LEFT)) * size;
    if (size < total) move(Math.max(0, Math.min(total - size, held[1] + by)), size, total);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { held = null; });
  canvas.addEventListener("dblclick", (event) => zoom(0.5, timeAt(event)));
  tips.set(canvas, laneWords);
  byId("zoom-in").addEventListener("click", KEYS["+"]);
  byId("zoom-out").addEventListener("click", KEYS["-"]);
  byId("pan-left").addEventListener("click", KEYS.ArrowLeft);
  byId("pan-right").addEventListener("click", KEYS.ArrowRight);
  byId("zoom-all").addEventListener("click", KEYS.Home);
  byId("lanes-colour").addEventListener("change", () => laneView.draw());
  byId("lanes-height").addEventListener("change", () => { laneView.draw(); laneView.load().catch(() => {}); });
}
