// Panels next to the charts: key numbers, workers, events and the ledger.

import { KeyedList, fill, h, scrolling, setText } from "../dom.js";
import { clock, count, duration, moment, number, percent, plain, words } from "../format.js";
import { ENDED } from "../palette.js";

const RECENT = 10; // steps in the mean that a tile shows
const EVENTS_SHOWN = 200;

function tile(label) {
  const value = h("div", { class: "value" }, "–");
  const sub = h("div", { class: "sub" });
  return { element: h("div", { class: "tile" }, h("div", { class: "label" }, label), value, sub), value, sub };
}

export class Tiles {
  constructor(kind) {
    const all = { step: tile("Step"), ...(kind === "sft" || kind === "rft" ? { loss: tile("Loss") } : {}) };
    if (kind === "rl") {
      Object.assign(all, { low: tile("pass@1"), high: tile("pass@n"), reward: tile("Reward"), kl: tile("KL to the initial model"), live: tile("Live groups"), speed: tile("Samples per second") });
    }
    this.all = all;
    this.bar = h("span");
    all.step.element.append(h("div", { class: "bar" }, this.bar));
    this.element = h("div", { class: "tiles" }, Object.values(all).map(({ element }) => element));
  }

  draw({ view, metrics }) {
    const { step, low, high, reward, kl, live, speed, loss } = this.all;
    const { observed, state } = view;
    setText(step.value, count(observed.step));
    const left = (observed.steps - observed.step) * (metrics.recent("seconds_step", RECENT) ?? NaN);
    const rest = ENDED.has(state) || !Number.isFinite(left) ? "" : `, ${duration(left)} left`;
    setText(step.sub, observed.steps ? `of ${count(observed.steps)}${rest}` : "");
    this.bar.style.width = `${observed.steps ? Math.min(100, (100 * observed.step) / observed.steps) : 0}%`;
    const put = (box, name, format, unit) => {
      if (!box) return;
      const value = metrics.recent(name, RECENT);
      setText(box.value, value === null ? "–" : format(value));
      setText(box.sub, value === null ? "" : unit);
    };
    const ks = metrics.family(/^pass_at_(\d+)$/);
    put(low, "pass_at_1", share, `mean of ${RECENT} steps`);
    if (high && ks.length) {
      setText(high.element.firstChild, `pass@${ks.at(-1).number}`);
      put(high, ks.at(-1).name, share, `mean of ${RECENT} steps`);
    }
    put(reward, "reward_mean", number, `mean of ${RECENT} steps`);
    put(kl, "kl_k1", number, "nats per token");
    put(live, "live_group_fraction", percent, "with a learning signal");
    put(speed, "samples_per_second", count, `${count(metrics.recent("tokens_per_second", RECENT))} tokens/s`);
    put(loss, "loss", number, "nats per token");
  }
}

const share = (value) => value.toFixed(3);

const ROLES = { actor: "Actor", reward_worker: "Reward worker", environment_worker: "Environment worker", learner_rank: "Learner rank" };
const WORKER_TONES = { serving: "good", starting: "busy", draining: "warn" };

export class Workers {
  constructor() {
    this.body = h("tbody");
    this.rows = new KeyedList(this.body, () => workerRow());
    this.note = h("span", { class: "soft" });
    this.none = h("p", { class: "soft small card-body" }, "This run has no live processes.");
    const heads = [["Process"], ["State"], ["Version", "right"], ["Busy", "right"], ["Process id", "right"]];
    this.table = h("table", {}, h("thead", {}, h("tr", {}, heads.map(([label, side]) => h("th", { scope: "col", class: side }, label)))), this.body);
    this.element = h("section", { class: "card" }, h("header", {}, h("h2", {}, "Workers"), this.note), scrolling("Table of workers", { class: "workers" }, this.none, this.table));
  }

  draw({ view }) {
    const { workers, groups } = view.observed;
    this.rows.update(workers, (worker) => worker.name);
    this.none.hidden = workers.length > 0;
    this.table.hidden = workers.length === 0;
    const { generating = 0, scoring = 0, ready = 0 } = groups;
    setText(this.note, workers.length ? `${generating} groups generating, ${scoring} scoring, ${ready} ready` : "");
  }
}

function workerRow() {
  const name = h("td", {});
  const state = h("span", { class: "badge" });
  const [version, busy, pid] = [0, 1, 2].map(() => h("td", { class: "right num" }));
  return {
    element: h("tr", {}, name, h("td", {}, state), version, busy, pid),
    update(worker) {
      setText(name, worker.name);
      name.title = ROLES[worker.role] ?? worker.role;
      state.dataset.tone = WORKER_TONES[worker.state] ?? "idle";
      setText(state, worker.state);
      setText(version, worker.version ?? "");
      setText(busy, worker.busy);
      setText(pid, worker.pid || "");
    },
  };
}

const BAD = /_died$|^(trouble|failed|learner_restarted)$/;
const WARN = /^(paused|waiting|group_dropped)$/;

export class Events {
  constructor() {
    this.list = h("ul", { class: "events", tabindex: "0", "aria-label": "Events, newest first" });
    this.rows = new KeyedList(this.list, eventRow);
    this.none = h("p", { class: "soft small card-body" }, "No events yet.");
    this.element = h("section", { class: "card" }, h("header", {}, h("h2", {}, "Events")), this.none, this.list);
  }

  draw({ events }) {
    this.none.hidden = events.length > 0;
    this.list.hidden = events.length === 0;
    this.rows.update(events.slice(-EVENTS_SHOWN).reverse(), (event) => event.id);
  }
}

function eventRow(event) {
  const tone = BAD.test(event.kind) ? "bad" : WARN.test(event.kind) ? "warn" : "";
  const element = h(
    "li",
    { data: { tone } },
    h("time", { title: moment(event.time), datetime: new Date(event.time * 1000).toISOString() }, clock(event.time)),
    h("p", {}, h("strong", {}, words(event.kind)), " ", h("span", { class: "soft" }, eventText(event))),
  );
  return { element, update() {} };
}

function eventText(event) {
  if (event.kind === "evaluation") {
    const means = event.estimates.map(({ k, mean }) => `@${k} ${mean.toFixed(3)}`);
    if (event.weighted) means.push(`weighted ${event.weighted.mean.toFixed(3)}`);
    if (event.unscored) means.push(`(${event.unscored} samples unscored)`);
    return `version ${event.version}: ${means.join("  ")}`;
  }
  if (event.problem) return event.problem;
  return Object.entries(event)
    .filter(([key]) => !["id", "kind", "time"].includes(key))
    .map(([key, value]) => `${key} ${plain(value)}`)
    .join(", ");
}

export class LedgerCounts {
  constructor() {
    this.list = h("dl", { class: "ledger" });
    this.note = h("span", { class: "soft" }, "each admitted group is trained, dropped or in flight; dead ones are among them");
    this.element = h("section", { class: "card wide" }, h("header", {}, h("h2", {}, "Ledger"), this.note), h("div", { class: "card-body" }, this.list));
  }

  draw({ ledger }) {
    const known = ["admitted", "trained", "dropped", "in_flight"];
    const names = [...known, ...Object.keys(ledger).filter((name) => !known.includes(name)).sort()];
    fill(this.list, names.map((name) => h("div", {}, h("dt", {}, words(name)), h("dd", {}, count(ledger[name] ?? 0)))));
  }
}
