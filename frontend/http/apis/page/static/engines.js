// Which model, and which of its engines, the next question goes to.

import { make } from "./dom.js";
import { load, save } from "./storage.js";

/** Tells "choice" when what can be chosen, or what is chosen, has changed. */
export class Engines extends EventTarget {
  #select;
  #choices = new Map(); // by the option's value, as `choice` has it
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

  /**
   * {model, rank, label, contextLength, defaults, chats}; rank is null where the server chooses, and chats is false for a
   * model that writes no text. Null without any engine.
   */
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

/** For each model and adapter: any of its engines and, if there are several, each one. */
function choicesOf(engines) {
  const choices = new Map();
  const namesOf = ({ models, adapters }) => [...models, ...adapters];
  const models = new Set(engines.flatMap((engine) => engine.models));
  for (const model of new Set([...models, ...engines.flatMap(namesOf)])) {
    const serving = engines.filter((engine) => namesOf(engine).includes(model));
    const [{ max_model_len: contextLength, sampling_defaults: defaults, generates }] = serving;
    const common = { model, contextLength, defaults, chats: generates !== false };
    const label = models.has(model) ? shortName(model) : `${shortName(model)} (adapter)`;
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
