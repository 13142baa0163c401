// One run: a header with state, notes and actions; tabs; and one live stream that feeds them all.

import { get, query, runPath } from "../api.js";
import { fill, h, setText, throttle } from "../dom.js";
import { ago, duration, moment } from "../format.js";
import { ENDED } from "../palette.js";
import { MetricStore } from "../series.js";
import { empty, failed, loading } from "../states.js";
import { LiveStream } from "../stream.js";
import { LogsTab } from "./logs.js";
import { Actions, currentTries } from "./run_actions.js";
import { badge, setBadge } from "./runs.js";
import { OverviewTab } from "./run_overview.js";
import { SamplesTab } from "./samples.js";
import { JobTab } from "./job.js";

const TABS = { overview: ["Overview", OverviewTab], samples: ["Samples", SamplesTab], job: ["Job", JobTab], logs: ["Logs", LogsTab] };
const POINTS = 1500; // points per curve requested at the start
const EVENTS_KEPT = 500;
const DRAW_MS = 400;
const SLOW_MS = 3000; // between requests for the timeline and the ledger

export class RunPage {
  title = "Run";

  constructor(parts, params, onState) {
    this.id = parts[1];
    this.model = { id: this.id, view: null, metrics: new MetricStore(), evaluations: [], events: [], timeline: null, ledger: {}, window: 1 };
    this.arrived = []; // rows that arrived while the history was being fetched
    this.element = h("div", { class: "page" }, loading(90), loading(420));
    this.draw = throttle(() => this.drawNow(), DRAW_MS);
    this.slow = throttle(() => this.loadSlow(), SLOW_MS);
    this.place = [parts, params];
    this.start(onState);
  }

  close() {
    this.closed = true;
    this.draw.cancel();
    this.slow.cancel();
    clearInterval(this.clock);
    this.stream?.close();
    this.tab?.close();
  }

  async start(onState) {
    try {
      this.model.view = await get(runPath(this.id));
    } catch (error) {
      fill(this.element, h("h1", {}, this.id), failed(error, error.status === 404 ? null : () => this.start(onState)));
      if (error.status === undefined) throw error;
      return;
    }
    if (this.closed) return;
    this.build();
    this.update(...this.place);
    this.stream = new LiveStream(runPath(this.id, "/live"), this.handlers(), onState);
    this.clock = setInterval(() => this.drawHeader(), 5000);
  }

  handlers() {
    return {
      open: (resumed) => resumed || this.loadHistory(),
      metrics: ({ rows }) => this.take("metrics", rows),
      events: ({ items }) => this.take("events", items),
      evaluations: ({ items }) => this.take("evaluations", items),
      observed: ({ desired, observed, state }) => this.onView({ ...this.model.view, desired, observed, state }),
      deleted: () => this.gone(),
      gone: () => this.gone(),
    };
  }

  gone() {
    this.stream.close();
    fill(this.element, empty("This run was deleted", h("a", { href: "#/runs" }, "All runs")));
  }

  /** Load everything up to now, then add what the stream brought meanwhile. */
  async loadHistory() {
    this.loadingHistory = true;
    try {
      const [metrics, events, evaluations] = await Promise.all([
        get(runPath(this.id, `/metrics${query({ points: POINTS })}`)),
        get(runPath(this.id, `/events${query({ limit: EVENTS_KEPT, newest: true })}`)),
        get(runPath(this.id, "/evaluations")),
      ]);
      this.model.metrics.load(metrics);
      this.model.events = events.items;
      this.model.evaluations = evaluations.items;
      this.problem = null;
    } catch (error) {
      this.problem = error;
      if (error.status === undefined) throw error;
    } finally {
      this.loadingHistory = false;
      const arrived = this.arrived.splice(0);
      for (const [kind, items] of arrived) this.take(kind, items);
      this.loaded = true;
      this.draw();
      this.slow();
    }
  }

  async loadSlow() {
    if (this.closed || document.hidden) return;
    try {
      const [timeline, ledger] = await Promise.all([get(runPath(this.id, "/timeline?steps=12")), get(runPath(this.id, "/ledger"))]);
      this.model.timeline = timeline.items;
      this.model.ledger = ledger.counts;
      this.draw();
    } catch (error) {
      if (error.status === undefined) throw error; // if the API does not answer, the stream's state shows it
    }
  }

  take(kind, items) {
    if (this.loadingHistory) {
      this.arrived.push([kind, items]);
      return;
    }
    if (kind === "metrics") {
      this.model.metrics.add(items);
      this.slow();
    } else if (kind === "events") this.model.events = joined(this.model.events, items);
    else this.model.evaluations = joined(this.model.evaluations, items);
    this.draw();
  }

