// Compares runs: the curves of a metric, the newest values side by side, and the differences between their jobs.

import { remember } from "../address.js";
import { get, query, runPath } from "../api.js";
import { Chart } from "../charts/chart.js";
import { fill, h, scrolling } from "../dom.js";
import { number, plain } from "../format.js";
import { series } from "../palette.js";
import { empty, failed } from "../states.js";
import { flattened } from "./job.js";
import { byVersion, estimate, klOf, smoothed } from "./run_charts.js";

const MOST = 7; // the number of colours
const POINTS = 600;
const FIRST = ["pass_at_1", "reward_mean", "loss"];
const HELD_OUT = "evaluation/pass_at_"; // held-out pass@k among the metrics; jobs name it so in their rules
const AXES = { step: "over steps", kl: "over KL to the initial model" };

export class ComparePage {
  title = "Compare";

  constructor(parts, params) {
    this.runs = new Map(); // id -> {view, metrics, evaluations}
    this.metric = params.get("metric");
    this.axis = h("select", { "aria-label": "Horizontal axis" }, Object.entries(AXES).map(([value, label]) => h("option", { value }, label)));
    this.axis.value = params.get("axis") === "kl" ? "kl" : "step";
    this.axis.addEventListener("change", () => this.redraw());
    this.picks = h("div", { class: "picks" });
    this.add = h("select", { "aria-label": "Add a run" });
    this.add.addEventListener("change", () => this.addRun(this.add.value));
    this.choice = h("select", { "aria-label": "Metric" });
    this.choice.addEventListener("change", () => {
      this.metric = this.choice.value;
      this.redraw();
    });
    this.smooth = h("input", { type: "checkbox", checked: params.get("smooth") !== "no" });
    this.smooth.addEventListener("change", () => this.redraw());
    this.all = h("input", { type: "checkbox", checked: params.get("identical") === "yes" });
    this.all.addEventListener("change", () => {
      this.remember();
      this.drawDiff();
    });
    this.chart = new Chart({ title: "Curves", size: "tall", wholeX: true });
    this.passes = new Chart({ title: "pass@k, newest evaluation", size: "tall", range: [0, null], log2: true, dots: true, xName: "", xFormat: (x) => `k=${Math.round(2 ** x)}` });
    this.table = scrolling("Table of the jobs' fields", { class: "table-wrap" });
    this.message = h("div", {});
    this.content = h("div", { class: "page" }, this.makeContent());
    this.element = h("div", { class: "page" }, h("div", { class: "page-head" }, h("h1", {}, "Compare"), h("div", { class: "end" }, h("a", { class: "button", href: "#/groups" }, "Groups of runs"))), this.picks, this.message, this.content);
    this.start((params.get("runs") ?? "").split(",").filter(Boolean).slice(0, MOST));
  }

  makeContent() {
    return [
      h("div", { class: "filters" }, this.choice, this.axis, h("label", { class: "check" }, this.smooth, "Smooth curves")),
      h("div", { class: "grid" }, this.chart.element, this.passes.element),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Jobs"), h("label", { class: "check small end" }, this.all, "Show identical fields")), h("div", { class: "card-body" }, this.table)),
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
    const shown = { axis: this.axis.value === "kl" ? "kl" : "", smooth: this.smooth.checked ? "" : "no", identical: this.all.checked ? "yes" : "" };
    remember("compare", { runs: [...this.runs.keys()].join(), metric: this.metric, ...shown });
  }

  /** After a change of what the curves show. */
  redraw() {
    this.remember();
    this.draw();
    this.drawDiff();
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
    const runs = [...this.runs.values()];
    const ks = new Set(runs.flatMap(({ evaluations }) => evaluations.flatMap(({ estimates }) => estimates.map(({ k }) => k))));
    const ofSteps = [...new Set(runs.flatMap(({ metrics }) => Object.keys(metrics.series)))].filter((name) => name !== "time").sort();
    const names = [...ofSteps, ...[...ks].sort((a, b) => a - b).map((k) => HELD_OUT + k)];
    if (!names.includes(this.metric)) this.metric = FIRST.find((name) => names.includes(name)) ?? names[0] ?? null;
    fill(this.choice, names.map((name) => h("option", { value: name }, label(name))));
    if (this.metric) this.choice.value = this.metric;
  }

  draw() {
    const runs = [...this.runs.entries()].map(([id, run], i) => ({ id, ...run, label: this.label(id), color: series(i) }));
    const overKl = this.axis.value === "kl";
    const curves = runs.map((run) => curveOf(run, this.metric, overKl, this.smooth.checked));
    const xs = [...new Set(curves.flatMap((curve) => [...curve.keys()]))].sort((a, b) => a - b);
    const points = overKl ? 5 : false; // KL may fall, and a line would turn back
    this.chart.name(overKl ? "KL" : "step", !overKl);
    this.chart.draw(
      xs,
      runs.map(({ label, color }, i) => ({ label, color, points: this.metric?.startsWith(HELD_OUT) ? 9 : points, values: xs.map((x) => curves[i].get(x) ?? null) })),
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
    const names = [...new Set(jobs.flatMap((job) => [...job.keys()]))];
    const rows = names.map((name) => ({ name, values: jobs.map((job) => plain(job.get(name))) }));
    const differs = ({ values }) => values.some((value) => value !== values[0]);
    const shown = rows.filter((row) => this.all.checked || differs(row));
    const newest = (run) => number([...curveOf(run, this.metric, false, false).values()].at(-1));
    const metric = this.metric && { name: `${label(this.metric)} (newest)`, values: runs.map(([, run]) => newest(run)) };
    const line = (row, mark) => h("tr", { data: { differs: mark } }, h("td", {}, row.name), row.values.map((value) => h("td", {}, value)));
    const head = h("tr", {}, h("th", { scope: "col" }, "Field"), runs.map(([id]) => h("th", { scope: "col" }, this.label(id))));
    const body = h("tbody", {}, metric && line(metric, false), shown.map((row) => line(row, this.all.checked && differs(row))));
    fill(this.table, h("table", { class: "diff" }, h("thead", {}, head), body));
  }
}

const label = (metric) => (metric.startsWith(HELD_OUT) ? `held-out pass@${metric.slice(HELD_OUT.length)}` : metric);

/** The values of a metric by step or by KL to the initial model: those of evaluations by the version evaluated. */
function curveOf({ metrics, evaluations }, metric, overKl, smooth) {
  const whole = (values) => smoothed(values, smooth ? Math.max(1, Math.round(values.length / 40)) : 1);
  const kl = whole(metrics.series.kl_k1 ?? metrics.steps.map(() => null));
  const pairs = metric?.startsWith(HELD_OUT)
    ? evaluations.map((each) => [overKl ? klOf(metrics.steps, kl, each.version) : each.version, estimate(each, Number(metric.slice(HELD_OUT.length)))?.mean ?? null])
    : whole(metrics.series[metric] ?? []).map((value, i) => [overKl ? kl[i] : metrics.steps[i], value]);
  return new Map(pairs.filter(([x, y]) => x !== null && y !== null));
}
