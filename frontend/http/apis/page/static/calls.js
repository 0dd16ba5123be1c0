// The tools that an answer calls, and what the visitor says that they return.

import { make } from "./dom.js";

export class CallsView {
  /** message: the answer. onReturned: called with [{call, name, text}] when all results are given. */
  constructor(message, onReturned) {
    this.#message = message;
    this.#onReturned = onReturned;
  }

  #message;
  #onReturned;
  element = make("div", { class: "calls", hidden: true });
  #hasForm = false;

  /** Draws the calls as they are now. isOpen: whether their results are asked for. */
  draw(isOpen) {
    const { calls } = this.#message;
    this.element.hidden = !calls?.length;
    if (this.element.hidden || (isOpen && this.#hasForm)) return;
    this.#hasForm = isOpen;
    const cards = calls.map((call, index) => this.#card(call, index, isOpen));
    if (!isOpen) {
      this.element.replaceChildren(...cards);
      return;
    }
    const form = make("form", {}, cards, make("button", { type: "submit", class: "secondary" }, "Continue with these"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const fields = [...form.querySelectorAll("textarea")];
      this.#onReturned(calls.map(({ id, name }, index) => ({ call: id, name, text: fields[index].value })));
    });
    this.element.replaceChildren(form);
  }

  #card({ id, name, arguments: given }, index, isOpen) {
    const field = `result-${id}-${index}`;
    return make(
      "div",
      { class: "call" },
      make("p", { class: "call-head" }, "Calls ", make("code", {}, name || "…")),
      make("pre", { class: "call-arguments", tabindex: "0", role: "region", "aria-label": `Arguments of ${name}` }, pretty(given)),
      isOpen ? make("label", { for: field }, `What ${name} returns`) : null,
      isOpen ? make("textarea", { id: field, rows: "2", required: true, placeholder: "Text or JSON" }) : null,
    );
  }
}

/** JSON that is complete with indents; anything else as it is. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
