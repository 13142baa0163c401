// Browses the samples: prompts with the verdicts of their samples, and one group in full.
// Only visible rows are in the document; another page of samples is fetched when the end is near.

import { remember, runAddress } from "../address.js";
import { get, query, runPath } from "../api.js";
import { fill, h, setText, throttle } from "../dom.js";
import { count, words } from "../format.js";
import { STATUSES, verdictColor } from "../palette.js";
import { empty, failed } from "../states.js";
import { comparison, sampleBox } from "./sample_box.js";

const LIMIT = 200; // samples per request
const ROW = 74; // px, as in pages.css
const AHEAD = 8; // rows drawn above and below the visible ones
const CELLS = 32; // verdicts shown next to a prompt

export class SamplesTab {
  constructor(model, params) {
    this.id = model.id;
    this.wantedGroup = params.get("open"); // step and group, as in "390.12481", of a link
    this.wantedPair = /^\d+\.\d+$/.test(params.get("compare") ?? "") ? params.get("compare").split(".").map(Number) : [];
    this.makeFilters(params);
    this.room = h("div", { class: "room" });
    this.list = h("div", { class: "virtual", role: "listbox", "aria-label": "Prompts" }, this.room);
    this.list.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.total = h("span", { class: "soft" });
    this.message = h("div", {});
    this.detail = h("section", { class: "card detail", "aria-label": "Samples of the prompt", tabindex: "-1" });
    const left = h("section", { class: "card" }, h("header", {}, h("h2", {}, "Prompts"), this.total), this.message, this.list);
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
    this.ask = throttle(() => {
      this.restart();
      this.remember();
    }, 300);
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
    this.pair = []; // places of the samples to compare, in the order of choice
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    fill(this.message);
    setText(this.total, "loading…");
    fill(this.detail, empty("No prompt selected", "Select one to read its samples."));
    this.load();
  }

  filtered() {
    return Object.fromEntries(this.fields.map(({ name, value }) => [name, value.trim()]));
  }

  /** Keep the filters, the group that was opened and the samples that are compared in the address. */
  remember() {
    const group = this.opened && this.groups[this.chosen];
    const shown = { open: group ? `${group.step}.${group.group}` : "", compare: this.pair.length === 2 ? this.pair.join(".") : "" };
    remember(runAddress(this.id, "samples"), { ...this.filtered(), ...shown });
  }

  async load() {
    if (this.busy || this.cursor === null) return;
    this.busy = true;
    const { signal } = this.abort;
    try {
      const page = await get(runPath(this.id, `/samples${query({ ...this.filtered(), limit: LIMIT, cursor: this.cursor })}`), { signal });
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
    if (this.wantedGroup && this.groups.length) this.openWanted();
    if (this.chosen === null && this.groups.length) this.choose(0, false);
    else if (this.groups[this.chosen]?.stale) this.showGroup();
    this.render();
    this.scrolled();
  }

  /** Open the group that the address names. If it is not on the first page, the list shows this group only. */
  openWanted() {
    const [step, group] = this.wantedGroup.split(".");
    const index = this.places.get(`${step} ${group}`);
    this.wantedGroup = index === undefined ? this.wantedGroup : null;
    if (index !== undefined) {
      this.opened = true;
      this.list.scrollTop = index * ROW;
      this.choose(index, false);
      this.compare(this.wantedPair);
      return;
    }
    const fields = new Map(this.fields.map((each) => [each.name, each]));
    if (fields.get("group").value || !/^\d+$/.test(step) || !/^\d+$/.test(group)) {
      this.wantedGroup = null;
      return;
    }
    fields.get("step").value = step;
    fields.get("group").value = group;
    this.restart();
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
        onclick: () => {
          this.opened = true;
          this.choose(index, true);
          this.remember();
        },
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
    this.opened = true;
    this.choose(index, false);
    this.remember();
    this.rows.get(index)?.focus();
  }

  choose(index, byHand) {
    const before = this.chosen;
    this.chosen = index;
    if (before !== index) this.pair = [];
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
      h("header", {}, h("h2", {}, group.promptId), h("span", { class: "soft end num" }, `step ${group.step}, group ${group.group}, ${samples.length} samples`)),
      h("div", { class: "card-body" }, h("pre", { class: "prompt-text", tabindex: "0", "aria-label": "Prompt" }, group.prompt)),
      this.pair.length > 0 && comparison(samples, this.pair, () => this.closeComparison()),
      h("div", {}, samples.map((sample, i) => sampleBox(sample, i + 1, this.pair.includes(i + 1), () => this.toggle(i + 1)))),
    );
  }

  /** Choose a sample for the comparison, or no longer; of three, the one chosen first is dropped. */
  toggle(place) {
    const kept = this.pair.filter((each) => each !== place);
    this.compare(kept.length < this.pair.length ? kept : [...kept, place].slice(-2));
    if (this.pair.length < 2) this.focusSample(place);
  }

  closeComparison() {
    const place = this.pair.at(-1);
    this.compare([]);
    this.focusSample(place);
  }

  focusSample(place) {
    this.detail.querySelector(`[data-place="${place}"] button`).focus();
  }

  /** Show where the samples at these places of the open group differ. */
  compare(places) {
    const { length } = this.groups[this.chosen].samples;
    this.pair = places.every((place) => 1 <= place && place <= length) ? places : [];
    this.opened = true;
    this.showGroup();
    this.remember();
    const shown = this.detail.querySelector(".difference");
    shown?.focus({ preventScroll: true });
    shown?.scrollIntoView({ block: "nearest" });
  }
}
