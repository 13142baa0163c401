// Compares groups of runs, such as the settings of a sweep: means over the runs of each with 95% intervals.

import { remember } from "../address.js";
import { get, query, runPath } from "../api.js";
import { Chart } from "../charts/chart.js";
import { fill, h, scrolling } from "../dom.js";
import { bandOver, interval, pointsOf, sharedAxis } from "../groups.js";
import { number } from "../format.js";
import { series } from "../palette.js";
import { empty, failed, loading } from "../states.js";
import { byVersion } from "./run_charts.js";

const MOST_RUNS = 200;
const MOST_GROUPS = 7; // the number of colours
const AT_ONCE = 8; // requests
const POINTS = 400;
const LATE = 20; // rows of metrics whose mean the table shows
const FIRST = ["reward_mean", "pass_at_1", "loss"];
const NOT_GROUPS = new Set(["seed", "member"]);
const AXES = { steps: "Steps", samples: "Samples", divergence: "Divergence" };
const NEEDED = { steps: [], samples: ["samples_per_second", "seconds_step"], divergence: ["kl_k1"] };

export class GroupsPage {
  title = "Groups";

  constructor(parts, params) {
    this.tag = params.get("tag") ?? "";
    this.by = params.get("by") ?? "group";
    this.metric = params.get("metric");
    this.axis = Object.hasOwn(AXES, params.get("x")) ? params.get("x") : "steps";
    this.find = h("input", { type: "search", placeholder: "sweep=NAME", "aria-label": "Tag of the runs", value: this.tag, maxlength: 300 });
    this.find.addEventListener("change", () => this.start(this.find.value.trim()));
    this.byChoice = this.select("Group by", (value) => (this.by = value));
    this.choice = this.select("Metric", (value) => (this.metric = value));
    this.axisChoice = this.select("Against", (value) => (this.axis = value));
    fill(this.axisChoice, Object.entries(AXES).map(([value, label]) => h("option", { value }, label)));
    this.axisChoice.value = this.axis;
    this.chart = new Chart({ title: "Mean and 95% interval", size: "tall", xName: "" });
    this.passes = new Chart({ title: "pass@k, newest evaluations", size: "tall", range: [0, null], log2: true, dots: true, xName: "", xFormat: (x) => `k=${Math.round(2 ** x)}` });
    this.table = scrolling("Table of the groups", { class: "table-wrap" });
    this.message = h("div", {});
    this.content = h(
      "div",
      { class: "page hidden" },
      h("div", { class: "filters" }, this.byChoice, this.choice, this.axisChoice),
      h("div", { class: "grid" }, this.chart.element, this.passes.element),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Groups")), h("div", { class: "card-body" }, this.table)),
    );
    this.element = h("div", { class: "page" }, h("h1", {}, "Groups of runs"), h("div", { class: "filters" }, this.find), this.message, this.content);
    this.start(this.tag);
  }

  select(label, choose) {
    const element = h("select", { "aria-label": label });
    element.addEventListener("change", () => {
      choose(element.value);
      this.load();
    });
    return element;
  }

  close() {
    this.closed = true;
    this.chart.close();
    this.passes.close();
  }

  /** Show the runs with the tag. */
  async start(tag) {
    this.tag = tag;
    this.content.classList.add("hidden");
    if (!tag.includes("=")) {
      fill(this.message, empty("No runs chosen", "Write a tag above, such as sweep=NAME, or follow the tag of a run."));
      return;
    }
    await this.attempt(async () => {
      this.runs = await allRuns(tag);
      if (!this.runs.length) {
        fill(this.message, empty("No runs with this tag", tag));
        return;
      }
      this.metrics = new Map();
      this.evaluations = new Map();
      this.names = (await get(runPath(this.runs.at(-1).id, `/metrics${query({ points: 1 })}`))).names;
      await this.load();
    });
  }

  async attempt(work) {
    fill(this.message, loading());
    try {
      await work();
    } catch (error) {
      fill(this.message, failed(error, () => this.start(this.tag)));
      if (error.status === undefined) throw error;
    }
  }

  /** Fetch what the chosen metric and axis need and is not here yet, and draw. */
  async load() {
    const turn = (this.turn = (this.turn ?? 0) + 1); // a later choice makes this one obsolete
    await this.attempt(async () => {
      this.choices();
      remember("groups", { tag: this.tag, by: this.by, metric: this.metric, x: this.axis });
      const names = [...new Set([this.metric, ...NEEDED[this.axis]])].join();
      await inTurns(this.runs, async ({ id }) => {
        const key = `${id} ${names}`;
        if (!this.metrics.has(key)) this.metrics.set(key, await get(runPath(id, `/metrics${query({ names, points: POINTS })}`)));
        if (!this.evaluations.has(id)) this.evaluations.set(id, byVersion((await get(runPath(id, "/evaluations"))).items));
      });
      if (this.closed || turn !== this.turn) return;
      fill(this.message);
      this.content.classList.remove("hidden");
      this.draw(names);
    });
  }

