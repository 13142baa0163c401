// The first tab of a run: key numbers, controls, charts, processes, events.

import { remember, runAddress } from "../address.js";
import { Timeline } from "../charts/timeline.js";
import { fill, h, setText } from "../dom.js";
import { ENDED } from "../palette.js";
import { failed } from "../states.js";
import { Stepper } from "./run_actions.js";
import { anyMetric, chartsOf } from "./run_charts.js";
import { Events, LedgerCounts, Tiles, Workers } from "./run_panels.js";

const SMOOTHING = 40; // a smoothed point is the mean over one part in 40 of the curve

export class OverviewTab {
  constructor(model, params) {
    this.params = params;
    const { kind } = model.view.record;
    this.charts = chartsOf(kind);
    this.tiles = new Tiles(kind);
    this.timeline = kind === "rl" ? new Timeline() : null;
    this.panels = [new Workers(), new Events(), ...(kind === "rl" ? [new LedgerCounts()] : [])];
    this.others = new Map();
    this.problem = h("div", {});
    this.element = h(
      "div",
      { class: "page" },
      this.tiles.element,
      kind === "rl" ? this.makeControls(model) : null,
      this.problem,
      h("div", { class: "grid" }, this.ordered()),
      this.makeOthers(model),
    );
    this.model = model;
  }

  /** The timeline comes after the charts of results and before the charts of the training itself. */
  ordered() {
    const charts = this.charts.map(({ chart }) => chart.element);
    return [charts.slice(0, 4), this.timeline?.element, charts.slice(4), this.panels.map(({ element }) => element)];
  }

  close() {
    this.closed = true;
    for (const { chart } of [...this.charts, ...this.others.values()]) chart.close();
    this.timeline?.close();
  }

  makeControls(model) {
    const onView = (view) => {
      Object.assign(model.view, view);
      this.drawControls(model);
    };
    this.actors = new Stepper(model.id, "actors", "Actors", 0, onView);
    this.rewards = new Stepper(model.id, "reward_workers", "Reward workers", 1, onView);
    const programs = model.view.record.job.rollout;
    this.environments = programs ? new Stepper(model.id, "environment_workers", "Environment workers", 1, onView) : null;
    this.smooth = h("input", { type: "checkbox", checked: this.params.get("smooth") !== "no" });
    this.smooth.addEventListener("change", () => {
      this.remember();
      this.draw(this.model);
    });
    this.smoothText = h("span", {}, "Smooth curves");
    const smooth = h("label", { class: "check" }, this.smooth, this.smoothText);
    return h("div", { class: "card controls" }, this.actors.element, this.rewards.element, this.environments?.element, smooth);
  }

  makeOthers(model) {
    const grid = h("div", { class: "grid three" });
    const details = h("details", { open: this.params.get("all") === "yes" }, h("summary", {}, "All metrics"), grid);
    details.addEventListener("toggle", () => {
      if (!this.closed) this.remember();
      this.drawOthers(model);
    });
    this.details = details;
    this.othersGrid = grid;
    return model.view.record.kind === "eval" ? null : details;
  }

  /** Keep in the address what differs from what the page shows at first. */
  remember() {
    remember(runAddress(this.model.id), { smooth: this.smooth?.checked === false ? "no" : "", all: this.details.open ? "yes" : "" });
  }

  drawControls({ view }) {
    if (!this.actors) return;
    const { desired, observed, record, state } = view;
    const ended = ENDED.has(state);
    this.actors.update(observed.actors, desired.actors ?? record.job.actors?.count ?? 0, ended);
    const environments = desired.environment_workers ?? record.job.environment_workers?.count ?? 0;
    this.environments?.update(observed.environment_workers, environments, ended);
    this.rewards.update(observed.reward_workers, desired.reward_workers ?? record.job.reward_workers?.count ?? 0, ended);
  }

  drawOthers(model) {
    if (!this.details.open) return;
    const names = model.metrics.names().filter((name) => name !== "time");
    for (const name of names) {
      if (this.others.has(name)) continue;
      const one = anyMetric(name, this.others.size);
      this.others.set(name, one);
      this.othersGrid.append(one.chart.element);
    }
    for (const one of this.others.values()) one.draw(model);
  }

  draw(model, again) {
    const window = Math.max(1, Math.round(model.metrics.steps.length / SMOOTHING));
    model.window = this.smooth?.checked ? window : 1;
    if (this.smooth) setText(this.smoothText, model.window > 1 ? `Smooth curves (mean of ${model.window} points)` : "Smooth curves");
    fill(this.problem, model.problem && failed(model.problem, again));
    this.tiles.draw(model);
    this.drawControls(model);
    for (const chart of this.charts) chart.draw(model);
    if (this.timeline && this.timeline.items !== model.timeline) this.timeline.draw(model.timeline);
    for (const panel of this.panels) panel.draw(model);
    this.drawOthers(model);
  }
}
