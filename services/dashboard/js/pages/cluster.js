// The machines: their total and free resources; the queue, and who holds what; who changed what.

import { get } from "../api.js";
import { fill, h, scrolling } from "../dom.js";
import { ago, bytes, moment, number, plain } from "../format.js";
import { empty, failed, loading } from "../states.js";

const LOOK_MS = 5000;
const CHANGES = 50; // audit records shown
const HOLDS = { admitted: "holds", stopping: "stops" }; // instead of a position
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
      const [cluster, queue, audit] = await Promise.all([get("v1/cluster"), get("v1/queue"), this.changes()]);
      if (!this.closed) this.draw(cluster, queue, audit);
    } catch (error) {
      this.shown = null;
      fill(this.body, failed(error, () => this.load()));
      if (error.status === undefined) throw error;
    } finally {
      this.busy = false;
    }
  }

  /** The newest audit records; null if the token's scope does not allow to see them. */
  async changes() {
    if (this.unaudited) return null;
    try {
      return (await get(`v1/audit?limit=${CHANGES}`)).items;
    } catch (error) {
      if (error.status !== 403) throw error;
      this.unaudited = true;
      return null;
    }
  }

  draw(cluster, queue, audit) {
    const key = JSON.stringify([cluster, queue, audit]);
    if (key === this.shown) return;
    this.shown = key;
    const { nodes, holders } = cluster;
    const owners = queue.owners.filter(({ name }) => name);
    fill(
      this.body,
      nodes.length ? h("div", { class: "nodes" }, nodes.map(nodeCard)) : empty("No nodes", "Ray has no live node."),
      card("Queue", queue.items.length ? queueTable(queue.items) : nothing("No run holds resources, and none waits.")),
      owners.length ? card("Quotas", ownerTable(owners)) : null,
      card("Who holds what", holders.length ? holderTable(holders) : nothing("No run holds resources.")),
      audit && card("Who changed what", audit.length ? auditTable(audit) : nothing("No changes.")),
    );
  }
}

const card = (title, body) => h("section", { class: "card" }, h("header", {}, h("h2", {}, title)), body);
const nothing = (text) => h("p", { class: "card-body soft" }, text);
const runLink = (id) => h("a", { href: `#/runs/${encodeURIComponent(id)}` }, id);

/** `heads`: pairs of a label and "right" for numbers; `rows`: lists of cells. */
function table(label, heads, rows) {
  const head = h("tr", {}, heads.map(([label, side]) => h("th", { scope: "col", class: side }, label)));
  const body = rows.map((cells) => h("tr", {}, cells.map((cell, i) => h("td", { class: heads[i][1] && "right num" }, cell))));
  return scrolling(label, { class: "table-wrap card-body" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

function queueTable(places) {
  const heads = [["Place"], ["Run"], ["Owner"], ["Priority", "right"], ["CPUs", "right"], ["GPUs", "right"], ["Since"], ["Reason"]];
  const rows = places.map((each) => [
    HOLDS[each.state] ?? each.position,
    runLink(each.run),
    each.owner,
    String(each.priority),
    number(each.resources.CPU ?? 0),
    number(each.resources.GPU ?? 0),
    ago(each.since),
    each.state === "admitted" ? "" : [each.preempted_by && `preempted by ${each.preempted_by}`, each.reason].filter(Boolean).join("; "),
  ]);
  return table("Queue", heads, rows);
}

function ownerTable(owners) {
  const share = (held, limit) => (limit === null ? number(held) : `${number(held)} of ${number(limit)}`);
  const heads = [["Owner"], ["Runs", "right"], ["CPUs", "right"], ["GPUs", "right"]];
  const rows = owners.map(({ name, limits, ...held }) => [name, ...["runs", "cpus", "gpus"].map((each) => share(held[each], limits[each]))]);
  return table("Quotas", heads, rows);
}

function auditTable(records) {
  const rows = records.map((each) => [
    moment(each.time),
    each.who,
    each.action,
    each.run && runLink(each.run),
    Object.entries(each.details).map(([name, value]) => `${name}=${plain(value)}`).join("  "),
  ]);
  return table("Changes", [["Time"], ["Who"], ["Action"], ["Run"], ["Details"]], rows);
}

function nodeCard(node) {
  const names = Object.keys(node.resources).filter((name) => !name.startsWith("node:")).sort();
  return h(
    "section",
    { class: "card" },
    h("header", {}, h("h2", {}, node.address), h("span", { class: "badge end", data: { tone: node.alive ? "good" : "bad" } }, node.alive ? "alive" : "dead")),
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
  const rows = holders.map((each) => [runLink(each.run), ROLES[each.role] ?? each.role, ...[each.count, each.cpus, each.gpus].map(number)]);
  return table("What runs hold", heads, rows);
}
