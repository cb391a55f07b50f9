// The overview of a run: figures, curves, what every process did, what became of groups, the last events.
"use strict";

const GROUP_ENDS = [["trained", "trained"], ["dropped_stale", "stale"], ["filtered", "filtered"], ["stopped", "stopped"],
  ["failed", "failed"], ["lost", "lost"], ["in_flight", "flight"]];
const GROUP_WORDS = { flight: "in flight", stopped: "stopped early" }, RARE = ["lost", "stopped"];

const say = (id, text) => { const it = byId(id); if (it.textContent !== text) it.textContent = text; };

// ---------------------------------------------------------------------------------------------------------- sections

function head(data) {
  const { about, run } = data;
  say("name", about.name);
  const { state, reason } = about.ended;
  say("state", state);
  byId("state").className = `pill ${state}`;
  document.title = `${about.name} · ${state}`;
  say("about", [`schedule ${data.schedule}`, `started ${about.created.replace("T", " ").replace("+00:00", " UTC")}`].join(" · "));
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
  const { run, about } = data, { before, after } = about.accuracy, mean = about.mean_reward, newest = data.evaluations.sets[0]?.points.at(-1);
  say("reward", fixed(run.mean_reward, 3));
  say("reward-more", run.reward === null ? "no step yet" : `10-step mean; last step ${fixed(run.reward, 3)}`);
  const change = (from, to) => `${fixed(from, 2)} → ${to === null ? "…" : fixed(to, 2)}`;
  say("accuracy", before === null && after === null ? "–" : change(before, after));
  const rewards = mean.before === null && mean.after === null ? "" : `, mean reward ${change(mean.before, mean.after)}`;
  const meanwhile = newest && after === null;
  if (meanwhile) say("accuracy", before === null ? fixed(newest[1], 2) : change(before, newest[1]));
  say("accuracy-more", before === null && !newest ? "not measured" : `${meanwhile ? `v${newest[0]}; ` : ""}share of rewards above ${about.right_above}${rewards}`);
  say("rate", whole(run.tokens_per_s));
  say("rate-more", `10-step mean; ${short(run.trained_tokens)} in all`);
  say("staleness", fixed(run.staleness.mean, 2));
  say("staleness-more", `p95 ${run.staleness.p95}, max ${run.staleness.max} of ${data.max_staleness}`);
  say("version", run.version < 0 ? "–" : `v${run.version}`);
  const held = run.replicas.map((replica) => replica.version), oldest = Math.min(...held);
  say("version-more", !held.length || oldest < 0 ? "no replica has loaded one" : `replicas: v${oldest} to v${Math.max(...held)}`);
  say("idle", percent(run.rollout_idle));
  const scoring = (run.rollout_shares.scoring || 0) + (run.rollout_shares.environment || 0);
  say("idle-more", `replicas${scoring >= 0.005 ? ` (judging ${percent(scoring)})` : ""}; trainer ${percent(run.trainer_idle)}`);
  say("faults", whole(data.faults));
  byId("faults").className = data.faults ? "alarm" : "";
  say("faults-more", `${whole(run.failed_samples)} failed samples, ${whole(run.failures)} attempts`);
}

function replicas(data) {
  byId("replicas").replaceChildren(...data.run.replicas.map(replicaRow));
  const hidden = data.charts.replicas - data.run.replicas.length;
  say("replicas-more", hidden > 0 ? `and ${whole(hidden)} more` : "");
}

function replicaRow(replica) {
  const row = element("tr"), state = element("td"), kv = element("td"), meter = element("div", "meter");
  state.append(element("i", replica.state), STATE_WORDS[replica.state] || replica.state);
  const level = element("div", replica.kv > 0.9 ? "full" : "");
  level.style.width = `${100 * replica.kv}%`;
  meter.append(level);
  kv.append(meter, percent(replica.kv));
  row.append(element("td", "", `r${replica.id}`), state, element("td", "", replica.version < 0 ? "–" : `v${replica.version}`), kv);
  for (const text of [whole(replica.running), whole(replica.waiting), whole(replica.scoring), percent(replica.idle)]) row.append(element("td", "n", text));
  return row;
}

function ledger(data) {
  const counts = data.run.ledger, started = element("b", "", `${whole(counts.started)} started`);
  const bar = [], words = [started, "="];
  GROUP_ENDS.filter(([key]) => !RARE.includes(key) || counts[key]).forEach(([key, kind], i) => {
    const piece = element("div", kind);
    piece.style.flexGrow = String(counts[key]);
    if (counts[key]) bar.push(piece);
    if (i) words.push("+");
    words.push(swatch(kind, `${whole(counts[key])} ${GROUP_WORDS[kind] || kind}`));
  });
  byId("ledger-bar").replaceChildren(...bar);
  byId("ledger").replaceChildren(...words.map((word) => (typeof word === "string" ? element("span", "soft", word) : word)));
}