  onView(view) {
    if (this.model.view && view.desired.revision < this.model.view.desired.revision) return; // older than this page's change
    this.model.view = view;
    this.drawHeader();
    this.draw();
  }

  build() {
    const { record } = this.model.view;
    this.title = record.name;
    document.title = `${record.name} · Volley`;
    this.state = badge(this.model.view.state);
    this.facts = h("div", { class: "facts" });
    this.notes = h("div", { class: "notes", "aria-live": "polite" });
    this.actions = new Actions(this.id, (view) => this.onView(view));
    this.tabs = h("nav", { class: "tabs", "aria-label": "Parts of the run" });
    this.body = h("div", { class: "page" });
    const title = h("div", { class: "run-title" }, h("div", { class: "line" }, h("h1", {}, record.name), this.state), this.facts);
    fill(this.element, h("div", { class: "page-head" }, title, this.actions.element), this.notes, this.tabs, this.body);
    this.drawHeader();
  }

  /** Show the tab of the run that the address names. */
  update(parts, params) {
    this.place = [parts, params];
    if (!this.body) return;
    const name = Object.hasOwn(TABS, parts[2] ?? "") ? parts[2] : "overview";
    const base = `#/runs/${encodeURIComponent(this.id)}`;
    fill(
      this.tabs,
      Object.entries(TABS).map(([key, [label]]) => h("a", { href: key === "overview" ? base : `${base}/${key}`, "aria-current": key === name && "page" }, label)),
    );
    this.tab?.close();
    this.tab = new TABS[name][1](this.model, params);
    fill(this.body, this.tab.element);
    if (this.loaded) this.draw();
  }

  drawHeader() {
    const { record, observed, desired, state } = this.model.view;
    setBadge(this.state, state);
    this.actions.update(this.model.view);
    const tries = currentTries(this.model.view);
    const label = /^\d+$/.test(tries) ? "k =" : "weights";
    const objective = record.job.objective && `${record.job.objective.kind}${tries && `, ${label} ${tries}`}`;
    const ran = observed.started && duration((ENDED.has(state) && observed.ended ? observed.ended : Date.now() / 1000) - observed.started);
    const facts = [
      record.id,
      record.kind,
      objective,
      ran && `${ENDED.has(state) ? "ran" : "running"} for ${ran}`,
      `created ${moment(record.created)}`,
      observed.life > 1 && `driver ${observed.life}`,
      ...Object.entries(record.tags).map(([name, value]) => `${name}=${value}`),
    ].filter(Boolean);
    if (this.facts.dataset.shown !== facts.join()) {
      this.facts.dataset.shown = facts.join();
      fill(this.facts, facts.map((fact, i) => h("span", { class: i === 0 ? "mono" : "" }, fact)));
    }
    this.drawNotes(observed, desired, state);
  }

  drawNotes(observed, desired, state) {
    const notes = [];
    if (state === "lost") notes.push(["bad", "Lost", `The driver has been silent since ${ago(observed.updated)}. The supervisor starts another.`]);
    if (observed.problem) notes.push([state === "failed" ? "bad" : "warn", state === "failed" ? "Failed" : "Why", observed.problem]);
    if (unsafe(this.model.view)) notes.push(["bad", "No sandbox", "Model-written code of this run is executed without isolation."]);
    for (const words of observed.waiting) notes.push(["warn", "Waiting", words]);
    if (!ENDED.has(state) && observed.revision < desired.revision) notes.push(["", "Change", "Requested, but the run has not applied it yet."]);
    const key = JSON.stringify(notes);
    if (this.notes.dataset.shown === key) return;
    this.notes.dataset.shown = key;
    fill(this.notes, notes.map(([tone, title, text]) => h("div", { class: "banner", data: { tone } }, h("strong", {}, title), h("span", {}, text))));
  }

  drawNow() {
    if (this.closed || !this.tab) return;
    this.model.problem = this.problem;
    this.tab.draw?.(this.model, () => this.loadHistory());
  }
}

/** Whether model-written code is executed without isolation. */
function unsafe({ observed, record }) {
  return /^none\b/.test(observed.sandbox) || record.job.scorer?.sandbox?.min_tier === "none";
}

/** Merge entries of a stream without duplicates, keeping the newest `EVENTS_KEPT`. */
function joined(old, added) {
  const known = new Set(old.map(({ id }) => id));
  return [...old, ...added.filter(({ id }) => id === undefined || !known.has(id))].slice(-EVENTS_KEPT);
}
