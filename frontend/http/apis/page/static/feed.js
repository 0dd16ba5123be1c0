// The engines' state, asked for again and again, and told to whoever listens.
//
//   "state"    detail: the snapshot that /ui/live answered, or null while the server does not answer
//   "happened" detail: {at, text, isBad}: an engine has come or gone

const EVERY_MS = 1000;
const EVERY_QUIETLY_MS = 4000; // while nobody looks at the live view
const LONGEST_MS = 10_000;
const SAME_SERVER_MS = 5000; // for how long after its answer the view stays with one server of several behind a balancer

export class Feed extends EventTarget {
  snapshot = null;
  /** Whether the live view is shown. */
  isWatched = false;
  #api;
  #key;
  #states = new Map();
  #isLost = false;
  #server; // whose answers are shown, as each server counts for itself
  #answeredAt = 0;
  #hasToldOfOthers = false;

  constructor(api, key) {
    super();
    this.#api = api;
    this.#key = key;
  }

  /** Asks for ever. */
  async run() {
    for (;;) {
      await this.ask();
      const isSeen = this.isWatched && !document.hidden;
      await new Promise((next) => {
        this.#wake = next;
        setTimeout(next, isSeen ? EVERY_MS : EVERY_QUIETLY_MS);
      });
    }
  }

  #wake = () => {};

  /** Asks now, rather than when it is time. */
  hurry() {
    this.#wake();
  }

  async ask() {
    const used = this.#key.value;
    try {
      this.#take(await this.#api.get("ui/live", AbortSignal.timeout(LONGEST_MS)));
    } catch (error) {
      if (error.status === 401) {
        await this.#key.ask(used);
        await this.ask();
      } else {
        this.#lose();
      }
    }
  }

  #take(snapshot) {
    if (snapshot.server !== this.#server && !this.#isLost && Date.now() - this.#answeredAt < SAME_SERVER_MS) {
      if (!this.#hasToldOfOthers) this.#tell("Several servers answer here; this view is of one of them");
      this.#hasToldOfOthers = true;
      return;
    }
    this.#server = snapshot.server;
    this.#answeredAt = Date.now();
    if (this.#isLost) this.#tell("The server answers again");
    this.#isLost = false;
    this.snapshot = snapshot;
    for (const { index, state, problem } of snapshot.engines) {
      const before = this.#states.get(index);
      this.#states.set(index, state);
      if (before === state) continue;
      if (state === "ready") this.#tell(before === undefined ? `Engine ${index} is ready` : `Engine ${index} is back`);
      else if (before !== undefined) this.#tell(`Engine ${index}: ${problem || state}`, true);
    }
    for (const index of this.#states.keys()) {
      if (snapshot.engines.some((each) => each.index === index)) continue;
      this.#states.delete(index);
      this.#tell(`Engine ${index} has left`, true);
    }
    this.dispatchEvent(new CustomEvent("state", { detail: snapshot }));
  }

  #lose() {
    if (!this.#isLost) this.#tell("The server does not answer", true);
    this.#isLost = true;
    this.dispatchEvent(new CustomEvent("state", { detail: null }));
  }

  #tell(text, isBad = false) {
    this.dispatchEvent(new CustomEvent("happened", { detail: { at: new Date(), text, isBad } }));
  }
}
