// Curves of evaluations while training, in the overview: a chart for each figure, a line for each set, by version.
"use strict";

const EVAL_CHARTS = [["average", "avg"], ["passed", "pass"], ["reward", "mean reward"]]; // in the order of a point's values, after the version

function evalTitle(kind, words, sets) {
  if (kind === "reward") return "Evaluation: mean reward by version";
  const counts = [...new Set(sets.map((one) => one.samples))];
  return `Evaluation: ${words}@${counts.length === 1 ? counts[0] : "k"} by version`;
}

function evaluations(data) {
  const { sets, best } = data.evaluations, several = sets.some((one) => one.samples > 1);
  byId("evaluations").hidden = !sets.length;
  if (!sets.length) return;
  EVAL_CHARTS.forEach(([kind, words], at) => {
    const card = evalCard(kind);
    card.hidden = kind === "passed" && !several; // of one sample it is the average
    const curves = sets.map((one) => ({ name: visible(one.name), points: one.points.map((point) => [point[0], 0, point[at + 1]]) }));
    const svg = card.querySelector("svg"), title = evalTitle(kind, words, sets);
    card.querySelector("figcaption").textContent = title;
    svg.setAttribute("aria-label", `${title}; ${curves.map(evalWords).join("; ")}`);
    if (!card.hidden) drawCurves(svg, curves, { axis: "step", log: false, smooth: 0, dots: true, shares: true, where: (version) => `v${version}` });
    card.querySelector(".legend").replaceChildren(...curveLegend(curves));
  });
  say("evaluations-best", best.length ? `best versions so far: ${best.slice(0, 8).map((version) => `v${version}`).join(", ")}` : "");
}

const evalWords = ({ name, points }) => `${name}: ${fixed(points[0][2], 3)} at v${points[0][0]}, ${fixed(points.at(-1)[2], 3)} at v${points.at(-1)[0]}`;

function evalCard(kind) {
  const known = byId(`eval-${kind}`);
  if (known) return known.parentElement;
  const card = element("figure", "card");
  card.append(element("figcaption"));
  mark(card, "svg", { id: `eval-${kind}`, class: "chart", role: "img" });
  card.append(element("div", "legend"));
  byId("eval-charts").append(card);
  return card;
}
