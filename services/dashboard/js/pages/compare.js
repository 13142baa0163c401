// Compares runs: the curves of a metric, the newest values side by side, and the differences between their jobs.

import { get, query, runPath } from "../api.js";
import { Chart } from "../charts/chart.js";
import { fill, h } from "../dom.js";
import { number, plain } from "../format.js";
import { series } from "../palette.js";
import { empty, failed } from "../states.js";
import { flattened } from "./job.js";
import { byVersion, smoothed } from "./run_charts.js";

const MOST = 7; // the number of colours
const POINTS = 600;
const FIRST = ["pass_at_1", "reward_mean", "loss"];

export class ComparePage {
  title = "Compare";

  constructor(parts, params) {
    this.runs = new Map(); // id -> {view, metrics, evaluations}
    this.metric = params.get("metric");
    this.picks = h("div", { class: "picks" });
    this.add = h("select", { "aria-label": "Add a run" });
    this.add.addEventListener("change", () => this.addRun(this.add.value));
    this.choice = h("select", { "aria-label": "Metric" });
    this.choice.addEventListener("change", () => {
      this.metric = this.choice.value;
      this.remember();
      this.draw();
    });
    this.smooth = h("input", { type: "checkbox", checked: true });
    this.smooth.addEventListener("change", () => this.draw());
    this.all = h("input", { type: "checkbox" });
    this.all.addEventListener("change", () => this.drawDiff());
    this.chart = new Chart({ title: "Curves", size: "tall", wholeX: true });
    this.passes = new Chart({ title: "pass@k, newest evaluation", size: "tall", range: [0, null], log2: true, dots: true, xName: "", xFormat: (x) => `k=${Math.round(2 ** x)}` });
    this.table = h("div", { class: "table-wrap" });
    this.message = h("div", {});
    this.content = h("div", { class: "page" }, this.makeContent());
    this.element = h("div", { class: "page" }, h("h1", {}, "Compare"), this.picks, this.message, this.content);
    this.start((params.get("runs") ?? "").split(",").filter(Boolean).slice(0, MOST));
  }

  makeContent() {
    return [
      h("div", { class: "filters" }, this.choice, h("label", { class: "check" }, this.smooth, "Smooth curves")),
      h("div", { class: "grid" }, this.chart.element, this.passes.element),
      h("section", { class: "card" }, h("header", {}, h("h3", {}, "Jobs"), h("label", { class: "check small end" }, this.all, "Show identical fields")), h("div", { class: "card-body" }, this.table)),
    ];
  }

  close() {
    this.closed = true;
    this.chart.close();
    this.passes.close();
  }

  async start(ids) {
    this.content.classList.add("hidden");
    try {
      const [{ items }, ...fetched] = await Promise.all([get("v1/runs?limit=200"), ...ids.map((id) => this.fetchRun(id))]);
      this.known = items;
      this.runs = new Map(ids.map((id, i) => [id, fetched[i]])); // in the requested order, whichever arrived first
      fill(this.message);
      this.changed();
    } catch (error) {
      fill(this.message, failed(error, () => this.start(ids)));
      if (error.status === undefined) throw error;
    }
  }

  async fetchRun(id) {
    const [view, metrics, evaluations] = await Promise.all([
      get(runPath(id)),
      get(runPath(id, `/metrics${query({ points: POINTS })}`)),
      get(runPath(id, "/evaluations")),
    ]);
    return { view, metrics, evaluations: byVersion(evaluations.items) };
  }

  async addRun(id) {
    if (!id) return;
    try {
      this.runs.set(id, await this.fetchRun(id));
      fill(this.message);
    } catch (error) {
      fill(this.message, failed(error));
      if (error.status === undefined) throw error;
    }
    this.changed();
  }

  remember() {
    history.replaceState(null, "", `#/compare${query({ runs: [...this.runs.keys()].join(), metric: this.metric })}`);
  }

  changed() {
    if (this.closed) return;
    this.remember();
    this.drawPicks();
    const enough = this.runs.size > 0;
    this.content.classList.toggle("hidden", !enough);
    if (!enough) {
      fill(this.message, empty("Nothing to compare yet", "Add runs above, or select them on the Runs page."));
      return;
    }
    fill(this.message);
    this.drawChoice();
    this.draw();
    this.drawDiff();
  }

