// All fields of the job, and the values that were changed since the run started.

import { remember, runAddress } from "../address.js";
import { h, scrolling } from "../dom.js";
import { plain } from "../format.js";

/** Flatten a tree to rows such as "update.kl.coefficient" -> value; the weights of an objective stay together. */
export function flattened(tree, path = "", rows = new Map()) {
  for (const [key, value] of Object.entries(tree)) {
    const name = path ? `${path}.${key}` : key;
    const branch = value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).some((each) => !/^\d+$/.test(each));
    if (branch) flattened(value, name, rows);
    else rows.set(name, value);
  }
  return rows;
}

export class JobTab {
  constructor(model, params) {
    this.body = h("tbody");
    this.search = h("input", { type: "search", placeholder: "Find a field", "aria-label": "Find a field", value: params.get("find") ?? "" });
    this.search.addEventListener("input", () => {
      remember(runAddress(model.id, "job"), { find: this.search.value });
      this.draw(model);
    });
    const head = h("tr", {}, ["Field", "Value", "Changed to"].map((each) => h("th", { scope: "col" }, each)));
    const table = scrolling("Table of the job's fields", { class: "table-wrap" }, h("table", { class: "diff" }, h("thead", {}, head), this.body));
    const folder = h("span", { class: "soft small mono" }, model.view.record.folder);
    this.element = h("div", { class: "page" }, h("div", { class: "filters" }, this.search, folder), h("div", { class: "card" }, table));
    this.draw(model);
  }

  close() {}

  draw({ view }) {
    const { job } = view.record;
    const changes = changed(view.desired);
    const key = JSON.stringify([changes, this.search.value]);
    if (key === this.shown) return;
    this.shown = key;
    const wanted = this.search.value.trim().toLowerCase();
    const rows = [...flattened(job)].filter(([name]) => name.toLowerCase().includes(wanted));
    this.body.replaceChildren(
      ...rows.map(([name, value]) => {
        const now = changes[name];
        const differs = now !== undefined && plain(now) !== plain(value);
        return h("tr", { data: { differs } }, h("td", {}, name), h("td", {}, plain(value)), h("td", {}, differs ? plain(now) : ""));
      }),
    );
  }
}

/** The desired state, by the names of the job's fields. */
function changed({ actors, reward_workers: workers, environment_workers: environments, learning_rate: rate, max_lag: lag, objective }) {
  const all = { "actors.count": actors, "reward_workers.count": workers, "environment_workers.count": environments, "optimizer.lr": rate, max_lag: lag };
  for (const [key, value] of Object.entries(objective ?? {})) all[`objective.${key}`] = value;
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value !== null && value !== undefined));
}
