// A card with one chart: a title, a legend with the values under the cursor, and uPlot at a fixed height.

import uPlot from "../../vendor/uplot.min.js";
import { h, setText } from "../dom.js";
import { number, short } from "../format.js";
import { color, faded } from "../palette.js";
import { calmTop } from "./range.js";

/**
 * Options
 *   title, note     heading, and a few words next to it
 *   size            "", "tall" or "small"
 *   range           [least, most] of y, either null to follow the data
 *   format          value -> text
 *   xFormat, xName  format and name of the values on the x axis
 *   sync            charts with one key share their cursor
 *   stacked         series are shares, or parts of a sum
 *   calm            cut off a few values far above the others, and say so
 *   log2            x is the exponent of a power of two
 *
 * Series of `draw`: {label, color (name in the style sheet), values, points (only points), dash, width, band: [low, high],
 * quiet (not in the legend, because another series with its label is)}
 */
export class Chart {
  constructor(options) {
    this.options = { format: number, xFormat: number, xName: "step", range: [null, null], ...options };
    this.legend = h("div", { class: "legend" });
    this.none = h("div", { class: "none" }, "Loading…");
    const { title, note, size } = this.options;
    this.plot = h("div", { class: "plot", role: "img", "aria-label": title }, this.none);
    this.at = h("span", { class: "at" });
    this.note = h("span", { class: "soft clip" }, note ?? "");
    this.element = h(
      "section",
      { class: `card chart ${size ?? ""}` },
      h("header", {}, h("h2", {}, title), this.note, this.at),
      this.legend,
      this.plot,
    );
    this.hiddenLabels = new Set();
    this.uplot = null;
    this.shape = "";
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.plot);
    this.repaint = () => this.rebuild();
    addEventListener("volley-theme", this.repaint);
  }

  /** Name the x axis, and say whether its values are whole numbers. */
  name(xName, wholeX) {
    if (this.options.xName === xName) return;
    Object.assign(this.options, { xName, wholeX });
    this.shape = ""; // the axes are made anew
  }

  close() {
    removeEventListener("volley-theme", this.repaint);
    this.sizes.disconnect();
    this.uplot?.destroy();
    this.uplot = null;
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!width) return;
    if (!this.uplot && this.drawn) this.rebuild();
    else if (this.uplot && (this.uplot.width !== width || this.uplot.height !== height)) this.uplot.setSize({ width, height });
  }

  /** Show `series` over `xs`. The plot is rebuilt only if the set of series changes. */
  draw(xs, series) {
    this.drawn = { xs, series };
    const shape = JSON.stringify(series.map(({ label, color: name, points, dash, band }) => [label, name, points, dash, Boolean(band)]));
    const any = xs.length > 0 && series.some(({ values }) => values.some((value) => value !== null));
    this.none.hidden = any;
    if (!any) {
      setText(this.none, "No values yet");
      this.plot.setAttribute("aria-label", `${this.options.title}. No values yet`);
      this.uplot?.destroy();
      this.uplot = null;
      this.shape = "";
      this.legend.replaceChildren();
      return;
    }
    if (shape !== this.shape || !this.uplot) {
      this.shape = shape;
      this.rebuild();
    } else {
      this.uplot.setData(this.columns());
      this.showValues(this.uplot.cursor.idx);
    }
  }

  /** x, then a column for each line: bands first, so that lines lie over them. */
  columns() {
    const { xs, series } = this.drawn;
    const bands = series.flatMap(({ band }) => (band ? [band[0], band[1]] : []));
    return [xs, ...bands, ...(this.options.stacked ? this.stack(series) : series.map(({ values }) => values))];
  }

  /** Sums from the first series on; the top one is drawn first. */
  stack(series) {
    const sums = new Array(this.drawn.xs.length).fill(0);
    const columns = series.map(({ label, values }) => {
      if (!this.hiddenLabels.has(label)) values.forEach((value, i) => (sums[i] += value ?? 0));
      return sums.slice();
    });
    return columns.reverse();
  }

  rebuild() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!this.drawn || !width || !this.none.hidden) return;
    this.uplot?.destroy();
    this.uplot = new uPlot({ width, height, ...this.settings() }, this.columns(), this.plot);
    this.makeLegend();
  }

  settings() {
    const { sync, xFormat, format } = this.options;
    const axis = { stroke: color("faint"), font: "11px Inter, sans-serif", grid: { stroke: color("grid"), width: 1 }, ticks: { show: false } };
    const splits = (formatter) => (_, values) => values.map((value) => (value === null ? "" : short(formatter(value))));
    return {
      legend: { show: false },
      padding: [10, 14, 0, 0],
      cursor: {
        sync: sync ? { key: sync } : undefined,
        drag: { x: true, y: false },
        points: { size: 7 },
      },
      scales: { x: { time: false }, y: { range: (plot, low, high) => this.range(low, this.calmed(plot, high)) } },
      axes: [
        { ...axis, size: 30, space: 60, values: splits(xFormat), ...this.xSplits() },
        { ...axis, size: 50, space: 34, values: splits(format) },
      ],
      ...this.lines(),
      hooks: { setCursor: [(plot) => this.showValues(plot.cursor.idx)] },
    };
  }

  xSplits() {
    if (this.options.log2) return { splits: () => this.drawn.xs };
    return this.options.wholeX ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] } : {};
  }

  /** Where the y axis ends: `high`, or lower if a few of the visible values are far above the others. */
  calmed(plot, high) {
    if (!this.options.calm || high === null) return high;
    const { min, max } = plot.scales.x;
    const tops = this.columns()[1].filter((_, i) => (min ?? -Infinity) <= this.drawn.xs[i] && this.drawn.xs[i] <= (max ?? Infinity));
    const top = calmTop(tops, high);
    setText(this.note, top < high ? `cut off at ${this.options.format(top)}, highest ${this.options.format(high)}` : this.options.note);
    return top;
  }

  range(low, high) {
    const [least, most] = this.options.range;
    if (low === null) return [least ?? 0, most ?? 1];
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    return [least ?? low - room, most ?? high + room];
  }

  lines() {
    const { series } = this.drawn;
    const bands = [];
    const lines = [{}];
    for (const { band, color: name } of series) {
      if (!band) continue;
      lines.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
      bands.push({ series: [lines.length - 1, lines.length - 2], fill: faded(name, 0.14) });
    }
    this.first = lines.length;
    const drawn = this.options.stacked ? series.toReversed() : series;
    for (const each of drawn) lines.push(this.line(each));
    return { series: lines, bands };
  }

  line({ label, color: name, points, dash, width }) {
    const { stacked } = this.options;
    const show = stacked || !this.hiddenLabels.has(label);
    if (points) {
      const size = typeof points === "number" ? points : 5;
      return { label, show, stroke: color(name), paths: () => null, points: { show: true, size, width: 1.5, fill: size > 6 ? color("card") : faded(name, 0.4) } };
    }
    if (stacked) return { label, show, stroke: color("card"), width: 1, fill: faded(name, 1), points: { show: false } };
    return { label, show, stroke: color(name), width: width ?? 1.75, dash, spanGaps: true, points: { show: this.options.dots ?? this.drawn.xs.length < 2, size: 5 } };
  }

  spoken() {
    return this.drawn.series.filter(({ quiet }) => !quiet);
  }

  makeLegend() {
    this.values = this.spoken().map(({ label, color: name }) => {
      const value = h("b", {});
      const key = h(
        "button",
        { class: "key", type: "button", "aria-pressed": String(!this.hiddenLabels.has(label)) },
        h("span", { class: "swatch", style: { background: `var(--${name})` } }),
        label,
        " ",
        value,
      );
      key.addEventListener("click", () => this.toggle(label, key));
      return { key, value };
    });
    this.legend.replaceChildren(...this.values.map(({ key }) => key));
    this.showValues(null);
  }

  toggle(label, key) {
    const hide = !this.hiddenLabels.has(label);
    if (hide) this.hiddenLabels.add(label);
    else this.hiddenLabels.delete(label);
    key.setAttribute("aria-pressed", String(!hide));
    if (this.options.stacked) {
      this.uplot.setData(this.columns());
      return;
    }
    this.uplot.series.forEach((each, i) => {
      if (i >= this.first && each.label === label) this.uplot.setSeries(i, { show: !hide });
    });
  }

  /** Show the values under the cursor, or the newest. */
  showValues(index) {
    const { format, title, xName, xFormat } = this.options;
    if (!this.values) return;
    const x = this.drawn.xs[index ?? -1];
    setText(this.at, x === undefined ? "" : `${xName} ${xFormat(x)}`.trim());
    const series = this.spoken();
    const shown = series.map(({ values }) => (index === null || index === undefined ? values.findLast((v) => v !== null) : nearest(values, index)));
    shown.forEach((value, i) => setText(this.values[i].value, value === null || value === undefined ? "" : format(value)));
    if (index === null || index === undefined) {
      const spoken = series.map(({ label }, i) => `${label} ${shown[i] === undefined ? "none" : format(shown[i])}`).join(", ");
      this.plot.setAttribute("aria-label", `${title}. Newest: ${spoken}`);
    }
  }
}

/** The value at `index`, or for a sparse series the last one before it. */
function nearest(values, index) {
  for (let i = index; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}
