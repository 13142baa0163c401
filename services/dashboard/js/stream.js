// Server-sent events over fetch, which can send the Authorization header; EventSource cannot.
//
//   connect ─> read ─> (dropped, silent, ended) ─> wait with backoff ─> connect with Last-Event-ID
//
// A hidden tab closes its connection after a while, because browsers open at most six per server over HTTP/1.1.

import { authorization, login } from "./api.js";

const SILENT_MS = 45_000; // the server pings every 15 s
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
const HIDDEN_MS = 30_000;
const LONGEST_EVENT = 32 << 20; // characters; a longer event means that the stream is broken

/** Parses text in pieces into events {id, event, data}, as the HTML standard defines it. */
export class EventParser {
  constructor() {
    this.rest = "";
    this.clear();
  }

  clear() {
    this.data = [];
    this.event = "message";
  }

  *feed(text) {
    const whole = this.rest + text;
    // A CR that ends a piece may be the first half of a CRLF.
    const safe = whole.endsWith("\r") ? whole.length - 1 : whole.length;
    const lines = whole.slice(0, safe).split(/\r\n|\r|\n/);
    this.rest = lines.pop() + whole.slice(safe);
    if (this.rest.length > LONGEST_EVENT) throw new RangeError("the event is too long");
    for (const line of lines) {
      if (line === "") {
        if (this.data.length) yield { id: this.id, event: this.event, data: this.data.join("\n") };
        this.clear();
      } else this.line(line);
    }
  }

  line(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment: the server's ping
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.data.push(value);
    else if (field === "event") this.event = value;
    else if (field === "id" && !value.includes("\0")) this.id = value;
  }
}

/**
 * A stream that is kept open until `close`.
 *
 * handlers: event name -> function of the decoded data; also `open(resumed)` on every connection, where `resumed` means
 * that the server continues after the last event handled here, and `gone(status)` if the server answers 403 or 404.
 * onState: called with "live", "waiting" and the seconds until the next try, or "off".
 */
export class LiveStream {
  constructor(path, handlers, onState) {
    this.path = path;
    this.handlers = handlers;
    this.onState = onState;
    this.lastId = null;
    this.opened = false;
    this.closed = false;
    this.failures = 0;
    this.wake = () => this.skipWait?.();
    this.onVisibility = () => this.visibility();
    addEventListener("online", this.wake);
    document.addEventListener("visibilitychange", this.onVisibility);
    this.done = this.run();
  }

  close() {
    this.closed = true;
    clearTimeout(this.hiding);
    removeEventListener("online", this.wake);
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.abort?.abort();
    this.skipWait?.();
    this.onState("off");
  }

  visibility() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.abort?.abort(), HIDDEN_MS);
    else this.skipWait?.();
  }

  async run() {
    while (!this.closed) {
      if (document.hidden && this.opened) await this.wait(null);
      else {
        const again = await this.once();
        if (this.closed || !again) break;
        await this.wait(this.backoff());
      }
    }
    if (!this.closed) this.onState("off");
  }

  backoff() {
    const most = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.failures);
    this.failures += 1;
    return most * (0.5 + Math.random() / 2); // so that many tabs do not reconnect at the same moment
  }

  wait(milliseconds) {
    return new Promise((resolve) => {
      const timer = milliseconds === null ? null : setTimeout(resolve, milliseconds);
      if (milliseconds !== null) this.onState("waiting", milliseconds / 1000);
      this.skipWait = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  /** Keep one connection until it ends. Resolves to false if reconnecting is pointless. */
  async once() {
    this.abort = new AbortController();
    this.guard();
    try {
      const response = await fetch(this.path, {
        cache: "no-store",
        signal: this.abort.signal,
        headers: {
          Accept: "text/event-stream",
          ...authorization(),
          ...(this.lastId === null ? {} : { "Last-Event-ID": this.lastId }),
        },
      });
      if (response.status === 401) return await login();
      if (response.status === 403 || response.status === 404) {
        this.handlers.gone?.(response.status);
        return false;
      }
      if (response.ok) await this.read(response.body);
    } catch (error) {
      // A connection that was refused or cut, or that this page aborted.
      if (!(error instanceof TypeError || error instanceof RangeError || error.name === "AbortError")) throw error;
    } finally {
      clearTimeout(this.silence);
      this.abort.abort();
    }
    return true;
  }

  guard() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.abort.abort(), SILENT_MS);
  }

  async read(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new EventParser();
    this.opened = true;
    this.onState("live");
    this.handlers.open?.(this.lastId !== null);
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      this.guard();
      for (const { id, event, data } of parser.feed(value)) {
        if (this.closed) return;
        this.failures = 0;
        this.handlers[event]?.(JSON.parse(data));
        if (id !== undefined) this.lastId = id; // only once the event was handled
      }
    }
  }
}