  drawPicks() {
    const rest = this.known.filter(({ id }) => !this.runs.has(id));
    fill(this.add, h("option", { value: "" }, "Add a run…"), rest.map(({ id, name }) => h("option", { value: id }, `${name} (${id})`)));
    this.add.disabled = this.runs.size >= MOST || rest.length === 0;
    const picks = [...this.runs].map(([id, { view }], i) => {
      const { name } = view.record;
      const drop = h("button", { type: "button", "aria-label": `Remove ${name}` }, "×");
      drop.addEventListener("click", () => {
        this.runs.delete(id);
        this.changed();
      });
      const swatch = h("span", { class: "swatch", style: { background: `var(--${series(i)})` } });
      return h("span", { class: "pick" }, swatch, h("a", { class: "clip", href: `#/runs/${encodeURIComponent(id)}` }, name), drop);
    });
    fill(this.picks, picks, this.add);
  }

  drawChoice() {
    const names = [...new Set([...this.runs.values()].flatMap(({ metrics }) => Object.keys(metrics.series)))].filter((name) => name !== "time").sort();
    if (!names.includes(this.metric)) this.metric = FIRST.find((name) => names.includes(name)) ?? names[0] ?? null;
    fill(this.choice, names.map((name) => h("option", { value: name }, name)));
    if (this.metric) this.choice.value = this.metric;
  }

  draw() {
    const runs = [...this.runs.entries()].map(([id, run], i) => ({ id, ...run, label: this.label(id), color: series(i) }));
    const xs = [...new Set(runs.flatMap(({ metrics }) => metrics.steps))].sort((a, b) => a - b);
    this.chart.draw(
      xs,
      runs.map(({ metrics, label, color }) => {
        const values = metrics.series[this.metric] ?? [];
        const drawn = smoothed(values, this.smooth.checked ? Math.max(1, Math.round(values.length / 40)) : 1);
        const at = new Map(metrics.steps.map((step, i) => [step, drawn[i] ?? null]));
        return { label, color, values: xs.map((x) => at.get(x) ?? null) };
      }),
    );
    const newest = runs.filter(({ evaluations }) => evaluations.length).map((run) => ({ ...run, estimates: new Map(run.evaluations.at(-1).estimates.map((each) => [each.k, each])) }));
    const ks = [...new Set(newest.flatMap(({ estimates }) => [...estimates.keys()]))].sort((a, b) => a - b);
    this.passes.draw(
      ks.map(Math.log2),
      newest.map(({ label, color, estimates }) => {
        const of = (key) => ks.map((k) => estimates.get(k)?.[key] ?? null);
        return { label, color, values: of("mean"), band: [of("low"), of("high")] };
      }),
    );
  }

  /** A run's name, with its id if several runs share the name. */
  label(id) {
    const { name } = this.runs.get(id).view.record;
    const namesakes = [...this.runs.values()].filter(({ view }) => view.record.name === name);
    return namesakes.length > 1 ? `${name} (${id})` : name;
  }

  drawDiff() {
    const runs = [...this.runs.entries()];
    const jobs = runs.map(([, { view }]) => flattened(view.record.job));
    const last = (metrics, name) => number(metrics.series[name]?.findLast((value) => value !== null));
    const names = [...new Set(jobs.flatMap((job) => [...job.keys()]))];
    const rows = names.map((name) => ({ name, values: jobs.map((job) => plain(job.get(name))) }));
    const differs = ({ values }) => values.some((value) => value !== values[0]);
    const shown = rows.filter((row) => this.all.checked || differs(row));
    const metric = this.metric && { name: `${this.metric} (newest)`, values: runs.map(([, { metrics }]) => last(metrics, this.metric)) };
    const line = (row, mark) => h("tr", { data: { differs: mark } }, h("td", {}, row.name), row.values.map((value) => h("td", {}, value)));
    const head = h("tr", {}, h("th", { scope: "col" }, "Field"), runs.map(([id]) => h("th", { scope: "col" }, this.label(id))));
    const body = h("tbody", {}, metric && line(metric, false), shown.map((row) => line(row, this.all.checked && differs(row))));
    fill(this.table, h("table", { class: "diff" }, h("thead", {}, head), body));
  }
}
