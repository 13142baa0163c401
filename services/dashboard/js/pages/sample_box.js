// One sample in full, and the difference of two samples.

import { difference } from "../diff.js";
import { h } from "../dom.js";
import { count, duration, number, words } from "../format.js";
import { verdictColor } from "../palette.js";

/** `place`: number of the sample in its group, from 1. `compare`: called when the user chooses it for a comparison. */
export function sampleBox(sample, place, chosen, compare) {
  const fact = (label, value) => h("span", {}, `${label} `, h("b", {}, value));
  const sign = sample.advantage > 0 ? "+" : "";
  const label = `Compare sample ${place}`;
  return h(
    "article",
    { class: "sample", data: { status: sample.status, place } },
    h(
      "div",
      { class: "facts" },
      h("span", { class: "num" }, `#${place}`),
      h("span", { class: "verdict" }, h("span", { class: "swatch", style: { background: `var(--${verdictColor(sample.status)})` } }), words(sample.status)),
      fact("reward", number(sample.reward)),
      fact("advantage", sample.advantage === undefined ? "–" : `${sign}${number(sample.advantage)}`),
      fact("tokens", number(sample.tokens)),
      h("span", {}, versionText(sample)),
      sample.stopped === false && h("span", { class: "tag" }, "truncated at the length limit"),
      h("button", { class: "button small end", type: "button", "aria-label": label, "aria-pressed": String(chosen), onclick: compare }, "Compare"),
    ),
    sample.earlier && h("details", {}, h("summary", {}, "earlier turns"), h("pre", { class: "sample-text" }, sample.earlier)),
    sample.calls?.length > 0 && callList(sample.calls),
    h("pre", { class: "sample-text" }, sample.sample),
    sample.detail && h("p", { class: "failing" }, sample.detail),
  );
}

/** The difference of two samples of a group, by their places; a hint if only one is chosen. */
export function comparison(samples, places, close) {
  if (places.length < 2) return h("p", { class: "soft small card-body", role: "status" }, `Sample ${places[0]} is chosen: choose another to see where they differ.`);
  const [before, after] = places.map((place) => samples[place - 1]);
  const tags = { same: "span", removed: "del", added: "ins" };
  const parts = difference(before.sample, after.sample).map(([kind, text]) => h(tags[kind], {}, text));
  const title = `Sample ${places[0]} against sample ${places[1]}`;
  const said = h("p", { class: "soft small" }, "Struck out: only in ", h("b", {}, `#${places[0]}`), `, ${words(before.status).toLowerCase()}. Underlined: only in `, h("b", {}, `#${places[1]}`), `, ${words(after.status).toLowerCase()}.`);
  return h(
    "section",
    { class: "difference card-body", "aria-label": title, tabindex: "-1" },
    h("div", { class: "line" }, h("h3", {}, title), h("button", { class: "button small", type: "button", onclick: close }, "Close comparison")),
    said,
    before.sample === after.sample ? h("p", {}, "The texts are equal.") : h("pre", { class: "sample-text" }, parts),
  );
}

/** The calls of an episode: what each put behind the text before it, and what the model answered. */
function callList(calls) {
  const parts = calls.map(({ context, answer, observed, tokens, seconds }, i) =>
    h(
      "li",
      {},
      h("p", { class: "soft small num" }, `call ${i + 1}: ${count(observed)} tokens of context, ${count(tokens)} sampled in ${duration(seconds)}`),
      h("pre", { class: "sample-text soft" }, context),
      h("pre", { class: "sample-text" }, answer),
    ),
  );
  const label = calls.length === 1 ? "1 call" : `${calls.length} calls`;
  return h("details", { class: "calls" }, h("summary", {}, label), h("ol", {}, parts));
}

/** "version 7", or for a sample during which the weights were updated "version 7, then 8 from token 31". */
function versionText({ versions, version_starts: starts }) {
  if (!versions?.length) return "";
  const later = versions.slice(1).map((version, i) => (starts ? `, then ${version} from token ${starts[i + 1]}` : `, then ${version}`));
  return `version ${versions[0]}${later.join("")}`;
}
