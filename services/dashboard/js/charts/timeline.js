// The timeline: one lane per process, one bar per span of work. The bottleneck is the lane without gaps.

import { h, setText } from "../dom.js";
import { duration, short } from "../format.js";
import { color } from "../palette.js";

const STAGES = {
  generate: "Generation",
  environment: "Environment",
  score: "Scoring",
  learn: "Learning",
  publish: "Publishing",
  update: "Weight update",
};
const ORDER = ["actor", "environment", "reward", "learner"];
const LANE = 26;
const AXIS = 24;
const MOST_LANES = 40;
const LONG_GAP = 8; // times the usual duration of a step

export class Timeline {
  constructor() {
    this.canvas = h("canvas", { role: "img", tabindex: "-1", height: 60, hidden: true });
    this.tip = h("div", { class: "tip", hidden: true });
    this.busy = h("span", { class: "soft" });
    const keys = Object.entries(STAGES).map(([stage, label]) =>
      h("span", { class: "key" }, h("span", { class: "swatch", style: { background: `var(--stage-${stage})` } }), label),
    );
    this.none = h("p", { class: "soft small" }, "Loading…");
    this.frame = h("div", { class: "timeline" }, this.none, this.canvas, this.tip);
    this.element = h(
      "section",
      { class: "card chart wide" },
      h("header", {}, h("h2", {}, "Where the time goes, by process"), this.busy),
      h("div", { class: "legend" }, keys),
      this.frame,
    );
    this.items = null;
    this.sizes = new ResizeObserver(() => this.paint());
    this.sizes.observe(this.frame);
    this.repaint = () => this.paint();
    addEventListener("volley-theme", this.repaint);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
  }

  close() {
    removeEventListener("volley-theme", this.repaint);
    this.sizes.disconnect();
  }

  /** `items` of `/timeline`, newest last. */
  draw(items) {
    this.items = items;
    const spans = sinceGap(items).flatMap((item) => item.spans.map((span) => [...span, item.step]));
    this.none.hidden = spans.length > 0;
    setText(this.none, "No steps yet.");
    this.canvas.hidden = spans.length === 0;
    const names = [...new Set(spans.map(([process]) => process))].sort(byRole);
    this.lanes = new Map(names.slice(0, MOST_LANES).map((name, i) => [name, i]));
    this.left = Math.min(...spans.map((span) => span[2]));
    this.right = Math.max(...spans.map((span) => span[3]));
    this.bars = spans.filter(([process]) => this.lanes.has(process));
    if (spans.length) this.showShares();
    this.paint();
  }

  /** Show the share of time each process was working; the busiest one is the bottleneck. */
  showShares() {
    const whole = this.right - this.left || 1;
    const shares = [...this.lanes.keys()].map((name) => [name, covered(this.bars.filter(([process]) => process === name)) / whole]);
    const [name, share] = shares.reduce((best, each) => (each[1] > best[1] ? each : best));
    setText(this.busy, `busiest: ${name}, ${Math.round(100 * share)}% of ${duration(whole)}`);
    this.canvas.setAttribute("aria-label", `Share of the time at work: ${shares.map(([each, part]) => `${each} ${Math.round(100 * part)}%`).join(", ")}`);
  }

  paint() {
    const width = this.frame.clientWidth;
    if (!width || !this.bars?.length) return;
    const height = this.lanes.size * LANE + AXIS;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.margin = Math.min(86, width * 0.24);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "11px Inter, sans-serif";
    context.textBaseline = "middle";
    this.paintGround(context, width, height);
    for (const bar of this.bars) this.paintBar(context, bar, width);
  }

  x(time, width) {
    return this.margin + ((time - this.left) / (this.right - this.left || 1)) * (width - this.margin - 4);
  }

  paintGround(context, width, height) {
    for (const [name, lane] of this.lanes) {
      const y = lane * LANE;
      context.fillStyle = color("sunk");
      context.fillRect(this.margin, y + 4, width - this.margin - 4, LANE - 8);
      context.fillStyle = color("soft");
      context.textAlign = "left";
      context.fillText(name, 0, y + LANE / 2, this.margin - 8);
    }
    context.fillStyle = color("faint");
    const seconds = niceStep((this.right - this.left) / Math.max(2, (width - this.margin) / 90));
    context.textAlign = "center";
    for (let at = 0; at <= this.right - this.left; at += seconds) {
      const x = this.x(this.left + at, width);
      context.fillRect(x, height - AXIS + 2, 1, 4);
      context.fillText(at === 0 ? "0" : short(duration(at)), Math.min(x, width - 20), height - AXIS / 2 + 3);
    }
  }

  paintBar(context, [process, stage, start, end], width) {
    const y = this.lanes.get(process) * LANE;
    const x = this.x(start, width);
    // Spans of one process may overlap, because an actor has many groups in flight.
    context.globalAlpha = ["generate", "environment", "score"].includes(stage) ? 0.6 : 1;
    context.fillStyle = color(`stage-${Object.hasOwn(STAGES, stage) ? stage : "generate"}`);
    context.fillRect(x, y + 4, Math.max(1.5, this.x(end, width) - x - 0.5), LANE - 8);
    context.globalAlpha = 1;
  }

  point(event) {
    const width = this.frame.clientWidth;
    const { offsetX, offsetY } = event;
    const hit = this.bars.findLast(([process, , start, end]) => {
      const inLane = Math.floor(offsetY / LANE) === this.lanes.get(process);
      return inLane && offsetX >= this.x(start, width) - 2 && offsetX <= this.x(end, width) + 2;
    });
    this.tip.hidden = !hit;
    if (!hit) return;
    const [process, stage, start, end, step] = hit;
    setText(this.tip, `${process} · ${STAGES[stage] ?? stage} · ${duration(end - start)} · step ${step}`);
    this.tip.style.top = `${offsetY + 16}px`;
    this.tip.style.left = `${Math.max(0, Math.min(offsetX + 12, width - this.tip.offsetWidth))}px`;
  }
}

/** The steps after the last long pause, which would otherwise compress them. */
function sinceGap(items) {
  const gaps = items.slice(1).map((item, i) => item.time - items[i].time);
  const usual = gaps.toSorted((a, b) => a - b)[gaps.length >> 1];
  return items.slice(gaps.findLastIndex((gap) => gap > LONG_GAP * usual) + 1);
}

function byRole(a, b) {
  const role = (name) => ORDER.findIndex((each) => name.startsWith(each));
  return role(a) - role(b) || a.localeCompare(b, "en", { numeric: true });
}

/** The seconds during which at least one of the spans runs. */
function covered(spans) {
  let sum = 0;
  let until = -Infinity;
  for (const [, , start, end] of spans.toSorted((a, b) => a[2] - b[2])) {
    sum += Math.max(0, end - Math.max(start, until));
    until = Math.max(until, end);
  }
  return sum;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? 10 * power;
}
