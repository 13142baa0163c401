// Starts the dashboard: theme, routing by the address after #, and the state of the live connection.

import { fill, h, setText } from "./dom.js";
import { ClusterPage } from "./pages/cluster.js";
import { ComparePage } from "./pages/compare.js";
import { GroupsPage } from "./pages/groups.js";
import { RunPage } from "./pages/run.js";
import { RunsPage } from "./pages/runs.js";
import { empty } from "./states.js";
import { startTheme } from "./theme.js";

// A page is {element, title, close()}. With update(parts, query), it follows changes of its address without restarting.
const PAGES = { runs: RunsPage, run: RunPage, compare: ComparePage, groups: GroupsPage, cluster: ClusterPage };

const ABOVE = { run: "runs", groups: "compare" }; // the entry of the menu, where it is another page's

let current = null;
let currentKey = null;

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch (error) {
    if (error instanceof URIError) return part; // an address typed by hand
    throw error;
  }
}

/** `#/runs/ID/samples?step=3` -> name, parts, query. */
export function route(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  const name = parts[0] ?? "runs";
  return { name: name === "runs" && parts.length > 1 ? "run" : name, parts, query: new URLSearchParams(search) };
}

function showLink(state, seconds) {
  const element = document.getElementById("link-state");
  element.dataset.state = state;
  setText(element, { live: "Live", waiting: `Reconnecting${seconds > 2 ? ` in ${Math.round(seconds)} s` : ""}`, off: "" }[state]);
}

function navigate(moved) {
  const { name, parts, query } = route(location.hash);
  const key = name === "run" ? `run ${parts[1]}` : name;
  for (const link of document.querySelectorAll(".nav a")) {
    if (link.dataset.page === (ABOVE[name] ?? name)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (key === currentKey && current?.update) {
    current.update(parts, query);
    return;
  }
  current?.close();
  currentKey = key;
  showLink("off");
  const main = document.getElementById("main");
  const Page = Object.hasOwn(PAGES, name) ? PAGES[name] : null;
  current = Page ? new Page(parts, query, showLink) : null;
  document.title = current ? `${current.title} · Volley` : "Volley";
  fill(main, current ? current.element : [h("h1", { class: "unseen" }, "Volley"), empty("Page not found", h("a", { href: "#/runs" }, "All runs"))]);
  scrollTo(0, 0);
  if (moved) main.focus({ preventScroll: true }); // so that a screen reader follows
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address after # is for routing
  document.getElementById("main").focus();
});
startTheme();
addEventListener("hashchange", () => navigate(true));
navigate(false);
