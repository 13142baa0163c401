// The machines: their total and free resources, and which run holds which resources.

import { get } from "../api.js";
import { fill, h } from "../dom.js";
import { bytes, number } from "../format.js";
import { empty, failed, loading } from "../states.js";

const LOOK_MS = 5000;
const MEMORY = new Set(["memory", "object_store_memory"]);
const ROLES = { actor: "Actors", reward_worker: "Reward workers", environment_worker: "Environment workers", learner_rank: "Learner ranks" };

export class ClusterPage {
  title = "Cluster";

  constructor() {
    this.body = h("div", { class: "page" }, loading(200));
    this.element = h("div", { class: "page" }, h("h1", {}, "Cluster"), this.body);
    this.load();
    this.clock = setInterval(() => document.hidden || this.load(), LOOK_MS);
  }

  close() {
    this.closed = true;
    clearInterval(this.clock);
  }

  async load() {
    if (this.busy) return;
    this.busy = true;
    try {
      const cluster = await get("v1/cluster");
      if (!this.closed) this.draw(cluster);
    } catch (error) {
      this.shown = null;
      fill(this.body, failed(error, () => this.load()));
      if (error.status === undefined) throw error;
    } finally {
      this.busy = false;
    }
  }

  draw(cluster) {
    const key = JSON.stringify(cluster);
    if (key === this.shown) return;
    this.shown = key;
    const { nodes, holders } = cluster;
    fill(
      this.body,
      nodes.length ? h("div", { class: "nodes" }, nodes.map(nodeCard)) : empty("No nodes", "Ray has no live node."),
      h("section", { class: "card" }, h("header", {}, h("h3", {}, "Who holds what")), holders.length ? holderTable(holders) : h("p", { class: "card-body soft" }, "No run holds resources.")),
    );
  }
}

function nodeCard(node) {
  const names = Object.keys(node.resources).filter((name) => !name.startsWith("node:")).sort();
  return h(
    "section",
    { class: "card" },
    h("header", {}, h("h3", {}, node.address), h("span", { class: "badge end", data: { tone: node.alive ? "good" : "bad" } }, node.alive ? "alive" : "dead")),
    h("div", { class: "card-body stack" }, h("span", { class: "mono small faint clip" }, node.id), names.map((name) => resource(name, node.resources[name], node.available[name]))),
  );
}

/** `free` is undefined if the node does not report it. */
function resource(name, whole, free) {
  const line = (text) => h("div", { class: "line" }, h("span", {}, name.replaceAll("_", " ")), h("span", { class: "soft num" }, text));
  if (free === undefined) return h("div", { class: "resource" }, line((MEMORY.has(name) ? bytes : number)(whole)));
  const used = Math.max(0, whole - free);
  const share = whole ? used / whole : 0;
  const text = MEMORY.has(name) ? bytes : number;
  const tone = MEMORY.has(name) && share > 0.9 ? "warn" : ""; // full processors are fine
  const bar = h("div", { class: "bar", data: { tone }, role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": whole, "aria-valuenow": used }, h("span", { style: { width: `${100 * share}%` } }));
  return h("div", { class: "resource" }, line(`${text(used)} of ${text(whole)}`), bar);
}

function holderTable(holders) {
  const heads = [["Run"], ["Role"], ["Count", "right"], ["CPUs", "right"], ["GPUs", "right"]];
  const rows = holders.map((each) =>
    h(
      "tr",
      {},
      h("td", {}, h("a", { href: `#/runs/${encodeURIComponent(each.run)}` }, each.run)),
      h("td", {}, ROLES[each.role] ?? each.role),
      [each.count, each.cpus, each.gpus].map((value) => h("td", { class: "right num" }, number(value))),
    ),
  );
  return h("div", { class: "table-wrap card-body" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map(([label, side]) => h("th", { scope: "col", class: side }, label)))), h("tbody", {}, rows)));
}
