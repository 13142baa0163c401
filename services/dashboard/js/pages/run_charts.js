// The charts of a run, drawn from its metrics and evaluations.

import { Chart } from "../charts/chart.js";
import { count, duration, number, percent, words } from "../format.js";
import { ramp, series as seriesColor, STATUSES, verdictColor } from "../palette.js";

const PASS = /^pass_at_(\d+)$/;
const SCATTER = 300; // most points in the plot against KL
const SYNC = "run";

/** Means over a window around each point; with `window` 1 the values are unchanged. */
export function smoothed(values, window) {
  if (window <= 1) return values;
  const half = Math.floor(window / 2);
  return values.map((value, i) => {
    if (value === null) return null;
    let sum = 0;
    let n = 0;
    for (let j = Math.max(0, i - half); j <= Math.min(values.length - 1, i + half); j += 1) {
      if (values[j] === null) continue;
      sum += values[j];
      n += 1;
    }
    return sum / n;
  });
}

/** Evaluations by version; of several for one version, only the last. */
export function byVersion(evaluations) {
  return [...new Map(evaluations.map((each) => [each.version, each])).values()].sort((a, b) => a.version - b.version);
}

export const estimate = (evaluation, k) => evaluation.estimates.find((each) => each.k === k) ?? null;

function allKs(metrics, evaluations) {
  const ks = new Set(metrics.family(PASS).map((each) => each.number));
  for (const each of evaluations) for (const { k } of each.estimates) ks.add(k);
  return [...ks].sort((a, b) => a - b);
}

class PassCurves {
  constructor() {
    this.chart = new Chart({
      title: "pass@k",
      note: "lines: training prompts; rings: held-out evaluations",
      size: "tall",
      range: [0, null],
      sync: SYNC,
      wholeX: true,
    });
  }

  draw({ metrics, evaluations, window }) {
    const points = byVersion(evaluations);
    const ks = allKs(metrics, points);
    const at = new Map(points.map((each) => [each.version, each]));
    const xs = [...new Set([...metrics.steps, ...at.keys()])].sort((a, b) => a - b);
    const place = new Map(metrics.steps.map((step, i) => [step, i]));
    const lines = ks.flatMap((k, i) => {
      const trained = metrics.has(`pass_at_${k}`);
      const values = trained ? smoothed(metrics.values(`pass_at_${k}`), window) : null;
      const color = ramp(i, ks.length);
      return [
        trained && { label: `@${k}`, color, values: xs.map((x) => (place.has(x) ? values[place.get(x)] : null)) },
        points.some((each) => estimate(each, k)) && {
          label: `@${k}`,
          color,
          points: 9,
          quiet: trained,
          values: xs.map((x) => (at.has(x) ? (estimate(at.get(x), k)?.mean ?? null) : null)),
        },
      ].filter(Boolean);
    });
    if (points.some((each) => each.weighted))
      lines.push({ label: "weighted", color: "series-0", points: 9, values: xs.map((x) => at.get(x)?.weighted?.mean ?? null) });
    this.chart.draw(xs, lines);
  }
}

class BeforeAfter {
  constructor() {
    this.chart = new Chart({
      title: "pass@k before and after",
      note: "held-out prompts, 95% intervals",
      size: "tall",
      range: [0, null],
      log2: true,
      dots: true,
      xName: "",
      xFormat: (x) => `k=${Math.round(2 ** x)}`,
    });
  }

  draw({ evaluations }) {
    const points = byVersion(evaluations);
    const chosen = points.length > 1 ? [points[0], points.at(-1)] : points;
    const ks = [...new Set(chosen.flatMap((each) => each.estimates.map(({ k }) => k)))].sort((a, b) => a - b);
    this.chart.draw(
      ks.map(Math.log2),
      chosen.map((evaluation, i) => {
        const of = (key) => ks.map((k) => estimate(evaluation, k)?.[key] ?? null);
        return {
          label: `version ${evaluation.version}`,
          color: i === chosen.length - 1 ? "series-0" : "series-6",
          values: of("mean"),
          band: [of("low"), of("high")],
        };
      }),
    );
  }
}

class AgainstKl {
  constructor() {
    this.chart = new Chart({
      title: "pass@k against KL",
      note: "nats from the initial model; rings: held-out evaluations",
      xName: "KL",
      size: "tall",
      range: [0, null],
    });
  }

  draw({ metrics, evaluations }) {
    const kl = metrics.values("kl_k1");
    const points = byVersion(evaluations);
    const ks = outermost(metrics.family(PASS).map((each) => each.number), points.flatMap((each) => each.estimates.map(({ k }) => k)));
    const rows = buckets(metrics, kl, ks.map((k) => `pass_at_${k}`));
    for (const evaluation of points) {
      const x = klOf(metrics.steps, kl, evaluation.version);
      if (x !== null) rows.push({ x, evaluation });
    }
    rows.sort((a, b) => a.x - b.x);
    this.chart.draw(
      rows.map(({ x }) => x),
      ks.flatMap((k, i) => {
        const color = ramp(i, ks.length);
        const trained = metrics.has(`pass_at_${k}`);
        const held = rows.map(({ evaluation }) => (evaluation ? (estimate(evaluation, k)?.mean ?? null) : null));
        return [
          trained && { label: `@${k}`, color, points: 5, values: rows.map(({ values }) => values?.[i] ?? null) },
          held.some((value) => value !== null) && { label: `@${k}`, color, points: 10, quiet: trained, values: held },
        ].filter(Boolean);
      }),
    );
  }
}

