// Browses the samples: prompts with the verdicts of their samples, and one group in full.
// Only visible rows are in the document; another page of samples is fetched when the end is near.

import { get, query, runPath } from "../api.js";
import { fill, h, setText, throttle } from "../dom.js";
import { count, duration, number, words } from "../format.js";
import { STATUSES, verdictColor } from "../palette.js";
import { empty, failed } from "../states.js";

const LIMIT = 200; // samples per request
const ROW = 74; // px, as in pages.css
const AHEAD = 8; // rows drawn above and below the visible ones
const CELLS = 32; // verdicts shown next to a prompt

export class SamplesTab {
  constructor(model, params) {
    this.id = model.id;
    this.makeFilters(params);
    this.room = h("div", { class: "room" });
    this.list = h("div", { class: "virtual", role: "listbox", "aria-label": "Prompts" }, this.room);
    this.list.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.total = h("span", { class: "soft" });
    this.message = h("div", {});
    this.detail = h("section", { class: "card detail", "aria-label": "Samples of the prompt", tabindex: "-1" });
    const left = h("section", { class: "card" }, h("header", {}, h("h3", {}, "Prompts"), this.total), this.message, this.list);
    this.element = h("div", { class: "page" }, this.filters, h("div", { class: "samples" }, left, this.detail));
    this.rows = new Map(); // index -> element of the visible rows
    this.sizes = new ResizeObserver(() => this.render());
    this.sizes.observe(this.list);
    this.restart();
  }

  close() {
    this.closed = true;
    this.ask.cancel();
    this.abort.abort();
    this.sizes.disconnect();
  }

  makeFilters(params) {
    const field = (name, label, type) => h("input", { type, name, step: "any", placeholder: label, "aria-label": label, value: params.get(name) ?? "" });
    const status = h("select", { name: "status", "aria-label": "Verdict" }, h("option", { value: "" }, "Any verdict"), STATUSES.map((each) => h("option", { value: each }, words(each))));
    status.value = params.get("status") ?? "";
    this.fields = [status, field("step", "Step", "number"), field("group", "Group", "number"), field("prompt_id", "Prompt id", "text"), field("min_reward", "Min. reward", "number")];
    this.ask = throttle(() => this.restart(), 300);
    for (const each of this.fields) each.addEventListener("input", () => this.ask());
    this.filters = h("form", { class: "filters", "aria-label": "Filters" }, this.fields);
    this.filters.addEventListener("submit", (event) => event.preventDefault());
  }

  restart() {
    this.abort?.abort();
    this.abort = new AbortController();
    this.groups = [];
    this.places = new Map(); // step and group -> index in the list
    this.samples = 0;
    this.cursor = "";
    this.busy = false;
    this.chosen = null;
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    fill(this.message);
    setText(this.total, "loading…");
    fill(this.detail, empty("No prompt selected", "Select one to read its samples."));
    this.load();
  }

  async load() {
    if (this.busy || this.cursor === null) return;
    this.busy = true;
    const { signal } = this.abort;
    try {
      const wanted = Object.fromEntries(this.fields.map(({ name, value }) => [name, value.trim()]));
      const page = await get(runPath(this.id, `/samples${query({ ...wanted, limit: LIMIT, cursor: this.cursor })}`), { signal });
      if (signal.aborted) return;
      this.cursor = page.next;
      for (const row of page.items) this.add(row);
      this.busy = false;
      this.loaded();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.busy = false;
      this.cursor = null;
      fill(this.message, failed(error, () => this.restart()));
      if (error.status === undefined) throw error;
    }
  }

  /** Add a sample without its tokens and log-probs, which would fill the memory and are not shown. */
  add({ token_ids: ids, logprobs, ...row }) {
    const key = `${row.step} ${row.group}`;
    if (!this.places.has(key)) {
      this.places.set(key, this.groups.length);
      this.groups.push({ step: row.step, group: row.group, prompt: row.prompt, promptId: row.prompt_id, samples: [] });
    }
    const group = this.groups[this.places.get(key)];
    group.samples.push(row);
    group.stale = true;
    this.samples += 1;
  }

