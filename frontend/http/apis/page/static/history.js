// The list of past chats: each can be continued or deleted.

import { forgetChat, pastChats } from "./chats.js";
import { make } from "./dom.js";
import { connectPanel } from "./panel.js";

export class History {
  /** element: the panel. toggle: the button that shows it. chat: {id, open(id), clear()}. */
  constructor(element, toggle, chat) {
    this.#chat = chat;
    this.#show = connectPanel(element, toggle, "Past chats", ".past-chat", () => this.#draw());
    element.append(this.#note, this.#list, this.#deleteAll, this.#sure);
    this.#deleteAll.addEventListener("click", () => this.#ask(true));
  }

  #chat;
  #show;
  #note = make("p", { class: "help" });
  #list = make("ol", { class: "past-chats" });
  #deleteAll = make("button", { type: "button", class: "secondary" }, "Delete all");
  #sure = make("div", { class: "settings-foot", role: "group", "aria-label": "Delete all chats", hidden: true });

  #draw() {
    const chats = pastChats();
    this.#note.textContent = chats.length ? "They are kept in this browser, and nowhere else." : "None is kept in this browser.";
    this.#ask(false);
    this.#deleteAll.hidden = chats.length === 0;
    this.#list.replaceChildren(...chats.map((each) => this.#row(each)));
  }

  /** Whether it asks once more before it deletes all, which cannot be undone. */
  #ask(isAsking) {
    const chats = pastChats();
    const forgetAll = () => {
      for (const { id } of chats) this.#forget(id);
      this.#draw();
    };
    const keep = () => {
      this.#ask(false);
      this.#deleteAll.focus();
    };
    this.#sure.replaceChildren(
      make("button", { type: "button", class: "secondary danger", onclick: forgetAll }, `Delete ${chats.length} ${chats.length === 1 ? "chat" : "chats"}`),
      make("button", { type: "button", class: "quiet", onclick: keep }, "Keep"),
    );
    this.#deleteAll.hidden = isAsking;
    this.#sure.hidden = !isAsking;
    if (isAsking) this.#sure.lastChild.focus();
  }

  #row({ id, title, at }) {
    const open = () => {
      this.#chat.open(id);
      this.#show(false);
    };
    const forget = () => {
      this.#forget(id);
      this.#draw();
      this.#list.querySelector("button")?.focus();
    };
    const time = make("time", { datetime: new Date(at).toISOString() }, new Date(at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }));
    return make(
      "li",
      {},
      make("button", { type: "button", class: "past-chat", "aria-current": id === this.#chat.id ? "true" : null, onclick: open },
        make("span", { class: "past-title" }, title), time),
      make("button", { type: "button", class: "quiet small", "aria-label": `Delete: ${title}`, onclick: forget }, "Delete"),
    );
  }

  #forget(id) {
    forgetChat(id);
    if (id === this.#chat.id) this.#chat.clear();
  }
}