  choices() {
    const own = this.tag.split("=")[0];
    const keys = [...new Set(this.runs.flatMap(({ tags }) => Object.keys(tags ?? {})))].filter((key) => key !== own && !NOT_GROUPS.has(key)).sort();
    if (this.by !== "name" && !keys.includes(this.by)) this.by = keys[0] ?? "name";
    fill(this.byChoice, [...keys, "name"].map((key) => h("option", { value: key }, `by ${key}`)));
    this.byChoice.value = this.by;
    const metrics = this.names.filter((name) => name !== "time");
    if (!metrics.includes(this.metric)) this.metric = FIRST.find((name) => metrics.includes(name)) ?? metrics[0] ?? null;
    fill(this.choice, metrics.map((name) => h("option", { value: name }, name)));
    if (this.metric) this.choice.value = this.metric;
  }

  draw(names) {
    const groups = this.grouped().map(([label, runs], i) => {
      const metrics = (of) => of.map(({ id }) => this.metrics.get(`${id} ${names}`)).filter(({ steps }) => steps.length);
      const curves = metrics(runs).map((each) => pointsOf(this.axis, this.metric, each)).filter(Boolean);
      const done = runs.filter(({ state }) => state === "done");
      const counted = done.length ? done : runs; // the newest figures of runs that go on are those of other steps
      const late = metrics(counted).map(({ series: found }) => mean(found[this.metric]?.slice(-LATE) ?? []));
      const newest = counted.map(({ id }) => this.evaluations.get(id).at(-1)).filter(Boolean);
      return { label, runs, done: done.length, color: series(i), curves, late: interval(late), passes: passes(newest) };
    });
    this.drawCurves(groups.slice(0, MOST_GROUPS));
    this.drawPasses(groups.slice(0, MOST_GROUPS));
    this.drawTable(groups);
  }

  /** [label, runs], in the order in which the groups were first submitted. */
  grouped() {
    const groups = new Map();
    for (const run of [...this.runs].reverse()) {
      const label = this.by === "name" ? run.name : (run.tags?.[this.by] ?? "–");
      groups.set(label, [...(groups.get(label) ?? []), run]);
    }
    return [...groups];
  }

  drawCurves(groups) {
    const drawn = groups.filter(({ curves }) => curves.length);
    const xs = drawn.length ? sharedAxis(drawn.flatMap(({ curves }) => curves), this.axis === "steps") : [];
    this.chart.draw(xs, drawn.map(({ label, color, curves }) => line(label, color, bandOver(curves, xs))));
  }

  drawPasses(groups) {
    const drawn = groups.filter((each) => each.passes.size);
    const ks = [...new Set(drawn.flatMap((each) => [...each.passes.keys()]))].sort((a, b) => a - b);
    this.passes.draw(ks.map(Math.log2), drawn.map((each) => line(each.label, each.color, ks.map((k) => each.passes.get(k) ?? null))));
  }

  drawTable(groups) {
    const ks = [...new Set(groups.flatMap((each) => [...each.passes.keys()]))].sort((a, b) => a - b);
    const head = [this.by, "Done", ...ks.map((k) => `pass@${k}`), `${this.metric}, newest`];
    const rows = groups.map(({ label, runs, done, color, late, passes: of }, i) => {
      const swatch = i < MOST_GROUPS && h("span", { class: "swatch", style: { display: "inline-block", background: `var(--${color})` } });
      const ids = runs.map(({ id }) => id).slice(0, MOST_GROUPS);
      const link = h("a", { href: `#/compare${query({ runs: ids.join() })}` }, label);
      return h("tr", {}, h("td", {}, swatch, " ", link), [`${done} of ${runs.length}`, ...ks.map((k) => words(of.get(k))), words(late)].map((each) => h("td", {}, each)));
    });
    fill(this.table, h("table", {}, h("thead", {}, h("tr", {}, head.map((each) => h("th", { scope: "col" }, each)))), h("tbody", {}, rows)));
  }
}

/** All runs with the tag, newest first. */
async function allRuns(tag) {
  const found = [];
  let cursor = null;
  do {
    const page = await get(`v1/runs${query({ limit: 200, tag, cursor })}`);
    found.push(...page.items);
    cursor = page.next;
  } while (cursor && found.length < MOST_RUNS);
  return found.slice(0, MOST_RUNS);
}

async function inTurns(items, work) {
  const waiting = [...items];
  const worker = async () => {
    while (waiting.length) await work(waiting.shift());
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}

/** k -> interval over the runs' newest evaluations, for each k that all of them have. */
function passes(newest) {
  const of = newest.map(({ estimates }) => new Map(estimates.map((each) => [each.k, each.mean])));
  const ks = [...(of[0]?.keys() ?? [])].filter((k) => of.every((each) => each.has(k)));
  return new Map(ks.map((k) => [k, interval(of.map((each) => each.get(k)))]));
}

function mean(values) {
  return interval(values)?.mean ?? null;
}

/** A series of a chart; the band is as wide as the line where there is only one run. */
function line(label, color, points) {
  const of = (key) => points.map((point) => (point === null ? null : (point[key] ?? point.mean)));
  return { label, color, values: of("mean"), band: [of("low"), of("high")] };
}

function words(found) {
  if (!found) return "";
  return found.low === null ? number(found.mean) : `${number(found.mean)} ± ${number(found.mean - found.low)}`;
}
