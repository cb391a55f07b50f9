// The sample browser: a filter, the samples that match, one in full, and a group side by side.
"use strict";

const PAGE = 50;
const FILTER = ["text", "asked", "min_reward", "max_reward", "min_tokens", "max_tokens", "step", "prompt", "row", "group", "version", "state", "finish", "error", "of", "order"];
const MORE = FILTER.slice(4, -2); // those that are folded away
const filterForm = () => byId("filter");

function fillFilter(values) {
  for (const name of FILTER) filterForm().elements[name].value = values[name] || (name === "order" ? "newest" : "");
  if (MORE.some((name) => values[name])) byId("filter-more").open = true;
}

function readFilter() {
  const found = Object.fromEntries(FILTER.map((name) => [name, filterForm().elements[name].value.trim()]));
  for (const name of ["prompt", "group", "version"]) found[name] = found[name].replace(/^[pgv]/, "");
  if (found.order === "newest") found.order = "";
  return found;
}

const samples = {
  shown: null, // which filter
  found: null,
  async look(values) {
    const { run, ...filter } = values;
    if (this.shown !== query(values)) fillFilter(filter);
    const fresh = this.shown !== query(values);
    this.shown = query(values);
    if (answers) filterForm().hidden = true; // a report has some samples, and nobody to search
    const began = performance.now();
    const found = await ask("/samples", { ...filter, run: view.run, limit: PAGE });
    if (this.shown !== query(values)) return; // somebody has typed on
    if (found === this.found && !fresh) return; // and keeps whatever has the focus
    this.found = found;
    drawSamples(found, filter, fresh ? performance.now() - began : null);
    if (filter.text || filter.asked || filter.row) await sayIndex();
    else say("index-state", "");
  },
};

function drawSamples(found, filter, took) {
  const offset = Number(filter.offset || 0), last = offset + found.samples.length;
  const count = found.more ? `more than ${whole(found.count)}` : whole(found.count);
  byId("samples-count").setAttribute("aria-live", took === null ? "off" : "polite"); // samples that are new are not read out
  say("samples-count", found.samples.length ? `${whole(offset + 1)} to ${whole(last)} of ${count} samples${took ? `, ${(took / 1000).toFixed(2)} s` : ""}` : "no sample is like that");
  refill(byId("samples-rows"), found.samples.map(sampleRow));
  const turn = (by) => ({ ...filter, offset: Math.max(0, offset + by) || "" });
  const pages = [];
  if (offset) pages.push(link("Back", "samples", turn(-PAGE), "button"));
  if (found.more || last < found.count) pages.push(link("More", "samples", turn(PAGE), "button"));
  byId("samples-pages").replaceChildren(...pages);
}

function sampleRow({ known, text }) {
  const row = element("tr"), name = element("td"), group = element("td"), words = element("td", "beginning", visible([known.reason, text].filter(Boolean).join(" | ")));
  name.append(link(`t${known.id}`, "sample", { id: known.id }));
  group.append(link(`g${known.group}`, "group", { id: known.group }));
  const versions = known.oldest === null ? "–" : known.oldest === known.newest ? `v${known.oldest}` : `v${known.oldest}–${known.newest}`;
  const cells = [known.step === null ? known.state : `${known.state}, step ${known.step}`, fixed(known.reward, 3), known.tokens === null ? "–" : whole(known.tokens), versions, known.finish];
  row.append(name, group, ...cells.map((cell, i) => element("td", i === 1 || i === 2 ? "n" : "", cell)), words);
  if (known.state === "failed") row.className = "failed-row";
  return row;
}

async function sayIndex() {
  const { read, bytes, samples: indexed } = await ask("/index", { run: view.run });
  const behind = overview.shown && overview.shown.read > read + 1000 ? `, still reading (event ${whole(read)} of ${whole(overview.shown.read)})` : "";
  say("index-state", `text index: ${whole(indexed)} samples, ${(bytes / 1e6).toFixed(1)} MB${behind}`);
}

// ------------------------------------------------------------------------------------------------------- one in full

let colouring = "logprob";

const sampleView = {
  shown: null,
  async look(values) {
    const found = await ask("/sample", { id: values.id, run: view.run });
    if (found === this.shown) return;
    this.shown = found;
    this.draw();
  },
  draw() {
    const one = this.shown, { known } = one;
    say("sample-name", `Sample t${known.id}`);
    byId("sample-links").replaceChildren(link(`group g${known.group}`, "group", { id: known.group }), link(`prompt p${known.prompt}`, "samples", { prompt: known.prompt }));
    byId("sample-facts").replaceChildren(sampleFacts(one));
    byId("sample-text").replaceChildren(sampleText(one, colouring), ...one.failed.map((each) => failedAttempt(each, colouring)));
    say("sample-colours", colourWords(colouring, one));
  },
};

function colourWords(how, sample) {
  if (how === "logprob") return "the redder a token, the less likely it was";
  if (how === "advantage") return sample.advantage === null ? "no advantage is known" : `advantage ${sample.advantage}: ${sample.advantage > 0 ? "green, made more likely" : sample.advantage < 0 ? "red, made less likely" : "no colour, not changed"}`;
  return how === "version" ? "a colour for each version of the weights" : "";
}

// ------------------------------------------------------------------------------------------------------ side by side

const groupView = {
  shown: null,
  async look(values) {
    const found = await ask("/group", { id: values.id, run: view.run });
    if (found === this.shown) return;
    this.shown = found;
    this.draw(values);
  },
  draw(values) {
    if (values) say("group-name", `Group g${values.id}`);
    const [first] = this.shown.samples;
    byId("group-prompt").replaceChildren(...(first ? [passageBlock(first.passages[0], first, "none")] : []));
    byId("group-columns").replaceChildren(...this.shown.samples.map((one) => {
      const column = element("article", "card member"), title = element("h3");
      title.append(link(`t${one.known.id}`, "sample", { id: one.known.id }), ` · reward ${fixed(one.known.reward, 3)} · advantage ${fixed(one.advantage, 3)} · ${one.known.tokens === null ? "growing" : `${whole(one.known.tokens)} tokens`}`);
      column.append(title, ...(one.known.reason ? [element("p", "alarm", visible(one.known.reason))] : []));
      column.append(sampleText({ ...one, passages: one.passages.slice(1) }, colouring));
      return column;
    }));
  },
};

function listenToSamples() {
  filterForm().addEventListener("submit", (event) => { event.preventDefault(); go("samples", readFilter()); });
  byId("filter-clear").addEventListener("click", () => go("samples", {}));
  for (const each of document.querySelectorAll("select.colouring")) {
    each.append(...Object.entries(COLOURINGS).map(([value, words]) => { const made = element("option", "", words); made.value = value; return made; }));
    each.value = colouring;
    each.addEventListener("change", () => {
      colouring = each.value;
      for (const other of document.querySelectorAll("select.colouring")) other.value = colouring;
      if (sampleView.shown) sampleView.draw();
      if (groupView.shown) groupView.draw();
    });
  }
}
