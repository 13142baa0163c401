// Requests to the API that serves this page. The token, if one is required, is kept for the tab's session.

import { askToken } from "./dialogs.js";

const TOKEN = "volley-token";

/** An error response of the API, as an RFC 9457 problem, or no response at all (status 0). */
export class ApiError extends Error {
  constructor(status, title, detail, errors = []) {
    super(detail || title);
    this.status = status;
    this.title = title;
    this.errors = errors;
  }
}

export function authorization() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

let asking = null;

/** Ask for a token, once for all requests that wait for it. Resolves to false if the user cancels. */
export function login(message) {
  asking ??= askToken(message)
    .then((token) => {
      if (token) sessionStorage.setItem(TOKEN, token);
      return Boolean(token);
    })
    .finally(() => (asking = null));
  return asking;
}

async function problem(response) {
  let body = {};
  try {
    body = await response.json();
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error; // a proxy's page instead of a problem document
  }
  return new ApiError(response.status, body.title || `HTTP ${response.status}`, body.detail, body.errors);
}

/** Send one request and return the decoded response. Throws `ApiError`, or an AbortError if `signal` is aborted. */
export async function request(method, path, { body, headers = {}, signal, text = false } = {}) {
  let retries = 3; // after a response 429
  for (;;) {
    let response;
    try {
      response = await fetch(path, {
        method,
        signal,
        cache: "no-store",
        headers: {
          ...authorization(),
          ...(body === undefined ? {} : { "Content-Type": "application/json" }),
          ...headers,
        },
        body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "No response", "The API does not answer. Is `volley up` running, and is this machine online?");
    }
    if (response.status === 429 && method === "GET" && retries > 0) {
      retries -= 1;
      await new Promise((resolve) => setTimeout(resolve, 1000 * (Number(response.headers.get("Retry-After")) || 1)));
      continue;
    }
    if (response.status === 401 && (await login((await problem(response)).message))) continue;
    if (!response.ok) throw await problem(response);
    if (response.status === 204) return null;
    return text ? response.text() : response.json();
  }
}

export const get = (path, options) => request("GET", path, options);
export const post = (path, body) => request("POST", path, { body });
export const patch = (path, body, headers) => request("PATCH", path, { body, headers });

/** The path of a run, with its id escaped. */
export const runPath = (id, rest = "") => `v1/runs/${encodeURIComponent(id)}${rest}`;

/** The query string of the values that are set, such as `?a=1&b=2`. */
export function query(values) {
  const set = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return set.length ? `?${new URLSearchParams(set)}` : "";
}
