// The list of runs: state, progress, newest rewards; filters that the server applies, and a selection to compare.

import { remember } from "../address.js";
import { get, query } from "../api.js";
import { Spark } from "../charts/spark.js";
import { KeyedList, fill, h, setText, throttle } from "../dom.js";
import { ago, count, words } from "../format.js";
import { tone } from "../palette.js";
import { empty, failed, loading } from "../states.js";
import { LiveStream } from "../stream.js";

const STATES = ["queued", "pending", "starting", "running", "paused", "stopping", "stopped", "done", "failed", "lost"];
const KINDS = ["rl", "sft", "rft", "eval"];
const PAGE = 50;
const LIVE_FULL = 200; // most runs in the live list
const LIVE_STATES = new Set(["running", "starting", "stopping"]);

export function badge(state) {
  return h("span", { class: "badge", data: { tone: tone(state), live: LIVE_STATES.has(state) } }, state);
}

export function setBadge(element, state) {
  element.dataset.tone = tone(state);
  element.dataset.live = LIVE_STATES.has(state);
  setText(element, state);
}

/** A tag; that of a sweep leads to the comparison of its groups. */
function tag(name, value) {
  const text = `${name}=${value}`;
  return name === "sweep" ? h("a", { class: "tag", href: `#/groups${query({ tag: text })}` }, text) : h("span", { class: "tag" }, text);
}

class RunRow {
  constructor(run, page) {
    this.pick = h("input", { type: "checkbox", "aria-label": `Select ${run.name} to compare` });
    this.pick.checked = page.picked.has(run.id);
    this.pick.addEventListener("change", () => page.choose(run.id, this.pick.checked));
    this.state = badge(run.state);
    this.objective = h("span", { class: "objective soft clip" });
    this.steps = h("span", { class: "num small soft" });
    this.bar = h("span");
    this.barBox = h("div", { class: "bar", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "Steps done" }, this.bar);
    this.spark = new Spark();
    this.when = h("time", { class: "when small faint num" });
    this.sub = h("div", { class: "sub" });
    const link = h("a", { href: `#/runs/${encodeURIComponent(run.id)}` }, run.name);
    this.element = h(
      "li",
      { class: "run-row", data: { run: run.id } },
      this.pick,
      h("div", {}, h("div", { class: "name" }, link), this.sub),
      h("div", {}, this.state),
      this.objective,
      h("div", { class: "progress" }, this.barBox, this.steps),
      this.spark.element,
      this.when,
    );
  }

  update(run) {
    setBadge(this.state, run.state);
    setText(this.objective, run.objective || run.kind);
    this.objective.title = run.objective ?? "";
    const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
    this.bar.style.width = `${100 * share}%`;
    this.barBox.dataset.tone = { done: "good", failed: "bad", lost: "bad", paused: "warn" }[run.state] ?? "";
    this.barBox.setAttribute("aria-valuenow", Math.round(100 * share));
    setText(this.steps, run.steps ? `${count(run.step)} of ${count(run.steps)} steps` : `${count(run.step)} steps`);
    setText(this.when, ago(run.updated || run.created));
    this.updateSub(run);
    this.last = run;
    if (this.element.isConnected) this.drawSpark();
  }

  updateSub(run) {
    const key = JSON.stringify([run.problem, run.tags, run.state]);
    if (key === this.subKey) return;
    this.subKey = key;
    const tags = Object.entries(run.tags ?? {}).slice(0, 3);
    fill(
      this.sub,
      h("span", { class: run.problem ? "problem" : "mono", data: { tone: tone(run.state) } }, run.problem || run.id),
      tags.map(([name, value]) => tag(name, value)),
    );
    this.sub.title = run.problem ?? "";
  }

  drawSpark() {
    this.spark.draw(this.last.spark ?? [], this.last.state === "failed" ? "faint" : "accent");
  }
}

export class RunsPage {
  title = "Runs";

  constructor(parts, params, onState) {
    this.runs = new Map();
    this.picked = new Set();
    this.next = null;
    this.makeFilters(params);
    this.list = h("ul", { "aria-label": "Runs" });
    this.rows = new KeyedList(this.list, (run) => new RunRow(run, this));
    this.message = h("div", {}, loading(320));
    this.moreButton = h("button", { class: "button", type: "button", onclick: () => this.load(true) }, "Show more");
    this.more = h("div", { class: "more hidden" }, this.moreButton);
    this.compare = h("a", { class: "button primary hidden", href: "#/compare" }, "Compare");
    this.heads = h(
      "div",
      { class: "run-heads", "aria-hidden": "true" },
      ["", "Run", "State"].map((each) => h("span", {}, each)),
      h("span", { class: "objective" }, "Objective"),
      ["Progress", "Reward"].map((each) => h("span", {}, each)),
      h("span", { class: "when" }, "Updated"),
    );
    this.element = h(
      "div",
      { class: "page" },
      h("div", { class: "page-head" }, h("h1", {}, "Runs"), h("div", { class: "end" }, this.compare)),
      this.filters,
      h("div", { class: "card" }, this.heads, this.list, this.message, this.more),
    );
    this.repaint = () => this.drawSparks();
    addEventListener("volley-theme", this.repaint);
    addEventListener("resize", this.repaint);
    this.clock = setInterval(() => this.render(), 10_000);
    this.load(false);
    this.stream = new LiveStream("v1/live", { runs: ({ items }) => this.live(items) }, onState);
  }

