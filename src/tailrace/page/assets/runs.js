// The runs that this page can show: pick one, or compare several.
"use strict";

const runs = {
  all: [],
  chosen: new Set(), // to be compared
  async look() {
    const { runs: found } = await ask("/runs");
    if (found === this.all) return;
    this.all = found;
    refill(byId("runs-rows"), this.all.map(runRow));
    nameRuns();
  },
};

const runName = (number) => { const found = runs.all.find((one) => one.number === number); return found ? found.name : `run ${number}`; };

function runRow(run) {
  const row = element("tr"), pick = element("td"), name = element("td"), box = element("input"), state = element("td");
  box.type = "checkbox";
  box.value = run.number;
  box.checked = runs.chosen.has(run.number);
  box.addEventListener("change", () => runs.chosen[box.checked ? "add" : "delete"](run.number));
  box.setAttribute("aria-label", `compare ${run.name}`);
  pick.append(box);
  name.append(link(run.name, "overview", { run: run.number }));
  state.append(element("span", `pill ${run.ended.state}`, run.ended.state));
  row.append(pick, name, state, element("td", "", run.schedule), element("td", "n", `${whole(run.done)} of ${whole(run.steps)}`), element("td", "n", fixed(run.reward, 3)), element("td", "n", accuracyWords(run.accuracy)), element("td", "", run.created.replace("T", " ").replace("+00:00", "")), element("td", "soft note", run.trouble || run.ended.reason));
  return row;
}

const accuracyWords = ([before, after]) => before === null && after === null ? "–" : `${fixed(before, 2)} → ${fixed(after, 2)}`;

function nameRuns() {
  const nav = document.querySelector('nav a[href^="#runs"]');
  nav.hidden = runs.all.length < 2;
}

function listenToRuns() {
  byId("compare").addEventListener("click", () => {
    const chosen = [...runs.chosen].sort((a, b) => a - b);
    if (chosen.length) go("metrics", { compare: chosen.join(","), run: chosen[0] });
  });
}
