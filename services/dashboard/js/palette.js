// Colours for the canvas, read from the style sheet for the current theme.

let probe = null;
const known = new Map();

/** The colour of the custom property `--name`, as rgb(...). */
export function color(name) {
  if (!known.has(name)) {
    if (!probe) {
      probe = document.createElement("span");
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.setProperty("color", `var(--${name})`);
    known.set(name, getComputedStyle(probe).color);
  }
  return known.get(name);
}

/** The colour at some opacity, for areas. */
export function faded(name, opacity) {
  const [r, g, b] = color(name).match(/[\d.]+/g);
  return `rgba(${r}, ${g}, ${b}, ${opacity})`;
}

export function forgetColors() {
  known.clear();
}

export const series = (index) => `series-${index % 7}`;

/** The colour of item `index` out of `count` on an ordered scale of seven colours. */
export const ramp = (index, count) => `ramp-${count <= 1 ? 0 : Math.round((index * 6) / (count - 1))}`;

const VERDICTS = {
  passed: "verdict-passed",
  wrong_answer: "verdict-wrong",
  no_answer: "verdict-none",
  compile_error: "verdict-error",
  runtime_error: "verdict-error",
  timeout: "verdict-limit",
  memory_limit: "verdict-limit",
  output_limit: "verdict-limit",
  security_violation: "bad",
  infra_error: "verdict-infra",
  refused: "verdict-infra",
};

export const STATUSES = Object.keys(VERDICTS);
export const verdictColor = (status) => VERDICTS[status] ?? "verdict-none";

const TONES = {
  running: "good",
  done: "good",
  queued: "idle",
  pending: "warn",
  starting: "busy",
  paused: "warn",
  stopping: "warn",
  stopped: "idle",
  failed: "bad",
  lost: "bad",
};

export const tone = (state) => TONES[state] ?? "idle";
export const ENDED = new Set(["stopped", "done", "failed"]);
