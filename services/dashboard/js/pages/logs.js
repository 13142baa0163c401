// The newest lines of each process's log.

import { remember, runAddress } from "../address.js";
import { get, query, runPath } from "../api.js";
import { fill, h } from "../dom.js";
import { bytes } from "../format.js";
import { empty, show } from "../states.js";

const TAIL = 65_536; // bytes

export class LogsTab {
  constructor(model, params) {
    this.id = model.id;
    this.abort = new AbortController();
    this.wanted = params.get("process");
    this.choice = h("select", { "aria-label": "Process" });
    this.choice.addEventListener("change", () => {
      remember(runAddress(this.id, "logs"), { process: this.choice.value });
      this.load();
    });
    const again = h("button", { class: "button", type: "button", onclick: () => this.load() }, "Reload");
    this.body = h("div", {});
    this.bar = h("div", { class: "filters hidden" }, this.choice, again);
    this.element = h("div", { class: "page" }, this.bar, h("div", { class: "card" }, this.body));
    show(this.body, () => this.start());
  }

  close() {
    this.abort.abort();
  }

  async start() {
    const { items } = await get(runPath(this.id, "/logs"), { signal: this.abort.signal });
    if (!items.length) return empty("No logs yet", "Logs appear once the run's driver has started.");
    this.bar.classList.remove("hidden");
    const size = (value) => (value === null ? "" : `, ${bytes(value)}`);
    fill(this.choice, items.map(({ process, bytes: length }) => h("option", { value: process }, `${process}${size(length)}`)));
    if (items.some(({ process }) => process === this.wanted)) this.choice.value = this.wanted;
    return this.text();
  }

  load() {
    return show(this.body, () => this.text());
  }

  async text() {
    const path = runPath(this.id, `/logs/${encodeURIComponent(this.choice.value)}${query({ tail: TAIL })}`);
    const text = await get(path, { text: true, signal: this.abort.signal });
    const box = h("pre", { class: "log", tabindex: "0" }, text || "The log is empty.");
    requestAnimationFrame(() => (box.scrollTop = box.scrollHeight));
    return box;
  }
}
