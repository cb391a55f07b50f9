// Prompts by pass rate over time: which are too hard, too easy, failing, or changing.
"use strict";

const prompts = {
  found: null,
  async look(values) {
    byId("prompts-order").value = values.order || "hardest";
    byId("prompts-of").value = values.of || "";
    const offset = Number(values.offset || 0);
    const found = await ask("/prompts", { ...values, run: view.run, limit: PAGE });
    if (found === this.found) return;
    this.found = found;
    refill(byId("prompts-rows"), found.prompts.map(promptRow));
    say("prompts-count", found.prompts.length ? `${whole(offset + 1)} to ${whole(offset + found.prompts.length)}` : "no prompt was answered yet, or the index is being built");
    const pages = [];
    if (offset) pages.push(link("Back", "prompts", { ...values, offset: Math.max(0, offset - PAGE) || "" }, "button"));
    if (found.prompts.length === PAGE) pages.push(link("More", "prompts", { ...values, offset: offset + PAGE }, "button"));
    byId("prompts-pages").replaceChildren(...pages);
  },
};

function promptRow({ rate, text }) {
  const row = element("tr"), name = element("td"), over = element("td");
  const one = rate.row >= 0 ? { row: rate.row } : { prompt: rate.newest };
  name.append(link(rate.row >= 0 ? `row ${rate.row}` : `p${rate.newest}`, "samples", one));
  over.append(visitBars(rate.history));
  row.append(name, element("td", "n", percent(rate.passed / rate.samples)), element("td", "n", whole(rate.samples)), element("td", "n", whole(rate.visits)));
  row.append(element("td", rate.failed ? "n alarm" : "n", whole(rate.failed)), element("td", "n", fixed(rate.reward, 3)), over, element("td", "beginning", visible(text)));
  return row;
}

function visitBars(history) {
  const words = history.map(([, version, count, passed]) => `v${version}: ${passed} of ${count}`);
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ class: "visits", viewBox: `0 0 ${Math.max(8, history.length) * 6} 22`, role: "img", "aria-label": `passed at each visit: ${words.join(", ")}` })) svg.setAttribute(name, value);
  history.forEach(([, , count, passed], i) => {
    const height = 2 + (18 * passed) / Math.max(1, count);
    tips.set(mark(svg, "rect", { class: passed === count ? "trained" : passed ? "generating" : "stale", x: i * 6, y: 21 - height, width: 5, height }), () => words[i]);
  });
  return svg;
}

function listenToPrompts() {
  const choices = ["order", "of"].map((name) => [name, byId(`prompts-${name}`)]);
  for (const [, each] of choices) each.addEventListener("change", () => go("prompts", Object.fromEntries(choices.map(([name, { value }]) => [name, value]))));
}
