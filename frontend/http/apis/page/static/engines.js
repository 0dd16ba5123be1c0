// Which model, and which of its engines, the next question goes to.

import { make } from "./dom.js";
import { load, save } from "./storage.js";

/** Tells "choice" when what can be chosen, or what is chosen, has changed. */
export class Engines extends EventTarget {
  #select;
  #choices = new Map(); // by the option's value: {model, rank, label, contextLength, defaults}
  #wanted = load(sessionStorage, "engine", "");

  constructor(select) {
    super();
    this.#select = select;
    select.addEventListener("change", () => {
      this.#wanted = select.value;
      save(sessionStorage, "engine", select.value);
      this.dispatchEvent(new Event("choice"));
    });
  }

  /** {model, rank, label, contextLength, defaults}; rank is null where the server chooses. Null without any engine. */
  get choice() {
    return this.#choices.get(this.#select.value) ?? null;
  }

  take({ engines }) {
    const choices = choicesOf(engines.filter(({ state }) => state !== "starting" && state !== "lost"));
    const isSame = JSON.stringify([...choices]) === JSON.stringify([...this.#choices]);
    if (isSame && this.#select.options.length) return;
    this.#choices = choices;
    this.#select.replaceChildren(...[...choices].map(([value, { label }]) => make("option", { value }, label)));
    if (!choices.size) this.#select.append(make("option", { value: "" }, "No engine"));
    if (choices.has(this.#wanted)) this.#select.value = this.#wanted;
    this.#select.disabled = choices.size < 2;
    this.dispatchEvent(new Event("choice"));
  }
}

/** For each model: any of its engines and, if there are several, each one. */
function choicesOf(engines) {
  const choices = new Map();
  for (const model of new Set(engines.flatMap(({ models }) => models))) {
    const serving = engines.filter(({ models }) => models.includes(model));
    const common = { model, contextLength: serving[0].max_model_len, defaults: serving[0].sampling_defaults };
    const label = shortName(model);
    choices.set(model, { ...common, rank: null, label });
    if (serving.length < 2) continue;
    for (const { index } of serving) {
      choices.set(`${model} ${index}`, { ...common, rank: index, label: `${label} on engine ${index}` });
    }
  }
  return choices;
}

/** A model's name, or the last part of its path. */
function shortName(model) {
  return /^[/.~]/.test(model) ? model.replace(/\/+$/, "").split("/").at(-1) : model;
}
