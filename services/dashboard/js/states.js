// What a page shows while it has nothing to show, and why.

import { fill, h } from "./dom.js";

export function loading(height = 220) {
  return h("div", { class: "skeleton", "aria-busy": "true", "aria-label": "Loading", style: { height: `${height}px` } });
}

export function empty(title, ...lines) {
  return h("div", { class: "empty" }, h("strong", {}, title), lines.map((line) => h("span", {}, line)));
}

/** An error with a way on. */
export function failed(error, again) {
  const title = error.status === 404 ? "There is no such thing here" : error.title || "That did not work";
  return h(
    "div",
    { class: "empty", role: "alert" },
    h("strong", {}, title),
    h("span", {}, error.message),
    again && h("button", { class: "button", type: "button", onclick: again }, "Try again"),
  );
}

/**
 * Show `load()`'s element in `box`: a placeholder while it loads, the problem if it fails. What an outdated request
 * brings is let go.
 */
export async function show(box, load, { height } = {}) {
  const turn = (box.volleyTurn = (box.volleyTurn ?? 0) + 1);
  fill(box, loading(height));
  try {
    const content = await load();
    if (box.volleyTurn === turn) fill(box, content);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (box.volleyTurn === turn) fill(box, failed(error, () => show(box, load, { height })));
    if (error.status === undefined) throw error; // a fault of this page: the console should have it
  }
}
