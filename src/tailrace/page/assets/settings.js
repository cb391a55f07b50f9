// The settings of a run, and the end of the log of each of its processes.
"use strict";

const settings = {
  name: "",
  async look(values) {
    const [found, { logs }] = await Promise.all([ask("/config", { run: view.run }), ask("/logs", { run: view.run })]);
    say("config-about", Object.entries(found.about).filter(([, value]) => value).map(([name, value]) => `${name} ${value}`).join(" · "));
    this.config = found.config;
    drawConfig();
    this.name = values.log || (logs.find(({ bytes }) => bytes) || logs[0] || { name: "" }).name;
    byId("log-names").replaceChildren(...logs.map(({ name, bytes }) => logLink(name, bytes, name === this.name)));
    if (!logs.length) return say("log-text", "this run has no logs on this machine");
    const log = await ask("/log", { run: view.run, name: this.name });
    drawLog(log);
  },
};

function drawConfig() {
  const wanted = byId("config-find").value.trim().toLowerCase(), lines = settings.config.split("\n");
  const kept = lines.filter((line) => !wanted || line.startsWith("[") || line.toLowerCase().includes(wanted));
  say("config-text", visible(kept.join("\n")));
}

function logLink(name, bytes, current) {
  const made = link(name, "settings", { log: name }, "button");
  if (current) made.setAttribute("aria-current", "true");
  made.title = `${whole(bytes)} bytes`;
  return made;
}

function drawLog(log) {
  const box = byId("log-text"), atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
  const text = visible(`${log.cut ? "… (the end of it)\n" : ""}${log.text}`);
  say("log-text", text || "nothing was logged");
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function listenToSettings() {
  byId("config-find").addEventListener("input", drawConfig);
}
