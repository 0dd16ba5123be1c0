// The API key: asked for in a dialog when the server wants one, kept for this tab or, if the visitor says so, this browser.

import { make } from "./dom.js";
import { load, save } from "./storage.js";

export class Key {
  #value = load(sessionStorage, "key", "") || load(localStorage, "key", "");
  #asking = null;

  get value() {
    return this.#value;
  }

  forget() {
    this.#value = "";
    save(sessionStorage, "key", null);
    save(localStorage, "key", null);
  }

  /** Resolves once the visitor has given another key. `tried`: the key that the server refused, "" for none. */
  ask(tried) {
    if (tried !== this.#value) return Promise.resolve(); // another request has asked for it meanwhile
    this.#asking ??= this.#show(tried !== "").finally(() => (this.#asking = null));
    return this.#asking;
  }

  #show(wasWrong) {
    const problem = make("p", { class: "problem", role: "alert", id: "key-problem" });
    problem.textContent = wasWrong ? "The server does not know that key." : "";
    const field = make("input", {
      type: "password",
      id: "key-field",
      autocomplete: "current-password",
      required: true,
      spellcheck: "false",
      "aria-describedby": "key-problem",
    });
    const keeps = make("input", { type: "checkbox", id: "key-keep" });
    const form = make(
      "form",
      { method: "dialog" },
      make("h2", { id: "key-title" }, "This server needs a key"),
      make("p", {}, "It was started with --api-key. The key stays in this tab, and goes to this server alone."),
      make("label", { for: "key-field" }, "API key"),
      field,
      problem,
      make("label", { class: "check" }, keeps, "Keep it in this browser"),
      make("div", { class: "dialog-foot" }, make("button", { type: "submit", class: "primary" }, "Continue")),
    );
    const dialog = make("dialog", { class: "dialog", "aria-labelledby": "key-title" }, form);
    document.body.append(dialog);
    dialog.addEventListener("cancel", (event) => event.preventDefault()); // nothing works without it
    return new Promise((done) => {
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        const given = field.value.trim();
        if (!/^[\x21-\x7e]+$/.test(given)) {
          problem.textContent = "A key has letters, digits and signs of ASCII, without spaces.";
          return;
        }
        this.#value = given;
        save(sessionStorage, "key", given);
        save(localStorage, "key", keeps.checked ? given : null);
        dialog.close();
        dialog.remove();
        done();
      });
      dialog.showModal();
      field.focus();
    });
  }
}
