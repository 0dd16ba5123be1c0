// The live view: each engine's state, its load and latencies over the last minutes, its start-up, and what happened.

import { Chart } from "./chart.js";
import { make } from "./dom.js";
import { LONGEST_S, gauge, percentile, rate } from "./samples.js";

const SPANS_MIN = [1, 5, 15];
const STEPS_S = [60, 120, 300, LONGEST_S]; // charts grow so to the chosen time, rather than begin nearly empty
const MOST_EVENTS = 50;
const SHARES = [["p50", 0.5], ["p90", 0.9], ["p99", 0.99]];
const FIRST = "time_to_first_token_seconds";
const LATER = "inter_token_latency_seconds";
const WHOLE = "e2e_request_latency_seconds";

const asCount = (value) => (value >= 10_000 ? `${+(value / 1000).toFixed(1)}k` : String(+value.toFixed(value < 10 ? 1 : 0)));
const asShare = (value) => `${+(value * 100).toFixed(value < 0.1 ? 1 : 0)}%`;
const asSeconds = (value) => (value < 1 ? `${+(value * 1000).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`);

export class LiveView {
  /** element: the section that it fills. */
  constructor(element, samples) {
    this.#samples = samples;
    element.append(
      make(
        "div",
        { class: "live-head" },
        make("h1", { id: "live-title" }, "Live"),
        make("span", { class: "gap" }),
        make("div", { class: "choice" }, this.#engine, this.#span),
      ),
      this.#cards,
      make("h2", { class: "unseen" }, "Over time"),
      make("div", { class: "charts" }, Object.values(this.#charts).map((chart) => chart.element)),
      make("h2", {}, "By engine"),
      make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Figures of each engine" }, this.#table),
      make("div", { class: "pair" },
        make("div", {}, make("h2", {}, "Start-up"), this.#startup),
        make("div", {}, make("h2", {}, "What happened"),
          make("div", { class: "log", role: "log", tabindex: "0", "aria-label": "What happened" }, this.#events))),
    );
    for (const minutes of SPANS_MIN) {
      this.#span.append(make("option", { value: String(minutes * 60), selected: minutes === 5 }, minutes === 1 ? "Last minute" : `Up to ${minutes} min`));
    }
    for (const select of [this.#engine, this.#span]) select.addEventListener("change", () => this.draw());
  }

  #samples;
  #snapshot = null;
  #engine = make("select", { "aria-label": "Engines to draw" });
  #span = make("select", { "aria-label": "Time to draw" });
  #cards = make("ul", { class: "cards" });
  #table = make("table");
  #startup = make("div", { class: "startup" });
  #events = make("ol", { class: "events" });
  #charts = {
    requests: new Chart("Requests", asCount, { leastMax: 4 }),
    cache: new Chart("KV cache in use", asShare, { fixedMax: 1 }),
    tokens: new Chart("Tokens per second", asCount, { leastMax: 10 }),
    first: new Chart("Time to first token", asSeconds, { leastMax: 0.001 }),
    later: new Chart("Time per token", asSeconds, { leastMax: 0.001 }),
    whole: new Chart("Time per request", asSeconds, { leastMax: 0.001 }),
  };

  /** snapshot: what /ui/live answered; null while nothing answers. */
  take(snapshot) {
    this.#snapshot = snapshot ?? this.#lost();
    this.draw();
  }

  /** Adds a line to the list of what happened. */
  note({ at, text, isBad }) {
    const time = make("time", { datetime: at.toISOString() }, at.toLocaleTimeString());
    this.#events.prepend(make("li", { class: isBad ? "bad" : null }, time, ` ${text}`));
    this.#events.children[MOST_EVENTS]?.remove();
  }

  draw() {
    if (this.#snapshot === null || this.#cards.offsetParent === null) return; // not shown
    const { engines } = this.#snapshot;
    this.#fillEngines(engines);
    this.#cards.replaceChildren(...engines.map(cardOf));
    if (!engines.length) this.#cards.replaceChildren(make("li", { class: "card" }, "No engine is known yet."));
    const chosen = this.#engine.value === "" ? engines : engines.filter(({ index }) => String(index) === this.#engine.value);
    const to = Date.now() / 1000;
    const filled = STEPS_S.find((each) => each >= this.#samples.age(to)) ?? LONGEST_S;
    const from = to - Math.min(Number(this.#span.value), filled);
    this.#drawCharts(this.#samples.since(from), chosen, from, to);
    this.#drawTable(this.#samples.since(to - 60), engines);
    this.#drawStartup(chosen);
  }

  /** The last snapshot, with every engine out of reach. */
  #lost() {
    const engines = (this.#snapshot?.engines ?? []).map((each) => ({
      ...each, state: "lost", problem: "The server does not answer.", num_running: null, num_waiting: null,
    }));
    return { ...this.#snapshot, engines };
  }

  #fillEngines(engines) {
    const values = ["", ...engines.map(({ index }) => String(index))];
    if ([...this.#engine.options].map((each) => each.value).join() === values.join()) return;
    const before = this.#engine.value;
    this.#engine.replaceChildren(...values.map((value) => make("option", { value }, value === "" ? "All engines" : `Engine ${value}`)));
    this.#engine.value = values.includes(before) ? before : "";
  }

  #drawCharts(samples, engines, from, to) {
    const isOne = engines.length === 1;
    const lines = (name, points, isDashed = false) =>
      engines.map(({ index }, at) => ({
        label: isOne ? name : `${name} ${index}`, color: at % 8, isDashed, points: points(index),
      }));
    const two = (first, second) => (isOne ? [first[0], { ...second[0], color: 1 }] : [...first, ...second]);
    this.#charts.requests.update(
      two(lines("running", (index) => gauge(samples, index, "running")),
        lines("waiting", (index) => gauge(samples, index, "waiting"), true)), from, to);
    this.#charts.cache.update(lines(isOne ? "in use" : "engine", (index) => gauge(samples, index, "cache")), from, to);
    this.#charts.tokens.update(
      two(lines("generated", (index) => rate(samples, index, "generated")),
        lines("prompts", (index) => rate(samples, index, "prompt"), true)), from, to);
    for (const [chart, name] of [["first", FIRST], ["later", LATER], ["whole", WHOLE]]) {
      this.#charts[chart].update(this.#percentiles(samples, engines, name), from, to);
    }
  }

  #percentiles(samples, engines, name) {
    const bounds = this.#samples.bounds[name] ?? [];
    const indices = engines.map(({ index }) => index);
    return SHARES.map(([label, share], color) => ({ label, color, points: percentile(samples, indices, name, bounds, share) }));
  }

  #drawTable(samples, engines) {
    const heads = ["Engine", "Running", "Waiting", "Cache", "Tokens/s", "Prompt tokens/s", "First token p50 / p90 / p99", "Per token p50 / p90 / p99"];
    const last = (points) => points.at(-1)?.[1] ?? null;
    const text = (value, format) => (value === null ? "–" : format(value));
    const of = (index, name) =>
      SHARES.map(([, share]) => text(last(percentile(samples, [index], name, this.#samples.bounds[name] ?? [], share)), asSeconds)).join(" / ");
    const rows = engines.map((each) =>
      make("tr", {}, make("th", { scope: "row" }, String(each.index)), [
        text(each.num_running, asCount),
        text(each.num_waiting, asCount),
        text(each.num_running === null ? null : each.kv_cache_usage, asShare),
        text(last(rate(samples, each.index, "generated")), asCount),
        text(last(rate(samples, each.index, "prompt")), asCount),
        of(each.index, FIRST),
        of(each.index, LATER),
      ].map((cell) => make("td", {}, cell))));
    this.#table.replaceChildren(
      make("thead", {}, make("tr", {}, heads.map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, rows),
    );
  }

  #drawStartup(engines) {
    this.#startup.replaceChildren(...engines.map(({ index, startup_s: phases }) => {
      const total = Object.values(phases).reduce((sum, seconds) => sum + seconds, 0);
      if (total === 0) return make("p", {}, `Engine ${index} has not started yet.`);
      return make(
        "table",
        { class: "phases" },
        make("caption", {}, `Engine ${index}: ${total.toFixed(2)} s`),
        make("tbody", {}, Object.entries(phases).map(([phase, seconds]) =>
          make("tr", {},
            make("th", { scope: "row" }, phase),
            make("td", {}, `${seconds.toFixed(3)} s`),
            make("td", { class: "bar-cell" }, make("meter", { min: "0", max: total, value: seconds, "aria-label": `${phase}: share of the start` }))))),
      );
    }));
  }
}

function cardOf({ index, state, problem, models, max_model_len: length, num_running: running, num_waiting: waiting }) {
  const load = running === null ? "" : `${asCount(running)} running, ${asCount(waiting)} waiting`;
  return make(
    "li",
    { class: "card", "data-state": state },
    make("div", { class: "card-head" }, make("span", { class: "dot", "aria-hidden": "true" }), make("strong", {}, `Engine ${index}`), make("span", { class: "card-state" }, state)),
    make("div", { class: "card-model", title: models.join(", ") }, models.join(", ") || "no model yet"),
    make("div", { class: "card-foot" }, problem || [load, length ? `${length.toLocaleString("en")} tokens of context` : ""].filter(Boolean).join(" · ")),
  );
}
