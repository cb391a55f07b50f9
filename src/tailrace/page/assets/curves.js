// Curves of any figure of any number of runs: by step or time, plain or logarithmic, smoothed, with values on hover.
"use strict";

const CURVE_COLOURS = 8; // .c0 to .c7

function smoothed(points, weight) {
  // An exponential moving average without the bias towards zero at its beginning.
  let sum = 0, scale = 0;
  return points.map(([x, y, ...rest]) => {
    sum = weight * sum + (1 - weight) * y;
    scale = weight * scale + (1 - weight);
    return [x, sum / scale, ...rest];
  });
}

function spread(values, log) {
  const usable = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  if (!usable.length) return null;
  const low = Math.min(...usable), high = Math.max(...usable);
  if (log) return [low, high > low ? high : low * 10];
  const margin = 0.06 * (high - low || Math.abs(high) || 1);
  return [low - margin, high + margin];
}

function curveTicks(low, high, log) {
  const found = [];
  if (log) {
    for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power++) found.push(10 ** power);
    return found.length > 1 ? found : [low, high];
  }
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= rough * 0.999);
  for (let i = Math.ceil(low / step); i <= high / step + 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function stepTicks(low, high, most) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000, 1e6].find((each) => (high - low) / each <= most) || 1e7;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}

function drawCurves(svg, curves, { axis, log, smooth, dots = false, shares = false, where = null }) {
  // curves: [{ name, points: [[step, time, value]] }]; shares: from 0 to 1 where all values lie there; where: words for a place on the axis
  const at = axis === "step" ? 0 : 1;
  const raw = curves.map((curve) => curve.points.map((p) => [p[at], p[2]]).filter(([, y]) => Number.isFinite(y) && (!log || y > 0)));
  const lines = raw.map((points) => (smooth > 0 ? smoothed(points, smooth) : points));
  const ys = raw.flat().map(([, y]) => y), range = shares && ys.length && ys.every((y) => y >= 0 && y <= 1) ? [0, 1.04] : spread(ys, log), xs = raw.flat().map(([x]) => x);
  const across = [Math.min(0, ...xs), Math.max(1e-6, ...xs)];
  const frame = new Frame(svg, across, range || [0, 1], { logUp: log });
  if (!range) return frame.text(frame.width / 2, frame.height / 2, "no data yet", "middle");
  frame.grid(curveTicks(...range, log));
  if (axis === "step") for (const tick of stepTicks(...across, Math.max(2, frame.width / 80))) frame.text(frame.x(tick), frame.height - 5, whole(tick), "middle");
  else frame.times(across[1]);
  raw.forEach((points, i) => { if (smooth > 0) frame.line(`c${i % CURVE_COLOURS} faint`, points); });
  lines.forEach((points, i) => frame.line(`c${i % CURVE_COLOURS}`, points));
  lines.forEach((points, i) => { if (dots || points.length === 1) frame.dots(`c${i % CURVE_COLOURS}`, points, 3); });
  tips.set(svg, (event) => curveWords(event, svg, frame, curves, lines, where || ((x) => (axis === "step" ? `step ${whole(x)}` : clock(x)))));
}

function curveWords(event, svg, frame, curves, lines, where) {
  const box = svg.getBoundingClientRect(), wanted = event.clientX - box.left;
  const closest = (points) => points.reduce((best, p) => (!best || Math.abs(frame.x(p[0]) - wanted) < Math.abs(frame.x(best[0]) - wanted) ? p : best), null);
  const found = lines.map(closest), first = found.find(Boolean);
  if (!first) return "";
  return [where(first[0]), ...found.map((p, i) => p && `${curves[i].name}: ${Number(p[1].toPrecision(5))}`).filter(Boolean)].join("\n");
}

function curveLegend(curves) {
  return curves.map((curve, i) => swatch(`c${i % CURVE_COLOURS}`, curve.name));
}
