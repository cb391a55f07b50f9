// The page of a run: asks /data again and again and draws what comes; or draws once what a report has embedded.
"use strict";

const LOOK_MS = 1000, HIDDEN_MS = 5000, SLOWEST_MS = 10000;
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
  const { run, about } = data, { before, after } = about.accuracy, mean = about.mean_reward;
  say("reward", fixed(run.mean_reward, 3));
  say("reward-more", run.reward === null ? "no step yet" : `10-step mean; last step ${fixed(run.reward, 3)}`);
  const change = (from, to) => `${fixed(from, 2)} → ${to === null ? "…" : fixed(to, 2)}`;
  say("accuracy", before === null && after === null ? "–" : change(before, after));
  const rewards = mean.before === null && mean.after === null ? "" : `, mean reward ${change(mean.before, mean.after)}`;
  say("accuracy-more", before === null ? "not measured" : `share of rewards above ${about.right_above}${rewards}`);
  say("rate", whole(run.tokens_per_s));
  say("rate-more", `10-step mean; ${short(run.trained_tokens)} in all`);
  say("staleness", fixed(run.staleness.mean, 2));
  say("staleness-more", `p95 ${run.staleness.p95}, max ${run.staleness.max} of ${data.max_staleness}`);
  say("version", run.version < 0 ? "–" : `v${run.version}`);
  const held = run.replicas.map((replica) => replica.version), oldest = Math.min(...held);
  say("version-more", !held.length || oldest < 0 ? "no replica has loaded one" : `replicas: v${oldest} to v${Math.max(...held)}`);
  say("idle", percent(run.rollout_idle));
  const scoring = run.rollout_shares.scoring || 0;
  say("idle-more", `replicas${scoring >= 0.005 ? ` (scoring ${percent(scoring)})` : ""}; trainer ${percent(run.trainer_idle)}`);
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
  const { columns, points, seconds } = shown.charts, box = svg.getBoundingClientRect();
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

function timeline(data) {
  const { lanes, seconds } = data.charts, seen = new Set();
  const tall = lanes.length > 24 ? 9 : lanes.length > 10 ? 14 : 20, gap = lanes.length > 24 ? 1 : 3;
  drawLanes(byId("timeline"), lanes, seconds, { tall, gap, seen });
  byId("legend").replaceChildren(...legend(seen));
}

// ------------------------------------------------------------------------------------------------------------ looking

let shown = null; // the newest data

function draw() {
  if (!shown) return;
  for (const section of [head, tiles, charts, timeline, replicas, ledger, facts, events]) section(shown);
}

function trouble(text) {
  say("trouble", text);
  byId("trouble").hidden = !text;
}

let tag = "", wait = LOOK_MS, timer = 0;

async function ask() {
  const answer = await fetch("/data", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
  if (answer.status === 401) return location.reload(); // the form is there
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(`the page answered ${answer.status}`);
  const data = await answer.json();
  tag = answer.headers.get("ETag") || "";
  shown = data;
}

async function look() {
  clearTimeout(timer);
  try {
    await ask();
    draw();
    trouble(shown && shown.about.trouble ? `The run cannot be read any further: ${shown.about.trouble}` : "");
    wait = LOOK_MS;
  } catch (error) {
    trouble(`No answer from the page (${error.message}); these are the last figures it gave.`);
    wait = Math.min(2 * wait, SLOWEST_MS);
  }
  timer = setTimeout(look, document.hidden ? HIDDEN_MS : wait);
}

redrawOnResize(draw);
shown = embedded();
if (shown) {
  draw();
} else {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  look();
}
