// The metrics of one run in columns, bounded in size however long the run is.

const MOST = 4000; // points kept; beyond it the older ones are merged in pairs
const FRESH = 1000; // newest points, never merged

/** Columns by step. A row whose step is not beyond the last one takes the place of all from its step on. */
export class MetricStore {
  constructor() {
    this.steps = [];
    this.columns = new Map();
    this.total = 0;
  }

  /** The answer of `/metrics`, in place of everything. */
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
    const whole = this.steps.length - FRESH;
    const old = whole - (whole % 2);
    this.steps = merge(this.steps, old, (a, b) => b);
    for (const [name, column] of this.columns) this.columns.set(name, merge(column, old, mean));
  }

  names() {
    return [...this.columns.keys()].sort();
  }

  has(name) {
    return this.columns.get(name)?.some((value) => value !== null) ?? false;
  }

  /** Values of a metric, one for each of `steps`; nulls where it has none. */
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

  /** Names such as pass_at_4 of a family, with their number, in order of it. */
  family(pattern) {
    return this.names()
      .map((name) => [name, pattern.exec(name)])
      .filter(([, match]) => match)
      .map(([name, match]) => ({ name, number: Number(match[1]) }))
      .sort((a, b) => a.number - b.number);
  }
}

/** A histogram becomes a column for each of its bins: `lag_histogram.2`. */
function flat(row) {
  const result = {};
  for (const [name, value] of Object.entries(row)) {
    if (value !== null && typeof value === "object") {
      for (const [bin, part] of Object.entries(value)) result[`${name}.${bin}`] = part;
    } else result[name] = value;
  }
  return result;
}

function mean(a, b) {
  if (a === null) return b;
  return b === null ? a : (a + b) / 2;
}

function merge(values, old, pair) {
  const result = [];
  for (let i = 0; i < old; i += 2) result.push(pair(values[i], values[i + 1]));
  for (let i = old; i < values.length; i += 1) result.push(values[i]);
  return result;
}
