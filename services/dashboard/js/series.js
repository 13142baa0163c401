// The metrics of one run as columns, of bounded size however long the run is.

const MOST = 4000; // most points kept; when there are more, the older ones are averaged in buckets
const BUCKETS = 2000; // most buckets over the whole run
const FRESH = 1000; // newest points, which are not averaged

/** Columns by step. A row whose step is not greater than the last one replaces that step and all later ones. */
export class MetricStore {
  constructor() {
    this.steps = [];
    this.columns = new Map();
    this.total = 0;
  }

  /** Replace everything by the response of `/metrics`. */
  load({ steps, series, total }) {
    this.steps = steps.slice();
    this.columns = new Map(Object.entries(series).map(([name, values]) => [name, values.slice()]));
    this.total = total ?? steps.length;
    if (this.steps.length > MOST) this.thin();
  }

  add(rows) {
    for (const row of rows) this.addOne(row);
  }

  addOne(row) {
    if (!Number.isFinite(row.step)) return;
    while (this.steps.length && this.steps.at(-1) >= row.step) this.pop();
    const length = this.steps.length;
    this.steps.push(row.step);
    for (const column of this.columns.values()) column.push(null);
    for (const [name, value] of Object.entries(flat(row))) {
      if (name === "step" || typeof value !== "number") continue;
      let column = this.columns.get(name);
      if (!column) this.columns.set(name, (column = new Array(length + 1).fill(null)));
      column[length] = value;
    }
    this.total = Math.max(this.total, row.step + 1);
    if (this.steps.length > MOST) this.thin();
  }

  pop() {
    this.steps.pop();
    for (const column of this.columns.values()) column.pop();
  }

  thin() {
    const old = this.steps.length - FRESH;
    const span = this.steps.at(-1) - this.steps[0] + 1;
    const width = 2 ** Math.ceil(Math.log2(Math.max(1, span / BUCKETS))); // powers of two: old buckets fit in new ones
    const ends = []; // the last point of each bucket
    for (let i = 0; i < old; i += 1) {
      if (i + 1 === old || Math.floor(this.steps[i] / width) !== Math.floor(this.steps[i + 1] / width)) ends.push(i);
    }
    // A point stands for the steps since the previous one, because it may itself be a mean.
    const weights = this.steps.map((step, i) => (i ? step - this.steps[i - 1] : 1));
    for (const [name, column] of this.columns) {
      this.columns.set(name, [...means(column, weights, ends), ...column.slice(old)]);
    }
    this.steps = [...ends.map((i) => this.steps[i]), ...this.steps.slice(old)];
  }

  names() {
    return [...this.columns.keys()].sort();
  }

  has(name) {
    return this.columns.get(name)?.some((value) => value !== null) ?? false;
  }

  /** Values of a metric, one per entry of `steps`; null if missing. */
  values(name) {
    return this.columns.get(name) ?? new Array(this.steps.length).fill(null);
  }

  last(name) {
    return this.columns.get(name)?.findLast((value) => value !== null) ?? null;
  }

  /** Mean of the newest `count` values. */
  recent(name, count) {
    const values = (this.columns.get(name) ?? []).slice(-count).filter((value) => value !== null);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  }

  /** The metrics whose names match `pattern`, such as pass_at_4, with their number and sorted by it. */
  family(pattern) {
    return this.names()
      .map((name) => [name, pattern.exec(name)])
      .filter(([, match]) => match)
      .map(([name, match]) => ({ name, number: Number(match[1]) }))
      .sort((a, b) => a.number - b.number);
  }
}

/** A histogram becomes one column per bin, such as `lag_histogram.2`. */
function flat(row) {
  const result = {};
  for (const [name, value] of Object.entries(row)) {
    if (value !== null && typeof value === "object") {
      for (const [bin, part] of Object.entries(value)) result[`${name}.${bin}`] = part;
    } else result[name] = value;
  }
  return result;
}

/** The weighted mean of the values in each bucket; null if there is none. */
function means(column, weights, ends) {
  let i = 0;
  return ends.map((end) => {
    let sum = 0;
    let weight = 0;
    for (; i <= end; i += 1) {
      if (column[i] === null) continue;
      sum += weights[i] * column[i];
      weight += weights[i];
    }
    return weight ? sum / weight : null;
  });
}
