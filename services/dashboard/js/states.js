// What a page shows while it is loading, empty or failed.

import { fill, h } from "./dom.js";

export function loading(height = 220) {
  return h("div", { class: "skeleton", "aria-busy": "true", "aria-label": "Loading", style: { height: `${height}px` } });
}

export function empty(title, ...lines) {
  return h("div", { class: "empty" }, h("strong", {}, title), lines.map((line) => h("span", {}, line)));
}

/** An error, with a button to try again if `again` is given. */
export function failed(error, again) {
  const title = error.status === 404 ? "Not found" : error.title || "Something went wrong";
  return h(
    "div",
    { class: "empty", role: "alert" },
    h("strong", {}, title),
    h("span", {}, error.message),
    again && h("button", { class: "button", type: "button", onclick: again }, "Try again"),
  );
}

/**
 * Show the element that `load()` returns in `box`: a placeholder while it loads, the error if it fails. Results of
 * outdated requests are dropped.
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
    if (error.status === undefined) throw error; // a bug of this page, which belongs in the console
  }
}
