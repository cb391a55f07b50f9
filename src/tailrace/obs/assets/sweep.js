// The report of `tailrace simulate --plot out.html`: throughput by schedule, what the replicas did, and the results.
"use strict";

const sweep = embedded();
const SIDE = { left: 120, right: 290, top: 8, bottom: 40 };

function throughputLines(svg) {
  svg.style.height = "300px";
  const { gpus, low, high, log } = sweep;
  const frame = new Frame(svg, [gpus[0], gpus.at(-1)], [low, high], { pad: SIDE, log });
  frame.grid(sweep.ticks);
  for (const count of gpus) frame.text(frame.x(count), frame.height - 22, whole(count), "middle");
  frame.text((SIDE.left + frame.width - SIDE.right) / 2, frame.height - 5, "GPUs", "middle");
  frame.line("ideal", sweep.ideal);
  if (sweep.ideal.length) beside(frame, frame.share(sweep.ideal_at), "ideal scaling", "", "");
  for (const series of sweep.series) {
    frame.line(series.kind, series.points);
    const dots = frame.dots(series.kind, series.points, 4.5);
    dots.forEach((dot, i) => tips.set(dot, () => rateWords(series, series.points[i])));
    beside(frame, frame.share(series.label_at), series.name, series.label, series.kind);
  }
}

function rateWords(series, [gpus, rate]) {
  return `${series.name}\n${whole(rate)} tokens/s\n${whole(gpus)} GPUs`;
}

function beside(frame, y, name, value, kind) {
  const label = frame.text(frame.width - SIDE.right + 14, y + 4, "", "start", "label");
  mark(label, "tspan", { class: `name ${kind}` }, name);
  mark(label, "tspan", { dx: 8 }, value);
}

function throughputBars(svg) {
  svg.style.height = `${32 * sweep.series.length + 8}px`;
  const frame = new Frame(svg, [0, sweep.high], [0, 1], { pad: SIDE });
  sweep.series.forEach((series, i) => {
    const rate = series.points.at(-1)[1], width = frame.x(rate) - SIDE.left;
    frame.text(SIDE.left - 10, 32 * i + 19, series.name, "end", `name ${series.kind}`);
    const bar = mark(svg, "rect", { class: `bar ${series.kind}`, x: SIDE.left, y: 32 * i + 4, width, height: 21 });
    tips.set(bar, () => rateWords(series, series.points.at(-1)));
    frame.text(frame.x(rate) + 9, 32 * i + 19, series.label, "start", "label");
  });
}

function strip(view, svg, seen) {
  const tall = Math.min(124, Math.max(78, 2.6 * view.lanes.length)) / Math.max(1, view.lanes.length);
  const options = { tall, gap: 0, seen, pad: { ...SIDE, bottom: 20 }, begins: view.begins, named: false };
  const frame = drawLanes(svg, view.lanes, sweep.seconds, options);
  const middle = (tall * view.lanes.length) / 2 + 8;
  frame.text(SIDE.left - 10, middle, view.replicas, "end");
  const words = [[view.name, `name ${view.kind}`], ...view.notes.map((note) => [note, ""])];
  words.forEach(([text, kind], i) => frame.text(frame.width - SIDE.right + 14, middle + 17 * (i - view.notes.length / 2), text, "start", kind));
}

function drawSweep() {
  (sweep.gpus.length > 1 ? throughputLines : throughputBars)(byId("throughput"));
  const seen = new Set(), drawn = byId("strips").children;
  sweep.strips.forEach((view, i) => strip(view, drawn[i], seen));
  byId("legend").replaceChildren(...legend(seen));
}

byId("title").textContent = sweep.title;
byId("heading").textContent = sweep.heading;
byId("caption").textContent = sweep.caption;
byId("timelines").hidden = !sweep.strips.length;
for (const _ of sweep.strips) mark(byId("strips"), "svg", { class: "strip", role: "img", "aria-label": "States of replicas over time" });
byId("results").append(table(sweep.columns, sweep.rows));
drawSweep();
redrawOnResize(drawSweep);
