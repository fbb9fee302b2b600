// One topic over one websocket: snapshot first, then deltas numbered without a gap.
//
// States: connecting, live, paused (the reader asked for it), stale (connected, but nothing for 5 s), reconnecting,
// offline (several attempts failed: asks over HTTP every 10 s meanwhile), signed-out and forbidden (final).

const STALE_AFTER = 5_000;
const DEAD_AFTER = 15_000; // an open socket that says nothing for so long is given up
const POLL_EVERY = 10_000;
const OFFLINE_AFTER = 3; // failed attempts in a row
const LONGEST_WAIT = 8_000;
const FINAL = new Map([[4401, "signed-out"], [4403, "forbidden"]]);

export class LiveTopic {
  #socket = null;
  #attempts = 0;
  #state = "connecting";
  #paused = false;
  #stream = null;
  #seq = null;
  #heard = Date.now();
  #polled = 0;

  // Addresses are same-origin paths. `onFrame` gets every snapshot and delta in order, `onState` each change of state.
  constructor({ topic, socketPath, framePath, frame, onFrame, onState }) {
    Object.assign(this, { topic, socketPath, framePath, onFrame, onState });
    this.#stream = frame.stream;
    this.#seq = frame.seq;
  }

  start() {
    this.#connect();
    setInterval(() => this.#check(), 500);
    document.addEventListener("visibilitychange", () => this.#listen());
    window.addEventListener("online", () => this.#reconnectNow());
  }

  get state() {
    return this.#state;
  }

  pause(paused) {
    this.#paused = paused;
    this.#listen();
    if (paused && this.#isOpen) this.#become("paused");
  }

  get #isOpen() {
    return this.#socket?.readyState === WebSocket.OPEN;
  }

  get #wanted() {
    return !this.#paused && !document.hidden;
  }

  get #ended() {
    return this.#state === "signed-out" || this.#state === "forbidden";
  }

  #become(state) {
    if (state === this.#state || this.#ended) return;
    this.#state = state;
    this.onState(state);
  }

  #connect() {
    if (this.#ended) return;
    const url = new URL(this.socketPath, window.location.href);
    url.protocol = url.protocol.replace("http", "ws");
    const socket = new WebSocket(url);
    this.#socket = socket;
    this.#heard = Date.now();
    socket.addEventListener("open", () => this.#listen());
    socket.addEventListener("message", (event) => this.#receive(JSON.parse(event.data)));
    socket.addEventListener("close", (event) => socket === this.#socket && this.#lost(event.code));
  }

  #lost(code) {
    this.#socket = null;
    if (FINAL.has(code)) {
      this.#become(FINAL.get(code));
      return;
    }
    this.#attempts += 1;
    this.#become(this.#attempts > OFFLINE_AFTER ? "offline" : "reconnecting");
    const wait = Math.min(250 * 2 ** this.#attempts, LONGEST_WAIT);
    setTimeout(() => this.#reconnectNow(), wait * (0.5 + Math.random() / 2)); // jitter: not all pages at once
  }

  #reconnectNow() {
    if (this.#socket === null) this.#connect();
  }

  // Tell the server what we want now; a hidden tab wants nothing.
  #listen() {
    if (!this.#isOpen) return;
    this.#heard = Date.now();
    const place = this.#wanted ? { type: "subscribe", stream: this.#stream, seq: this.#seq } : { type: "unsubscribe" };
    this.#socket.send(JSON.stringify({ topic: this.topic, ...place }));
    if (this.#paused) this.#become("paused");
  }

  #receive(frame) {
    this.#heard = Date.now();
    this.#attempts = 0;
    if (frame.type === "delta") {
      const sameStream = frame.stream === this.#stream;
      if (sameStream && frame.seq <= this.#seq) return; // already known
      if (!sameStream || frame.seq !== this.#seq + 1) {
        this.#listen(); // a gap: ask for what is missing
        return;
      }
    }
    this.#accept(frame);
    if (this.#wanted) this.#become("live");
  }

  #accept(frame) {
    this.#stream = frame.stream;
    this.#seq = frame.seq;
    this.onFrame(frame);
  }

  #check() {
    const silence = Date.now() - this.#heard;
    if (this.#isOpen && this.#wanted && silence > STALE_AFTER) this.#become("stale");
    if (this.#socket !== null && this.#wanted && silence > DEAD_AFTER) this.#giveUp();
    if (this.#state === "offline" && this.#wanted && Date.now() - this.#polled > POLL_EVERY) this.#poll();
  }

  #giveUp() {
    const socket = this.#socket;
    this.#lost(1006);
    socket.close();
  }

  async #poll() {
    this.#polled = Date.now();
    const url = new URL(this.framePath, window.location.href);
    url.search = new URLSearchParams({ stream: this.#stream, seq: this.#seq });
    let answer;
    try {
      answer = await fetch(url, { headers: { Accept: "application/json" } });
    } catch {
      return; // no network: the state says so already
    }
    if (answer.status === 403) this.#become("forbidden");
    else if (answer.redirected) this.#become("signed-out");
    else if (answer.ok && this.#state === "offline") this.#accept(await answer.json());
  }
}