  loaded() {
    const more = this.cursor === null ? "" : "+";
    setText(this.total, this.samples ? `${count(this.groups.length)}${more} groups, ${count(this.samples)}${more} samples` : "");
    if (this.samples === 0) {
      const filtered = this.fields.some(({ value }) => value);
      fill(this.message, empty(filtered ? "No matching samples" : "No samples yet", filtered ? "Change the filters above." : "A run writes an excerpt every tenth step."));
    }
    this.list.classList.toggle("hidden", this.samples === 0);
    this.room.style.height = `${this.groups.length * ROW}px`;
    if (this.chosen === null && this.groups.length) this.choose(0, false);
    else if (this.groups[this.chosen]?.stale) this.showGroup();
    this.render();
    this.scrolled();
  }

  scrolled() {
    this.render();
    const { scrollTop, clientHeight } = this.list;
    if (scrollTop + 3 * clientHeight > this.groups.length * ROW) this.load();
  }

  render() {
    const { scrollTop, clientHeight } = this.list;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - AHEAD);
    const last = Math.min(this.groups.length, Math.ceil((scrollTop + clientHeight) / ROW) + AHEAD);
    for (const [index, row] of this.rows) {
      if (index >= first && index < last && !this.groups[index].stale) continue;
      row.remove();
      this.rows.delete(index);
    }
    for (let index = first; index < last; index += 1) {
      if (this.rows.has(index)) continue;
      const row = this.groupRow(index);
      this.rows.set(index, row);
      this.room.append(row);
    }
  }

  groupRow(index) {
    const group = this.groups[index];
    group.stale = false;
    const passed = group.samples.filter(({ status }) => status === "passed").length;
    const chosen = index === this.chosen;
    return h(
      "button",
      {
        class: "group-row",
        type: "button",
        role: "option",
        tabindex: chosen ? "0" : "-1",
        "aria-selected": String(chosen),
        style: { top: `${index * ROW}px` },
        onclick: () => this.choose(index, true),
      },
      h("div", { class: "clip mono" }, group.prompt.slice(0, 200)),
      h("div", { class: "cells", "aria-hidden": "true" }, group.samples.slice(0, CELLS).map(({ status }) => h("span", { style: { background: `var(--${verdictColor(status)})` } }))),
      h("div", { class: "line num" }, h("span", {}, `step ${group.step}, group ${group.group}`), h("span", {}, `${passed} of ${group.samples.length} passed`)),
    );
  }

  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 }[event.key];
    if (by === undefined || this.chosen === null) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(this.groups.length - 1, this.chosen + by));
    const top = index * ROW;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    else if (top + ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW - this.list.clientHeight;
    this.choose(index, false);
    this.rows.get(index)?.focus();
  }

  choose(index, byHand) {
    const before = this.chosen;
    this.chosen = index;
    for (const each of [before, index]) {
      this.rows.get(each)?.remove();
      this.rows.delete(each);
    }
    this.render();
    this.showGroup();
    this.detail.scrollTop = 0;
    if (byHand) this.rows.get(index)?.focus({ preventScroll: true });
    if (byHand && matchMedia("(max-width: 860px)").matches) this.detail.scrollIntoView({ block: "start" });
  }

  showGroup() {
    const group = this.groups[this.chosen];
    const samples = group.samples.toSorted((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    fill(
      this.detail,
      h("header", {}, h("h3", {}, group.promptId), h("span", { class: "soft end num" }, `step ${group.step}, group ${group.group}, ${samples.length} samples`)),
      h("div", { class: "card-body" }, h("pre", { class: "prompt-text", tabindex: "0", "aria-label": "Prompt" }, group.prompt)),
      h("div", {}, samples.map(sampleBox)),
    );
  }
}

function sampleBox(sample) {
  const fact = (label, value) => h("span", {}, `${label} `, h("b", {}, value));
  const sign = sample.advantage > 0 ? "+" : "";
  return h(
    "article",
    { class: "sample", data: { status: sample.status } },
    h(
      "div",
      { class: "facts" },
      h("span", { class: "verdict" }, h("span", { class: "swatch", style: { background: `var(--${verdictColor(sample.status)})` } }), words(sample.status)),
      fact("reward", number(sample.reward)),
      fact("advantage", sample.advantage === undefined ? "–" : `${sign}${number(sample.advantage)}`),
      fact("tokens", number(sample.tokens)),
      h("span", {}, versionText(sample)),
      sample.stopped === false && h("span", { class: "tag" }, "truncated at the length limit"),
    ),
    sample.earlier && h("details", {}, h("summary", {}, "earlier turns"), h("pre", { class: "sample-text" }, sample.earlier)),
    sample.calls?.length > 0 && callList(sample.calls),
    h("pre", { class: "sample-text" }, sample.sample),
    sample.detail && h("p", { class: "failing" }, sample.detail),
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