  close() {
    clearInterval(this.clock);
    this.ask.cancel();
    this.stream.close();
    removeEventListener("volley-theme", this.repaint);
    removeEventListener("resize", this.repaint);
  }

  makeFilters(params) {
    const choice = (label, values) =>
      h("select", { "aria-label": label }, h("option", { value: "" }, label), values.map((each) => h("option", { value: each }, words(each))));
    this.search = h("input", { type: "search", placeholder: "Search by name", "aria-label": "Search by name", maxlength: 64, value: params.get("name") ?? "" });
    this.state = choice("Any state", STATES);
    this.kind = choice("Any kind", KINDS);
    this.tag = h("input", { type: "text", placeholder: "tag=value", "aria-label": "Tag", size: 12, value: params.get("tag") ?? "" });
    this.state.value = params.get("state") ?? "";
    this.kind.value = params.get("kind") ?? "";
    this.ask = throttle(() => this.load(false), 250);
    for (const each of [this.search, this.state, this.kind, this.tag]) each.addEventListener("input", () => this.changed());
    this.filters = h("form", { class: "filters", role: "search" }, this.search, this.state, this.kind, this.tag);
    this.filters.addEventListener("submit", (event) => event.preventDefault());
  }

  wanted() {
    const tag = this.tag.value.trim();
    return { name: this.search.value.trim(), state: this.state.value, kind: this.kind.value, tag: tag.includes("=") ? tag : "" };
  }

  changed() {
    remember("runs", this.wanted());
    this.ask();
  }

  async load(further) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.moreButton.disabled = true;
    try {
      const answer = await get(`v1/runs${query({ ...this.wanted(), limit: PAGE, cursor: further ? this.next : "" })}`);
      if (turn !== this.turn) return;
      if (!further) this.runs.clear();
      for (const run of answer.items) this.runs.set(run.id, run);
      this.next = answer.next;
      this.loaded = true;
      this.render();
    } catch (error) {
      if (turn === this.turn) fill(this.message, failed(error, () => this.load(further)));
      if (error.status === undefined) throw error;
    } finally {
      this.moreButton.disabled = false;
    }
  }

  live(items) {
    if (!this.loaded) return;
    const shown = new Set(items.map(({ id }) => id));
    // A list that is not full contains all runs, so a missing run was deleted.
    if (items.length < LIVE_FULL) for (const id of this.runs.keys()) if (!shown.has(id)) this.runs.delete(id);
    for (const run of items) {
      if (this.matches(run)) this.runs.set(run.id, run);
      else this.runs.delete(run.id);
    }
    this.render();
  }

  matches(run) {
    const { name, state, kind, tag } = this.wanted();
    const [key, ...rest] = tag.split("=");
    if (name && !run.name.toLowerCase().includes(name.toLowerCase())) return false;
    if ((state && run.state !== state) || (kind && run.kind !== kind)) return false;
    if (tag && run.tags?.[key] !== rest.join("=")) return false;
    const oldest = Math.min(...[...this.runs.values()].map((each) => each.created));
    return this.runs.has(run.id) || this.next === null || run.created >= oldest; // older ones are on further pages
  }

  render() {
    if (!this.loaded) return;
    const runs = [...this.runs.values()].sort((a, b) => b.created - a.created);
    this.rows.update(runs, (run) => run.id);
    this.drawSparks();
    this.more.classList.toggle("hidden", !this.next);
    this.heads.classList.toggle("hidden", runs.length === 0);
    if (runs.length) fill(this.message);
    else if (Object.values(this.wanted()).some(Boolean)) fill(this.message, empty("No matching runs", "Change the filters above."));
    else fill(this.message, empty("No runs yet", h("span", {}, "Start one with ", h("code", {}, "volley submit JOB.yaml"))));
  }

  drawSparks() {
    for (const row of this.rows.rows.values()) row.drawSpark();
  }

  choose(id, on) {
    if (on) this.picked.add(id);
    else this.picked.delete(id);
    this.compare.classList.toggle("hidden", this.picked.size < 2);
    setText(this.compare, `Compare ${this.picked.size} runs`);
    this.compare.href = `#/compare${query({ runs: [...this.picked].join() })}`;
  }
}
