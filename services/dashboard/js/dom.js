// Creates elements from plain values. Data reaches the page only as text: no code in the dashboard parses HTML.

/**
 * Create an element. `props`: `class`, `data` (dataset), `style` (CSS properties), `on...` (listeners), booleans,
 * attributes. Children: nodes, strings, numbers, or arrays of them; null and false are left out.
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) set(element, name, value);
  append(element, children);
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name === "class") element.className = value;
  else if (name === "data") Object.assign(element.dataset, value);
  else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
  else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (name === "value") element.value = value;
  else element.setAttribute(name, value === true ? "" : String(value));
}

function append(element, children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** A box for a table that may be wider than the page; the keyboard reaches it, so that its arrows scroll it. */
export function scrolling(label, props, ...children) {
  return h("div", { role: "region", "aria-label": label, tabindex: "0", ...props }, ...children);
}

/** Replace the content by `children`. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Change the text only if it differs, so that a selection and a screen reader's position survive. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** An SVG icon from paths in a 24 x 24 box, in the colour of the text. */
export function icon(...paths) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const attributes = { viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "stroke-width": "1.8", "aria-hidden": "true" };
  for (const [name, value] of Object.entries({ ...attributes, "stroke-linecap": "round", "stroke-linejoin": "round" })) {
    svg.setAttribute(name, value);
  }
  for (const d of paths) {
    const path = document.createElementNS(space, "path");
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

/** Rows for a list of items: created once per key, updated in place, kept in the items' order. */
export class KeyedList {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make; // item -> {element, update(item)}
    this.rows = new Map();
  }

  update(items, keyOf) {
    const seen = new Set();
    let before = null;
    for (const item of items) {
      const key = keyOf(item);
      seen.add(key);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.make(item)));
      row.update(item);
      const place = before ? before.nextSibling : this.parent.firstChild;
      if (row.element !== place) this.parent.insertBefore(row.element, place);
      before = row.element;
    }
    for (const [key, row] of this.rows) {
      if (seen.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
  }
}

/** Call `work` at most once per `milliseconds`, and once after the last request. */
export function throttle(work, milliseconds) {
  let timer = null;
  let last = -Infinity;
  const run = () => {
    timer = null;
    last = performance.now();
    work();
  };
  const request = () => {
    if (timer === null) timer = setTimeout(run, Math.max(0, last + milliseconds - performance.now()));
  };
  request.cancel = () => clearTimeout(timer);
  return request;
}
