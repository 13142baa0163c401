// Means over the runs of a group with 95% intervals, and curves of several runs on one axis. The command line's
// `services/sweeps/statistics.py` does the same.

import { smoothed } from "./pages/run_charts.js";

const POINTS = 200;

/** The t that bounds 95% of Student's distribution on both sides; Abramowitz and Stegun, 26.7.3 and 26.7.4. */
export function studentT(freedom) {
  let low = 0;
  let high = Math.PI / 2;
  for (let i = 0; i < 60; i += 1) {
    const theta = (low + high) / 2;
    if (within(theta, freedom) < 0.95) low = theta;
    else high = theta;
  }
  return Math.sqrt(freedom) * Math.tan(low);
}

function within(theta, freedom) {
  const odd = freedom % 2;
  const cosine = Math.cos(theta);
  let term = odd ? cosine : 1;
  let total = 0;
  for (let power = 1 + odd; power < freedom; power += 2) {
    total += term;
    term *= (cosine * cosine * power) / (power + 1);
  }
  return odd ? (2 / Math.PI) * (theta + Math.sin(theta) * total) : Math.sin(theta) * total;
}

/** {mean, low, high} of the values that are numbers; low and high are null for a single one, null without any. */
export function interval(values) {
  const known = values.filter((value) => value !== null && value !== undefined && Number.isFinite(value));
  if (!known.length) return null;
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  if (known.length < 2) return { mean, low: null, high: null };
  const variance = known.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (known.length - 1);
  const half = studentT(known.length - 1) * Math.sqrt(variance / known.length);
  return { mean, low: mean - half, high: mean + half };
}

/** What each row of a run's metrics is drawn at; null if the run lacks what the axis needs. */
export function axisOf(axis, { steps, series }) {
  if (axis === "divergence") return series.kl_k1 ? rising(smoothed(series.kl_k1, Math.ceil(steps.length / 5))) : null;
  if (axis !== "samples") return steps;
  const { samples_per_second: rate, seconds_step: seconds } = series;
  if (!rate || !seconds) return null;
  let made = 0;
  let before = -1;
  return steps.map((step, i) => {
    made += (rate[i] ?? 0) * (seconds[i] ?? 0) * (step - before); // a row may be the mean of several steps
    before = step;
    return made;
  });
}

function rising(values) {
  let most = -Infinity;
  return values.map((value) => (most = Math.max(most, value ?? most)));
}

/** Points [x, y] of one run's metric as a moving mean, with x that only rises; null if there are none. */
export function pointsOf(axis, metric, metrics) {
  const xs = axisOf(axis, metrics);
  const values = metrics.series[metric];
  if (!xs || !values) return null;
  const drawn = smoothed(values, Math.max(1, Math.round(values.length / 20)));
  const points = [];
  drawn.forEach((value, i) => {
    if (value !== null && Number.isFinite(xs[i]) && (!points.length || xs[i] > points.at(-1)[0])) points.push([xs[i], value]);
  });
  return points.length ? points : null;
}

/** An axis from the first to the last x of any curve. */
export function sharedAxis(curves, whole) {
  const low = Math.min(...curves.map((points) => points[0][0]));
  const high = Math.max(...curves.map((points) => points.at(-1)[0]));
  const count = whole ? Math.min(POINTS, high - low + 1) : POINTS;
  const at = (i) => low + ((high - low) * i) / Math.max(1, count - 1);
  return Array.from({ length: high > low ? count : 1 }, (_, i) => (whole ? Math.round(at(i)) : at(i)));
}

/** The value at `x` on the line through the points; null outside of them. */
export function valueAt(points, x) {
  if (x < points[0][0] || x > points.at(-1)[0]) return null;
  const right = points.findIndex(([each]) => each >= x);
  if (points[right][0] === x) return points[right][1];
  const [[x0, y0], [x1, y1]] = [points[right - 1], points[right]];
  return y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
}

/** Mean and interval at each x where every curve has a value, null elsewhere. */
export function bandOver(curves, xs) {
  return xs.map((x) => {
    const values = curves.map((points) => valueAt(points, x));
    return values.includes(null) ? null : interval(values);
  });
}
