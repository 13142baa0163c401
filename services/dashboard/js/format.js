// Formats values for display.

const NONE = "–";

/** A number with at most four significant digits: 0.0123, 12.3k, 4.5M. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (Number.isInteger(value)) return String(value);
  if (size >= 100) return value.toFixed(0);
  if (size < 1e-3) return value.toExponential(1);
  return trim(value);
}

function trim(value) {
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return value.toFixed(digits);
}

/** Strip trailing zeros of a fraction: an axis shows 0.2, not 0.200. */
export function short(text) {
  return text.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");
}

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  return `${(100 * value).toFixed(value !== 0 && Math.abs(value) < 0.1 ? 1 : 0)}%`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

/** A duration in its two largest units: 2 h 5 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min${minutes < 10 ? ` ${Math.floor(seconds % 60)} s` : ""}`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function ago(time) {
  if (!time) return NONE;
  const seconds = Date.now() / 1000 - time;
  return seconds < 3 ? "now" : `${duration(Math.floor(seconds)).replace(/ \d+ (s|min|h)$/, "")} ago`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

export function moment(time) {
  return new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

export function words(name) {
  const text = String(name).replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Any JSON value on one line. */
export function plain(value) {
  if (value === undefined) return NONE;
  if (typeof value === "string") return value;
  if (typeof value === "number") return String(value);
  return JSON.stringify(value);
}