/** The smallest and the largest number of each list, together in order. */
function outermost(...lists) {
  const ends = lists.filter(({ length }) => length).flatMap((list) => [Math.min(...list), Math.max(...list)]);
  return [...new Set(ends)].sort((a, b) => a - b);
}

/** Means of KL and of the metrics `names` over groups of adjacent steps. */
function buckets(metrics, kl, names) {
  const size = Math.max(1, Math.ceil(kl.length / SCATTER));
  const rows = [];
  for (let begin = 0; begin < kl.length; begin += size) {
    const mean = (values) => {
      const there = values.slice(begin, begin + size).filter((value) => value !== null);
      return there.length ? there.reduce((sum, value) => sum + value, 0) / there.length : null;
    };
    const x = mean(kl);
    if (x !== null) rows.push({ x, values: names.map((name) => mean(metrics.values(name))) });
  }
  return rows;
}

/** KL of a version's weights: 0 for the initial ones, else as measured at the nearest earlier step. */
export function klOf(steps, kl, version) {
  if (version === 0) return 0;
  const i = steps.findLastIndex((step, j) => step <= version && kl[j] !== null);
  return i < 0 ? null : kl[i];
}

/** Named metrics as lines. `parts`: [name, label, colour]. */
class Lines {
  constructor(options, parts) {
    this.chart = new Chart({ sync: SYNC, wholeX: true, ...options });
    this.parts = parts;
  }

  draw({ metrics, window }) {
    const there = this.parts.filter(([name]) => metrics.has(name));
    this.chart.draw(
      metrics.steps,
      there.map(([name, label, color]) => ({ label, color, values: smoothed(metrics.values(name), window) })),
    );
  }
}

class Verdicts {
  constructor() {
    this.chart = new Chart({ title: "Verdicts", note: "share of samples", sync: SYNC, wholeX: true, stacked: true, range: [0, 1], format: percent });
  }

  draw({ metrics, window }) {
    const there = STATUSES.filter((status) => metrics.has(`verdict_${status}`));
    this.chart.draw(
      metrics.steps,
      there.map((status) => ({ label: words(status), color: verdictColor(status), values: smoothed(metrics.values(`verdict_${status}`).map((v) => v ?? 0), window) })),
    );
  }
}

class Lags {
  constructor() {
    this.chart = new Chart({ title: "Lag", note: "share of trained tokens, by versions behind", sync: SYNC, wholeX: true, stacked: true, range: [0, 1], format: percent });
  }

  draw({ metrics, window }) {
    const bins = metrics.family(/^lag_histogram\.(\d+)$/);
    const columns = bins.map(({ name }) => metrics.values(name));
    const sums = metrics.steps.map((_, i) => columns.reduce((sum, column) => sum + (column[i] ?? 0), 0));
    this.chart.draw(
      metrics.steps,
      bins.map(({ number: lag }, i) => ({ label: `lag ${lag}`, color: ramp(i, bins.length), values: smoothed(columns[i].map((v, j) => (sums[j] ? (v ?? 0) / sums[j] : 0)), window) })),
    );
  }
}

const TIMES = [
  ["seconds_wait", "Waiting for groups", "stage-generate"],
  ["seconds_learn", "Learning", "stage-learn"],
  ["seconds_publish", "Publishing", "stage-publish"],
  ["seconds_broadcast", "Weight update", "stage-update"],
];

/** The charts for a run of `kind`, in display order. */
export function chartsOf(kind) {
  const speed = new Lines({ title: "Throughput", note: "tokens per second of the learner", range: [0, null], format: count }, [["tokens_per_second", "tokens/s", "series-0"]]);
  const loss = new Lines({ title: "Loss" }, [["loss", "loss", "series-0"]]);
  const entropy = new Lines({ title: "Entropy", note: "nats per token", range: [0, null] }, [["entropy", "entropy", "series-3"]]);
  const gradient = new Lines({ title: "Gradient norm", range: [0, null] }, [["grad_norm", "gradient norm", "series-2"], ["clipped_share", "share of updates clipped", "series-4"]]);
  if (kind === "sft" || kind === "rft") return [loss, entropy, gradient, speed];
  if (kind === "eval") return [new BeforeAfter()];
  return [
    new PassCurves(),
    new BeforeAfter(),
    new Lines({ title: "Reward", note: "mean over scored samples" }, [["reward_mean", "reward", "series-0"]]),
    new Lines({ title: "Live groups", note: "share of groups and samples with a gradient", range: [0, 1], format: percent }, [["live_group_fraction", "live groups", "series-1"], ["live_sample_fraction", "live samples", "series-2"], ["live_sample_fraction_made", "live samples, of all made", "series-4"]]),
    new AgainstKl(),
    new Lines({ title: "Distance from the initial model", note: "nats per token", size: "tall", range: [0, null] }, [["kl_k1", "KL (k1)", "series-4"], ["kl_k3", "KL (k3)", "series-0"], ["entropy", "entropy", "series-3"]]),
    new Verdicts(),
    new Lags(),
    new Lines({ title: "Seconds per step", note: "by what the learner was doing", stacked: true, calm: true, range: [0, null], format: duration }, TIMES),
    new Lines({ title: "Throughput", note: "samples per second", range: [0, null], format: count }, [["samples_per_second", "samples/s", "series-0"]]),
    speed,
    gradient,
  ];
}

/** A small chart of any one metric. */
export function anyMetric(name, index) {
  return new Lines({ title: words(name.replace(".", " ")), size: "small", format: number }, [[name, name, seriesColor(index)]]);
}
