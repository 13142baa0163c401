// Actions on a run: pause, resume, stop, change k or weights, change the number of workers. Each asks for confirmation.

import { patch, post, runPath } from "../api.js";
import { confirmed, toast } from "../dialogs.js";
import { h, setText } from "../dom.js";
import { ENDED } from "../palette.js";

/** The buttons at the top of a run. `onView` is called with the view that the API returns. */
export class Actions {
  constructor(id, onView) {
    this.id = id;
    this.onView = onView;
    const button = (label, act, kind = "") => h("button", { class: `button ${kind}`, type: "button", onclick: act }, label);
    this.pause = button("Pause", () => this.askPause());
    this.resume = button("Resume", () => this.askResume());
    this.change = button("Change k", () => this.askK());
    this.stop = button("Stop", () => this.askStop(), "danger");
    this.element = h("div", { class: "end" }, this.change, this.pause, this.resume, this.stop);
  }

  update(view) {
    this.view = view;
    const { desired, state, record } = view;
    const ended = ENDED.has(state);
    const canResume = desired.paused || ["stopped", "failed"].includes(state);
    this.pause.classList.toggle("hidden", ended || desired.paused || desired.stopped || record.kind !== "rl");
    this.resume.classList.toggle("hidden", !canResume || state === "done");
    this.stop.classList.toggle("hidden", ended);
    this.stop.disabled = desired.stopped;
    setText(this.stop, desired.stopped ? "Stopping…" : "Stop");
    this.change.classList.toggle("hidden", ended || currentTries(view) === "");
  }

  name() {
    return `“${this.view.record.name}”`;
  }

  askPause() {
    return this.ask({
      title: "Pause this run?",
      text: `${this.name()} starts no new groups. Groups in flight are finished and trained on.`,
      button: "Pause",
      act: () => patch(runPath(this.id), { paused: true }),
    });
  }

  askResume() {
    const ended = ENDED.has(this.view.state);
    return this.ask({
      title: "Resume this run?",
      text: ended ? `${this.name()} continues from its newest checkpoint.` : `${this.name()} starts new groups again.`,
      button: "Resume",
      act: () => post(runPath(this.id, "/resume"), {}),
    });
  }

  askStop() {
    return this.ask({
      title: "Stop this run?",
      text: `${this.name()} writes a checkpoint, releases its workers and ends. It can be resumed from there.`,
      button: "Stop",
      danger: true,
      act: () => post(runPath(this.id, "/stop"), {}),
    });
  }

  askK() {
    const n = this.view.record.job.sampling?.n ?? 1;
    const input = h("input", { type: "text", required: true, value: currentTries(this.view) });
    return this.ask({
      title: "Change k",
      text: `The objective scores the best, or the most frequent, of k samples out of ${n}. The next step uses the new k or weights.`,
      button: "Change",
      fields: [h("label", { class: "field" }, h("span", {}, `k, from 1 to ${n}, or weights such as 1: 0.5, 8: 0.5, or harmonic ${n}`), input)],
      act: async () => patch(runPath(this.id), { objective: triesOf(input.value) }),
    });
  }

  async ask(question) {
    const done = await confirmed({ ...question, act: async () => this.onView(await question.act()) });
    if (done) toast(`${question.button}: requested. The run applies it within seconds.`);
  }
}

/** The desired k or weights as text that `triesOf` reads; "" if the objective has none. */
export function currentTries({ record, desired }) {
  const [job, live] = [record.job.objective ?? {}, desired.objective ?? {}];
  const { k, weights } = (live.k ?? live.weights ?? null) === null ? job : live;
  if (weights === "harmonic") return `harmonic ${live.order ?? job.order}`;
  if (weights) return Object.entries(weights).map(([each, weight]) => `${each}: ${weight}`).join(", ");
  return k === undefined || k === null ? "" : String(k);
}

/** The objective's fields for "4", "1: 0.5, 8: 0.5" or "harmonic 8". Throws an error that says what to write. */
export function triesOf(text) {
  const [written, harmonic] = [text.trim(), /^harmonic\s+(\d+)$/.exec(text.trim())];
  if (harmonic) return { weights: "harmonic", order: Number(harmonic[1]) };
  if (/^\d+$/.test(written)) return { k: Number(written) };
  const pairs = written.split(",").map((each) => /^\s*(\d+)\s*:\s*([\d.eE+-]+)\s*$/.exec(each));
  const weights = Object.fromEntries(pairs.map((pair) => [pair?.[1], Number(pair?.[2])]));
  if (!Object.values(weights).every(Number.isFinite) || Object.keys(weights).length < pairs.length)
    throw new Error("Write k, such as 8, or each k once with its weight, such as 1: 0.5, 8: 0.5, or harmonic 8.");
  return { weights };
}

/** "Actors − 2 +": the buttons + and − propose a number; Apply sends it. */
export class Stepper {
  constructor(id, field, label, least, onView) {
    this.field = field;
    this.least = least;
    this.proposed = null;
    const step = (by, sign, verb) =>
      h("button", { class: "step-button", type: "button", "aria-label": `${verb} ${label.toLowerCase()}`, onclick: () => this.propose(by) }, sign);
    this.less = step(-1, "−", "Fewer");
    this.more = step(1, "+", "More");
    this.now = h("span", {});
    this.wanted = h("small", {});
    this.output = h("output", { "aria-live": "polite" }, this.now, " ", this.wanted);
    this.apply = h("button", { class: "button small primary", type: "button" }, "Apply");
    const undo = h("button", { class: "button small", type: "button", onclick: () => this.drop() }, "Cancel");
    this.element = h(
      "div",
      { class: "stepper", role: "group", "aria-label": label, data: { field } },
      h("span", { class: "label" }, label),
      this.less,
      this.output,
      this.more,
      h("span", { class: "confirm" }, this.apply, undo),
    );
    this.apply.addEventListener("click", () => this.send(id, onView));
  }

  update(serving, wanted, ended) {
    this.serving = serving;
    this.target = wanted;
    this.ended = ended;
    this.render();
  }

  propose(by) {
    const next = Math.max(this.least, (this.proposed ?? this.target) + by);
    this.proposed = next === this.target ? null : next;
    this.render();
  }

  drop() {
    this.proposed = null;
    this.render();
  }

  async send(id, onView) {
    const value = this.proposed;
    if (value === null) return;
    this.apply.disabled = true;
    try {
      onView(await patch(runPath(id), { [this.field]: value }));
      this.proposed = null;
    } catch (error) {
      toast(error.message, "bad");
    } finally {
      this.apply.disabled = false;
      this.render();
    }
  }

  render() {
    const changed = this.proposed !== null;
    this.element.dataset.changed = changed;
    this.less.disabled = this.ended || (this.proposed ?? this.target) <= this.least;
    this.more.disabled = this.ended;
    setText(this.now, changed ? `${this.target} → ${this.proposed}` : this.target);
    const waits = !changed && !this.ended && this.serving !== this.target;
    setText(this.wanted, waits ? `${this.serving} serving` : "");
  }
}
