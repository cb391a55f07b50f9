// The text of a sample, token by token, coloured by log-prob, advantage or version. Whatever it contains is shown as text.
"use strict";

const HIDDEN_LETTERS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
const COLOURINGS = { none: "plain", logprob: "log-prob", advantage: "advantage", version: "version" };

// What cannot be seen, or changes the order of what can, is written out.
const visible = (text) => text.replace(HIDDEN_LETTERS, (letter) => `\\u{${letter.codePointAt(0).toString(16)}}`);

const versionHue = (version) => (version * 67) % 360;

function tokenColour(how, passage, place, sample) {
  if (passage.origin !== "policy" || how === "none") return "";
  if (how === "version") return `hsl(${versionHue(passage.version)} 65% 55% / .38)`;
  if (how === "logprob") return `rgb(214 72 20 / ${Math.min(0.6, -passage.logprobs[place] / 6).toFixed(3)})`;
  const strength = Math.min(0.5, Math.abs(sample.advantage || 0) / 3).toFixed(3);
  return sample.advantage > 0 ? `rgb(20 150 80 / ${strength})` : `rgb(200 40 90 / ${strength})`;
}

function tokenWords(passage, place, sample) {
  const words = [`token ${place + 1} of this part`];
  if (passage.origin === "policy") {
    words.push(`version v${passage.version}`, `log-prob ${passage.logprobs[place].toFixed(3)} (p ${Math.exp(passage.logprobs[place]).toFixed(3)})`);
    if (sample.advantage !== null) words.push(`advantage ${sample.advantage}`);
  }
  return words.join("\n");
}

function passageBlock(passage, sample, how) {
  const block = element("section", `passage ${passage.origin}`), text = element("div", "text");
  const names = { prompt: "Prompt, as the policy reads it", policy: `Policy, v${passage.version}`, environment: "Environment or tool" };
  block.append(element("h3", "", `${names[passage.origin]} · ${whole(passage.pieces.length)} tokens`));
  passage.pieces.forEach((piece, place) => {
    const token = element("span", "", visible(piece)), colour = tokenColour(how, passage, place, sample);
    if (colour) token.style.background = colour;
    if (passage.origin === "policy") tips.set(token, () => tokenWords(passage, place, sample));
    text.append(token);
  });
  block.append(text);
  for (const call of passage.calls) block.append(element("p", "call", `calls a tool: ${visible(call)}`));
  return block;
}

function sampleText(sample, how) {
  const made = element("div", "passages");
  made.append(...sample.passages.map((passage) => passageBlock(passage, sample, how)));
  if (sample.hidden) made.append(element("p", "soft", `${whole(sample.hidden)} more tokens are not shown`));
  if (sample.missing) made.append(element("p", "soft", sample.missing));
  return made;
}

function failedAttempt(sample, how) {
  const { known } = sample, made = element("section", "failed-attempt");
  made.append(element("h2", "", `Attempt ${known.attempt} failed`), element("p", "alarm", visible(known.reason)));
  made.append(sampleText({ ...sample, passages: sample.passages.slice(1) }, how));
  return made;
}

function sampleFacts(sample) {
  const { known } = sample, list = element("dl", "facts");
  const versions = known.oldest === null ? "–" : known.oldest === known.newest ? `v${known.oldest}` : `v${known.oldest} to v${known.newest}`;
  const rows = [
    ["state", known.step === null ? known.state : `${known.state} in step ${known.step}`], ["reward", fixed(known.reward, 4)],
    ...Object.entries(sample.parts).map(([name, value]) => [`reward: ${visible(name)}`, String(Number(value.toPrecision(5)))]),
    ["advantage", fixed(sample.advantage, 4)], ["tokens", known.tokens === null ? "growing" : whole(known.tokens)], ["versions", versions],
    ["ended by", known.finish || (known.reason ? "failure" : "–")],
  ];
  if (known.reason) rows.push(["why it failed", visible(known.reason)]);
  for (const [name, value] of Object.entries(sample.columns)) rows.push([visible(name), visible(typeof value === "string" ? value : JSON.stringify(value))]);
  list.append(...rows.map(([name, value]) => { const pair = element("div"); pair.append(element("dt", "", name), element("dd", "", value)); return pair; }));
  return list;
}
