// The chat: the conversation on the page, what the visitor writes, and the answer that runs.

import { AnswerView } from "./answer.js";
import { announce, make } from "./dom.js";
import { receive, requestBody } from "./generation.js";

const SUGGESTIONS = [
  "Explain what a KV cache is, in three sentences.",
  "Write a haiku about a river.",
  "Show a Python function that merges two sorted lists.",
];
const NEAR_PX = 80; // of the end: then the view follows the text
const SAVE_EVERY_MS = 1000;

export class Chat {
  /** parts: {api, key, conversation, settings, choice}; choice() is the engine that was chosen, or null. */
  constructor(parts) {
    Object.assign(this, parts);
    const by = (id) => document.getElementById(id);
    this.list = by("messages");
    this.scroll = by("scroll");
    this.prompt = by("prompt");
    this.buttons = { send: by("send"), stop: by("stop"), toEnd: by("to-end"), newChat: by("new-chat") };
    this.meter = by("meter");
    this.welcome = by("welcome");
    this.#listen(by("composer"));
    this.#drawAll();
  }

  #running = null; // the AbortController of the answer that is written
  #view = null; // of the last answer
  #follows = true;
  #savedMs = 0;

  #listen(form) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.prompt.addEventListener("input", () => this.#fit());
    this.prompt.addEventListener("keydown", (event) => {
      // While a word is composed, as in Japanese, Enter ends the word.
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running && !event.defaultPrevented) this.#stop();
    });
    this.buttons.stop.addEventListener("click", () => this.#stop());
    this.buttons.newChat.addEventListener("click", () => this.begin());
    this.buttons.toEnd.addEventListener("click", () => {
      this.#follows = true;
      this.#followEnd();
    });
    this.scroll.addEventListener("scroll", () => {
      const left = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight;
      this.#follows = left < NEAR_PX;
      this.buttons.toEnd.hidden = this.#follows;
    });
    new ResizeObserver(() => this.#followEnd()).observe(this.scroll);
    addEventListener("pagehide", () => this.conversation.save());
  }

  /** Draws what depends on the engines: they have changed. */
  showEngines() {
    this.#drawWelcome();
    this.#drawMeter();
    this.#drawButtons();
  }

  #send() {
    const text = this.prompt.value.trim();
    if (!text || this.#running || !this.choice()?.chats) return;
    if (this.settings.fields() === null) return;
    this.prompt.value = "";
    this.#fit();
    this.#answerTo(this.conversation.ask(text));
  }

  /** Goes on with what the last answer's calls have returned. */
  #returned(results) {
    if (this.#running || !this.choice()?.chats || this.settings.fields() === null) return;
    this.#answerTo(this.conversation.returned(results));
    this.prompt.focus();
  }

  #answerTo(answer) {
    this.#follows = true;
    this.#drawAll();
    this.#run(answer);
  }

  #retry() {
    if (this.#running || !this.choice()?.chats || this.settings.fields() === null) return;
    this.#answerTo(this.conversation.answer());
    this.prompt.focus();
  }

  #stop() {
    this.#running?.abort();
    this.prompt.focus();
  }

  get id() {
    return this.conversation.id;
  }

  /** Begins a new chat. */
  begin() {
    this.#stop();
    this.conversation.begin();
    this.#drawAll();
    this.prompt.focus();
  }

  /** Deletes this one. */
  clear() {
    this.#stop();
    this.conversation.cut(0);
    this.#drawAll();
  }

  /** Continues a past one. */
  open(id) {
    this.#stop();
    this.conversation.open(id);
    this.#follows = true;
    this.#drawAll();
    this.prompt.focus();
  }

  /** Takes a question back into the field, with all that followed it. */
  #edit(index) {
    this.#stop();
    this.prompt.value = this.conversation.messages[index].text;
    this.conversation.cut(index);
    this.#drawAll();
    this.#fit();
    this.prompt.focus();
  }

  async #run(answer) {
    const view = this.#view;
    const running = (this.#running = new AbortController());
    this.#drawButtons();
    announce("The answer begins.");
    try {
      await this.#receive(answer, view, running.signal);
      answer.state = "done";
    } catch (error) {
      answer.state = running.signal.aborted ? "stopped" : "failed";
      if (!running.signal.aborted) answer.error = explained(error);
    }
    if (this.#running === running) this.#running = null;
    view.draw();
    this.conversation.save();
    this.#drawButtons();
    this.#drawMeter();
    const ends = { done: "The answer is complete", stopped: "Stopped", failed: "The answer failed" };
    announce(`${ends[answer.state]}: ${answer.figures.tokens ?? 0} tokens.`);
  }

  async #receive(answer, view, signal) {
    const { model, rank } = this.choice();
    const body = requestBody({
      model,
      messages: this.conversation.forRequest(this.settings.systemPrompt),
      fields: this.settings.fields() ?? {},
      withTokens: this.settings.withTokens,
    });
    const headers = rank === null ? {} : { "x-data-parallel-rank": String(rank) };
    for (;;) {
      const used = this.key.value;
      try {
        const events = this.api.stream("v1/chat/completions", body, { headers, signal });
        await receive(events, answer, () => this.#onEvent(view));
        return;
      } catch (error) {
        if (error.status !== 401) throw error;
        await this.key.ask(used);
      }
    }
  }

  #onEvent(view) {
    view.change();
    if (performance.now() - this.#savedMs > SAVE_EVERY_MS) {
      this.#savedMs = performance.now();
      this.conversation.save();
    }
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  #drawAll() {
    const { messages } = this.conversation;
    this.list.replaceChildren(
      ...messages.map((message, index) => this.#drawn(message, index, index === messages.length - 1)),
    );
    this.#drawWelcome();
    this.#drawButtons();
    this.#drawMeter();
    this.#followEnd();
  }

  #drawn(message, index, isLast) {
    if (message.role === "user") return this.#question(message, index);
    return message.role === "tool" ? resultOf(message) : this.#answer(message, isLast);
  }

  #question({ text }, index) {
    const edit = make("button", { type: "button", class: "quiet small", onclick: () => this.#edit(index) }, "Edit");
    return make("li", { class: "question" }, make("h2", { class: "unseen" }, "Question"), make("p", { class: "bubble" }, text), edit);
  }

  #answer(message, isLast) {
    this.#view = new AnswerView(message, {
      retry: () => this.#retry(),
      returned: (results) => this.#returned(results),
      drawn: () => this.#followEnd(),
    }, isLast);
    return this.#view.element;
  }

  #drawWelcome() {
    const isEmpty = this.conversation.messages.length === 0;
    this.welcome.hidden = !isEmpty;
    if (!isEmpty) return;
    const choice = this.choice();
    const { title, facts } = greeting(choice);
    if (this.welcome.dataset.title === title) return;
    this.welcome.dataset.title = title;
    const buttons = SUGGESTIONS.map((text) =>
      make("button", { type: "button", class: "suggestion", onclick: () => this.#suggest(text) }, text));
    const suggestions = choice?.chats ? [make("div", { class: "suggestions" }, ...buttons)] : [];
    this.welcome.replaceChildren(make("h2", {}, title), make("p", {}, ...facts), ...suggestions);
  }

  #suggest(text) {
    this.prompt.value = text;
    this.#fit();
    this.#send();
  }

  #drawButtons() {
    const isRunning = this.#running !== null;
    this.buttons.stop.hidden = !isRunning;
    this.buttons.send.hidden = isRunning;
    this.buttons.send.disabled = !this.choice()?.chats || !this.prompt.value.trim();
    this.buttons.newChat.disabled = this.conversation.messages.length === 0;
    // Only the last answer can be tried again.
    this.list.dataset.running = String(isRunning);
  }

  /** How much of the context the conversation takes. */
  #drawMeter() {
    const { figures } = this.conversation.messages.findLast((each) => each.figures?.promptTokens) ?? {};
    const most = this.choice()?.contextLength;
    const used = (figures?.promptTokens ?? 0) + (figures?.tokens ?? 0);
    this.meter.textContent = figures && most ? `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens` : "";
    this.meter.dataset.full = String(Boolean(most) && used > 0.9 * most);
  }

  #fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight}px`;
    this.#drawButtons();
  }

  #followEnd() {
    if (this.#follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

/** What stands in place of the first question: {title, facts}. */
function greeting(choice) {
  if (!choice) {
    const facts = ["The model is loading, or its engine has ended: the live view tells."];
    return { title: "No engine is ready yet", facts };
  }
  if (!choice.chats) {
    const routes = make("a", { href: "docs" }, "the routes of this server");
    return { title: `${choice.label} writes no text`, facts: ["It computes embeddings, scores or classes: see ", routes, "."] };
  }
  const length = choice.contextLength.toLocaleString("en");
  return { title: `Ask ${choice.label}`, facts: [`${length} tokens of context. Chats are kept in this browser.`] };
}

/** What a call has returned. */
function resultOf({ name, text }) {
  return make("li", { class: "result" }, make("h2", { class: "unseen" }, "Result"),
    make("p", { class: "call-head" }, make("code", {}, name), " returned"),
    make("pre", { class: "call-arguments", tabindex: "0", role: "region", "aria-label": `What ${name} returned` }, text));
}

/** An error in the words of this page: {title, text}. */
function explained({ status, code, message }) {
  const titles = {
    context_length_exceeded: "The conversation is longer than the model's context",
    engine_dead: "The engine is not running",
    engine_silent: "The engine does not answer",
    loading: "The model is still loading",
    rate_limit_exceeded: "Too many requests wait already",
    shutting_down: "The server is shutting down",
  };
  const hints = {
    context_length_exceeded: "Start a new chat, edit an earlier question, or lower Max tokens in the settings.",
  };
  const byStatus = { 0: "The connection was lost", 400: "The server refused the request", 404: "The model is gone" };
  const title = titles[code] ?? byStatus[status] ?? "The answer failed";
  return { title, text: [message, hints[code]].filter(Boolean).join(" ") };
}
