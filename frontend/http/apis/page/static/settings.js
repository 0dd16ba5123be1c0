// System prompt and sampling controls. What is left empty is left to the model, whose own value shows as a hint.

import { make } from "./dom.js";
import { connectPanel } from "./panel.js";
import { load, save } from "./storage.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, hint: 1, help: "0 takes the likeliest token" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "all that fit", help: "Length of an answer" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.01, hint: 1, help: "Of the likeliest tokens, those up to this total probability" },
  { name: "top_k", label: "Top k", min: -1, step: 1, hint: "all", help: "Of the likeliest tokens, this many" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: 0, help: "No token below this share of the likeliest one's probability" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, step: 0.01, hint: 1, help: "Above 1: fewer repetitions" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: 0, help: "Above 0: fewer tokens that were there before" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: 0, help: "Above 0: fewer, the more often they were" },
  { name: "seed", label: "Seed", step: 1, hint: "random", help: "The same answer each time" },
];

const TOOLS_HELP = 'Functions that the model may call, as JSON: [{"name": "...", "description": "...", "parameters": {...}}]';

export class Settings {
  #values = load(localStorage, "settings", {});
  #element;
  #inputs = new Map();

  /** element: the panel. toggle: the button that shows it. key: the visitor's. */
  constructor(element, toggle, key) {
    this.#element = element;
    const forget = make("button", { type: "button", class: "quiet", hidden: !key.value }, "Forget the API key");
    forget.addEventListener("click", () => {
      key.forget();
      location.reload();
    });
    connectPanel(element, toggle, "Settings", "textarea, input", () => (forget.hidden = !key.value));
    const reset = make("button", { type: "button", class: "secondary" }, "Leave all to the model");
    reset.addEventListener("click", () => this.#reset());
    element.append(
      this.#field("system", "System prompt", make("textarea", { rows: "4", placeholder: "None" }), "Before every conversation"),
      make("h3", {}, "Sampling"),
      make("div", { class: "fields" }, ...NUMBERS.map((each) => this.#number(each))),
      this.#field("stop", "Stop at", make("textarea", { rows: "2", placeholder: "Nothing" }), "One text a line"),
      this.#field("tools", "Tools", make("textarea", { rows: "3", placeholder: "None", spellcheck: "false" }), TOOLS_HELP),
      this.#choice("thinking", "Reasoning", { "": "As the model does", on: "On", off: "Off" }),
      this.#check("tokens", "Log-probabilities of each token"),
      make("div", { class: "settings-foot" }, reset, forget),
    );
  }

  get systemPrompt() {
    return this.#values.system ?? "";
  }

  /** Whether answers come with log-probabilities. */
  get withTokens() {
    return this.#values.tokens === true;
  }

  /** Fields of the request that are not left to the model; null if a value is invalid, which the panel then shows. */
  fields() {
    const wrong = [...this.#inputs.values()].find((input) => !input.checkValidity());
    if (wrong) {
      this.#element.hidden = false;
      wrong.reportValidity();
      return null;
    }
    const fields = {};
    for (const { name } of NUMBERS) {
      if (this.#values[name] !== undefined && this.#values[name] !== "") fields[name] = Number(this.#values[name]);
    }
    const stop = (this.#values.stop ?? "").split("\n").filter(Boolean);
    if (stop.length) fields.stop = stop;
    const tools = toolsOf(this.#values.tools);
    if (tools.length) fields.tools = tools;
    if (this.#values.thinking) fields.chat_template_kwargs = { enable_thinking: this.#values.thinking === "on" };
    return fields;
  }

  /** Shows what the model uses where a field is empty. */
  showDefaults(defaults) {
    for (const { name, hint } of NUMBERS) {
      this.#inputs.get(name).placeholder = String(defaults[name] ?? hint);
    }
  }

  #number({ name, label, help, hint, ...limits }) {
    const input = make("input", { type: "number", inputmode: "decimal", placeholder: String(hint), step: "any", ...limits });
    return this.#field(name, label, input, help);
  }

  #field(name, label, input, help) {
    const id = `setting-${name}`;
    input.id = id;
    input.value = this.#values[name] ?? "";
    input.setAttribute("aria-describedby", `${id}-help`);
    this.#keep(name, input, () => input.value);
    if (name === "tools") checkTools(input);
    return make("div", { class: "field" }, make("label", { for: id }, label), input, make("span", { class: "help", id: `${id}-help` }, help));
  }

  #choice(name, label, choices) {
    const select = make("select", { id: `setting-${name}` });
    for (const [value, text] of Object.entries(choices)) select.append(make("option", { value }, text));
    select.value = this.#values[name] ?? "";
    this.#keep(name, select, () => select.value);
    return make("div", { class: "field" }, make("label", { for: select.id }, label), select);
  }

  #check(name, label) {
    const input = make("input", { type: "checkbox" });
    input.checked = this.#values[name] === true;
    this.#keep(name, input, () => input.checked);
    return make("label", { class: "check" }, input, label);
  }

  #keep(name, input, read) {
    this.#inputs.set(name, input);
    input.addEventListener("input", () => {
      this.#values[name] = read();
      save(localStorage, "settings", this.#values);
    });
  }

  #reset() {
    this.#values = { system: this.#values.system };
    save(localStorage, "settings", this.#values);
    for (const [name, input] of this.#inputs) {
      if (name === "system") continue;
      if (input.type === "checkbox") input.checked = false;
      else input.value = "";
      input.setCustomValidity("");
    }
  }
}

/** Marks the field as invalid while it has no tools that could be sent. */
function checkTools(input) {
  const check = () => {
    try {
      toolsOf(input.value);
      input.setCustomValidity("");
    } catch {
      input.setCustomValidity("A JSON list of functions, each with a name, or of OpenAI's tools.");
    }
  };
  input.addEventListener("input", check);
  check();
}

/** OpenAI's tools, of a text that has those or only their functions. Throws where it has neither. */
function toolsOf(text) {
  const tools = JSON.parse(text?.trim() || "[]").map((each) => (each.function ? each : { type: "function", function: each }));
  if (tools.some((each) => typeof each.function.name !== "string" || !each.function.name)) throw new TypeError("no name");
  return tools;
}
