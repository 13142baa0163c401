// The state of a page in its address, so that a link shows what its sender saw.

import { query } from "./api.js";

/** Replace the address by `#/path?values`; the browser's history gets no entry, and the page is not built again. */
export function remember(path, values) {
  history.replaceState(null, "", `#/${path}${query(values)}`);
}

/** The path of a run's page, with the run's id escaped. */
export const runAddress = (id, tab = "") => `runs/${encodeURIComponent(id)}${tab && `/${tab}`}`;
