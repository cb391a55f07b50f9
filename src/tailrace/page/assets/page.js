// Which view is shown, by the address's hash, and asking again while somebody looks at it.
"use strict";

const LOOK_MS = 1000, ENDED_MS = 3000, HIDDEN_MS = 5000, SLOWEST_MS = 10000;
const VIEWS = { overview, samples, sample: sampleView, group: groupView, prompts, metrics, timeline: laneView, settings, runs };
const TAB_OF = { sample: "samples", group: "samples" };
const view = { run: 0 };

function trouble(text) {
  say("trouble", text);
  byId("trouble").hidden = !text;
}

function showView(name) {
  for (const section of document.querySelectorAll("main > [data-view]")) section.hidden = section.dataset.view !== name;
  for (const tab of document.querySelectorAll("nav a")) {
    const its = tab.hash.slice(1).split("?")[0];
    tab.href = linkTo(its);
    if (its === (TAB_OF[name] || name)) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
}

const shownView = () => document.querySelector("main > [data-view]:not([hidden])");

let wait = LOOK_MS, timer = 0, looking = 0;

async function look() {
  clearTimeout(timer);
  const turn = ++looking, { name, values } = readHash(), known = VIEWS[name] ? name : "overview";
  view.run = Number(values.run) || 0;
  delete values.run;
  showView(known);
  try {
    await Promise.all([VIEWS[known].look(values), known === "overview" ? null : headOnly()]);
    if (known !== "overview") trouble("");
    wait = overview.shown?.about.ended.state === "running" ? LOOK_MS : ENDED_MS;
  } catch (error) {
    trouble(error instanceof Refusal ? error.message : `No answer from the page (${error.message}); these are the last figures it gave.`);
    wait = Math.min(2 * wait, SLOWEST_MS);
  }
  if (turn === looking && !answers) timer = setTimeout(look, document.hidden ? HIDDEN_MS : Math.max(wait, VIEWS[known].every || 0));
}

async function headOnly() {
  overview.shown = await ask("/data", { run: view.run });
  head(overview.shown);
}

function redraw() {
  const { name } = readHash();
  if (name === "overview") overview.draw();
  else look();
}

for (const listen of [listenToSamples, listenToPrompts, listenToMetrics, listenToLanes, listenToSettings, listenToRuns]) listen();
redrawOnResize(redraw);
addEventListener("hashchange", ({ oldURL }) => {
  const before = new URL(oldURL).hash.split("?")[0];
  look();
  if (before !== location.hash.split("?")[0]) shownView().focus({ preventScroll: true }); // what had it is hidden now
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
runs.look().then(() => { if (readHash().name === "metrics") look(); }, () => {});
look();
