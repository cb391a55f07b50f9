// Where answers come from: the page's server, or what a report in one file has embedded.
"use strict";

const answers = embedded(); // of a report: address and query -> answer
const tags = new Map(); // address -> [tag, answer], so that what has not changed is not sent again
const KEPT_ANSWERS = 40;

function query(values) {
  const pairs = Object.entries(values || {}).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return new URLSearchParams(pairs).toString();
}

async function ask(address, values) {
  const text = query(values), target = text ? `${address}?${text}` : address;
  if (answers) return embeddedAnswer(address, target, values?.run || 0);
  const known = tags.get(target);
  const answer = await fetch(target, { cache: "no-store", headers: known ? { "If-None-Match": known[0] } : {} });
  if (answer.status === 401) { location.reload(); throw new Error("the token is asked for again"); }
  if (answer.status === 304) return known[1];
  if (!answer.ok) throw new Refusal(answer.status, (await answer.text()).trim());
  const data = await answer.json();
  keep(target, answer.headers.get("ETag") || "", data);
  return data;
}

class Refusal extends Error {
  // The server has answered that it cannot, and why.
  constructor(status, text) { super(text); this.status = status; }
}

function keep(target, tag, data) {
  tags.delete(target);
  tags.set(target, [tag, data]);
  if (tags.size > KEPT_ANSWERS) tags.delete(tags.keys().next().value);
}

function embeddedAnswer(address, target, run) {
  const found = answers[target] ?? (run ? undefined : answers[address]); // of the others it has the curves alone
  if (found === undefined) throw new Refusal(404, "this is not part of the report; open the run with tailrace page");
  return found;
}

// ---------------------------------------------------------------------------------------------------------- hash state

function readHash() {
  const [name, rest] = location.hash.slice(1).split("?");
  return { name: name || "overview", values: Object.fromEntries(new URLSearchParams(rest || "")) };
}

// The run is part of every link, so that whoever follows it sees the same.
const linkTo = (name, values) => { const text = query({ ...values, run: values?.run ?? (view.run || "") }); return `#${name}${text ? `?${text}` : ""}`; };
// Rows that are drawn anew while a run goes on: the link or box that has the focus keeps it.
function refill(list, rows) {
  const held = list.contains(document.activeElement) ? document.activeElement : null;
  list.replaceChildren(...rows);
  const same = held && [...list.querySelectorAll(held.tagName)].find((each) => each.href === held.href && each.value === held.value);
  if (same) same.focus({ preventScroll: true });
}

const go = (name, values) => { location.hash = linkTo(name, values); };

function link(text, name, values, kind) {
  const made = element("a", kind || "", text);
  made.href = linkTo(name, values);
  return made;
}