function facts(data) {
  const { run } = data, measured = run.measured;
  const rows = [
    ["samples trained", whole(run.trained_samples)], ["tokens finished", short(run.finished_tokens)],
    ["trainer", run.trainer], ["repacks", `${whole(run.repacks)}, ${whole(run.moved)} moved`],
    ["stall per weight publish", `${(1000 * run.publish_stall_s).toFixed(1)} ms`],
  ];
  for (const name of ["loss", "entropy", "kl", "grad_norm"]) {
    if (typeof measured[name] === "number") rows.push([name.replace("_", " "), String(Number(measured[name].toPrecision(3)))]);
  }
  if (run.without_advantage) rows.push(["without advantage", `${whole(run.without_advantage)} of ${whole(run.mini_batches)} mini-batches`]);
  const saved = run.savings;
  if (saved.unstarted_samples || saved.left_out_samples) {
    rows.push(["prompts skipped", whole(saved.skipped_prompts)], ["tokens not generated", `about ${short(saved.tokens)}`],
      ["wrong samples not trained on", whole(saved.left_out_samples)]);
  }
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
  const { notices } = data.run;
  listed("notices", notices.toReversed().map(([at, text, level]) => eventLine(at, [element("span", level, text)])));
  const last = data.sentences.toReversed();
  listed("sentences", last.map((one) => eventLine(one.at, [element("b", "", one.subject), element("span", "", one.text)])));
}

function eventLine(at, rest) {
  const line = element("li");
  line.append(element("time", "", clock(at)), ...rest);
  return line;
}

function charts(data) {
  const known = byId("charts").children.length ? [...byId("charts").querySelectorAll("svg")] : data.charts.charts.map(chartCard);
  data.charts.charts.forEach((view, i) => drawChart(known[i], view, data.charts));
}

function chartCard(view) {
  const card = element("figure", "card"), svg = mark(card, "svg", { id: `chart-${view.name}`, class: "chart", role: "img", "aria-label": view.title });
  card.prepend(element("figcaption", "", view.title));
  byId("charts").append(card);
  tips.set(svg, (event) => stepWords(nearest(event, svg)));
  return svg;
}

function nearest(event, svg) {
  const { columns, points, seconds } = overview.shown.charts, box = svg.getBoundingClientRect();
  const at = ((event.clientX - box.left - PAD.left) / Math.max(1, box.width - PAD.left - PAD.right)) * seconds;
  const ended = columns.indexOf("ended"), away = (point) => Math.abs(point[ended] - at);
  const found = points.reduce((best, point) => (!best || away(point) < away(best) ? point : best), null);
  return found && Object.fromEntries(columns.map((name, i) => [name, found[i]]));
}

function stepWords(step) {
  if (!step) return "";
  const staleness = `staleness ${fixed(step.staleness, 2)}, max ${step.max_staleness}`;
  return `step ${step.step} at ${clock(step.ended)}\nreward ${fixed(step.reward, 3)}\n${whole(step.rate)} tokens/s\n${staleness}`;
}

const CAUSES = {
  weights: "waiting for weights on their way", barrier: "waiting for the others of the round", trainer: "waiting for the trainer's step",
  admission: "nothing may start (staleness, max_inflight)", generation: "waiting for generation", judging: "waiting for judges and environments",
  nothing: "no replica has work",
};

function idleCauses(data) {
  const found = data.run.idle_causes, idle = { replicas: data.run.rollout_idle, trainer: data.run.trainer_idle };
  const rows = Object.entries(found).flatMap(([who, causes]) =>
    Object.entries(causes).sort((a, b) => b[1] - a[1]).map(([cause, share]) => [who, CAUSES[cause] || cause, percent(share), percent(share * idle[who])]));
  const waited = { scoring: "waiting for judges", environment: "waiting for the environment", lost: "lost" };
  for (const [state, words] of Object.entries(waited)) {
    if (data.run.rollout_shares[state]) rows.push(["replicas", words, "–", percent(data.run.rollout_shares[state])]);
  }
  byId("causes").replaceChildren(rows.length ? table(["who", "why", "of idle time", "of all time"], rows) : element("p", "soft", "nobody was idle"));
}

function overviewLanes(data) {
  const { lanes, seconds } = data.charts, seen = new Set();
  const tall = lanes.length > 24 ? 9 : lanes.length > 10 ? 14 : 20, gap = lanes.length > 24 ? 1 : 3;
  drawLanes(byId("timeline"), lanes, seconds, { tall, gap, seen });
  byId("legend").replaceChildren(...legend(seen));
}

const overview = {
  shown: null, // the newest figures
  draw() {
    if (!this.shown) return;
    for (const section of [head, tiles, charts, evaluations, overviewLanes, idleCauses, replicas, ledger, facts, events]) section(this.shown);
  },
  async look() {
    this.shown = await ask("/data", { run: view.run });
    this.draw();
    trouble(this.shown.about.trouble ? `The run cannot be read any further: ${this.shown.about.trouble}` : "");
  },
};
