// Every metric with a picker, for this run or several: by step or time, log scale, smoothing.
"use strict";

const BUILT_IN = { "run/reward": "reward", "run/tokens_per_s": "rate", "run/staleness": "staleness", "run/max_staleness": "max_staleness" };
const FIRST_SHOWN = ["run/reward", "run/tokens_per_s", "trainer:loss", "trainer:entropy"];

const metrics = {
  names: [], // what can be picked: "run/reward", "trainer:loss", "replicas:kv_usage"
  picked: [],
  runs: [], // numbers of the compared runs
  async look(values) {
    const { metrics: found } = await ask("/curves", { run: view.run });
    this.names = [...Object.keys(BUILT_IN), ...found.flatMap(({ name, sources }) => sources.map((source) => `${source}:${name}`))];
    const first = this.names.find((name) => /^eval:eval\/[^/]+\/avg@/.test(name));
    this.picked = values.show ? values.show.split(",") : [...FIRST_SHOWN, first].filter((name) => this.names.includes(name));
    byId("metric-axis").value = values.by === "time" ? "time" : "step";
    byId("metric-log").checked = Boolean(values.log);
    byId("metric-smooth").value = values.smooth || byId("metric-smooth").defaultValue;
    this.runs = values.compare ? values.compare.split(",").map(Number) : [view.run];
    fillPicker(this.names, this.picked);
    await Promise.all(this.picked.map((name) => drawMetric(name, this.runs)));
    dropOtherMetrics(this.picked);
  },
};

function fillPicker(names, picked) {
  const wanted = byId("metric-find").value.trim().toLowerCase();
  const shown = names.filter((name) => name.toLowerCase().includes(wanted)), known = [...byId("metric-names").querySelectorAll("input")];
  if (known.map((box) => box.value).join() !== shown.join()) byId("metric-names").replaceChildren(...shown.map(pickerLine));
  for (const box of byId("metric-names").querySelectorAll("input")) box.checked = picked.includes(box.value);
}

function pickerLine(name) {
  const line = element("label", "pick"), box = element("input");
  box.type = "checkbox";
  box.value = name;
  box.addEventListener("change", () => {
    const left = metrics.picked.filter((each) => each !== name);
    go("metrics", { ...readHash().values, show: (box.checked ? [...left, name] : left).join(",") });
  });
  line.append(box, visible(name));
  return line;
}

async function drawMetric(name, runs) {
  const settings = { axis: byId("metric-axis").value, log: byId("metric-log").checked, smooth: Number(byId("metric-smooth").value) };
  const curves = await Promise.all(runs.map(async (run) => ({ name: runName(run), points: await metricPoints(name, run) })));
  if (settings.axis === "step") for (const curve of curves) curve.points = byStep(curve.points);
  const svg = metricCard(name).querySelector("svg");
  drawCurves(svg, curves, settings);
  svg.parentElement.querySelector(".legend").replaceChildren(...(runs.length > 1 ? curveLegend(curves) : []));
}

async function metricPoints(name, run) {
  // [step, time, value]
  if (BUILT_IN[name]) {
    const { charts: { columns, points } } = await ask("/data", { run });
    const [step, at, value] = ["step", "ended", BUILT_IN[name]].map((column) => columns.indexOf(column));
    return points.map((point) => [point[step], point[at], point[value] ?? NaN]);
  }
  const [source, ...rest] = name.split(":");
  const found = await ask("/series", { run, source, name: rest.join(":") });
  const counts = ["trainer", "controller"].includes(source) ? 1 : 0; // those two say which step it is, and 0 is the first
  return found.points.map(([now, step, mean, , , count]) => [step < 0 ? step : step + counts, now, mean, count]);
}

function byStep(points) {
  // Several measurements of one step (its mini-batches) are one.
  const steps = new Map();
  for (const [step, now, value, count = 1] of points) {
    const [sum, total] = steps.get(step)?.slice(2) || [0, 0];
    steps.set(step, [step, now, sum + value * count, total + count]);
  }
  return [...steps.values()].map(([step, now, sum, total]) => [step, now, sum / total]);
}

function metricCard(name) {
  const known = [...byId("metric-charts").children].find((card) => card.dataset.name === name);
  if (known) return known;
  const card = element("figure", "card");
  card.dataset.name = name;
  card.append(element("figcaption", "", visible(name)));
  mark(card, "svg", { class: "chart tall", role: "img", "aria-label": `Curve of ${name}` });
  card.append(element("div", "legend"));
  byId("metric-charts").append(card);
  return card;
}

function dropOtherMetrics(picked) {
  for (const card of [...byId("metric-charts").children]) if (!picked.includes(card.dataset.name)) card.remove();
}

function keepHowDrawn() {
  // In the address, for whoever reloads it or follows it, but no further step for Back.
  const by = byId("metric-axis").value, log = byId("metric-log").checked, smooth = byId("metric-smooth");
  const drawn = { by: by === "step" ? "" : by, log: log ? 1 : "", smooth: smooth.value === smooth.defaultValue ? "" : smooth.value };
  history.replaceState(null, "", linkTo("metrics", { ...readHash().values, ...drawn }));
  look();
}

function listenToMetrics() {
  for (const id of ["metric-axis", "metric-log", "metric-smooth"]) byId(id).addEventListener("input", keepHowDrawn);
  byId("metric-find").addEventListener("input", () => fillPicker(metrics.names, metrics.picked));
}
