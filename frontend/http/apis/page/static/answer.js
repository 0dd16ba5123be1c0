// One answer on the page: its text as Markdown or token by token, its reasoning, its figures, and what can be done.

import { CallsView } from "./calls.js";
import { copyFrom, make } from "./dom.js";
import { speedOf } from "./generation.js";
import { MarkdownView } from "./markdown.js";
import { TokenView } from "./tokens.js";

const SHARE_OF_TIME = 4; // drawing takes at most about a fourth of the time, however long the text is

export class AnswerView {
  /** actions: `retry`, called by the button of that name; `returned`, called with the results of its calls; `drawn`. */
  constructor(message, actions, isLast) {
    this.message = message;
    this.#isLast = isLast;
    this.#actions = actions;
    this.#calls = new CallsView(message, (results) => this.#actions.returned(results));
    this.element.append(
      make("h2", { class: "unseen" }, "Answer"),
      this.#thinking,
      this.#waiting,
      this.#text.element,
      this.#tokens.element,
      this.#calls.element,
      this.#problem,
      make("div", { class: "answer-foot" }, this.#buttons, this.#figures),
    );
    this.#thinking.append(make("summary", {}, "Reasoning"), this.#reasoning.element);
    this.#text.element.classList.add("answer-text");
    this.#showsTokens = message.tokens.length > 0;
    this.draw();
  }

  element = make("li", { class: "answer" });
  #actions;
  #isLast; // of the conversation: its calls wait for their results
  #calls;
  #thinking = make("details", { class: "thinking", hidden: true });
  #reasoning = new MarkdownView();
  #waiting = make("p", { class: "waiting" }, make("span", { class: "waves", "aria-hidden": "true" }), "Waiting for the first token");
  #text = new MarkdownView();
  #tokens = new TokenView();
  #problem = make("div", { class: "problem-card", hidden: true });
  #buttons = make("div", { class: "answer-buttons" });
  #figures = make("p", { class: "figures" });
  #showsTokens = false;
  #timer = null;
  #lastMs = 0;

  /** Draws the message as it is now, or soon, while it grows fast. */
  change() {
    this.#showsTokens = this.message.tokens.length > 0; // the choice is the visitor's once the answer is complete
    this.#timer ??= setTimeout(() => this.draw(), Math.max(16, SHARE_OF_TIME * this.#lastMs));
  }

  draw() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const beganMs = performance.now();
    const { message } = this;
    const isRunning = message.state === "streaming";
    this.element.setAttribute("aria-busy", String(isRunning));
    this.#waiting.hidden = !isRunning || message.text !== "" || message.reasoning !== "" || message.calls?.length > 0;
    this.#thinking.hidden = message.reasoning === "";
    if (message.reasoning) this.#reasoning.update(message.reasoning);
    this.#text.update(message.text);
    this.#text.element.hidden = this.#showsTokens;
    this.#tokens.element.hidden = !this.#showsTokens;
    if (this.#showsTokens) this.#tokens.update(message.tokens);
    this.#calls.draw(this.#isLast && message.state === "done");
    this.#figures.textContent = figuresOf(message);
    this.#drawProblem();
    if (!isRunning) this.#drawButtons();
    this.#lastMs = performance.now() - beganMs;
    this.#actions.drawn();
  }

  #drawProblem() {
    const { error } = this.message;
    this.#problem.hidden = error === null;
    if (error === null) return;
    const retry = make("button", { type: "button", class: "secondary", onclick: () => this.#actions.retry() }, "Try again");
    this.#problem.replaceChildren(make("p", {}, make("strong", {}, error.title)), make("p", {}, error.text), retry);
    this.#problem.setAttribute("role", "alert");
  }

  #drawButtons() {
    const { text, tokens, error } = this.message;
    const copy = make("button", { type: "button", class: "quiet small" }, "Copy");
    copy.addEventListener("click", () => copyFrom(copy, text));
    const retry = make("button", { type: "button", class: "quiet small retry", onclick: () => this.#actions.retry() }, "Retry");
    const view = make("button", { type: "button", class: "quiet small" }, this.#showsTokens ? "Formatted" : "Tokens");
    view.addEventListener("click", () => {
      this.#showsTokens = !this.#showsTokens;
      this.draw();
      this.#buttons.querySelector("button:last-child").focus();
    });
    this.#buttons.replaceChildren(...[text ? copy : null, error ? null : retry, tokens.length ? view : null].filter(Boolean));
  }
}

/** "128 tokens · 42.1 tokens/s · first after 0.31 s · prompt 512 (480 cached)" */
function figuresOf({ figures, state, text, calls }) {
  const parts = [];
  if (figures.tokens) parts.push(`${count(figures.tokens)} token${figures.tokens === 1 ? "" : "s"}`);
  const speed = speedOf(figures);
  if (speed !== null) parts.push(`${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s`);
  if (figures.firstSeconds !== undefined) parts.push(`first after ${figures.firstSeconds.toFixed(2)} s`);
  if (figures.promptTokens) {
    const cached = figures.cachedTokens ? ` (${count(figures.cachedTokens)} cached)` : "";
    parts.push(`prompt ${count(figures.promptTokens)}${cached}`);
  }
  if (state === "stopped") parts.push("stopped");
  if (state === "done" && figures.finishReason === "length") parts.push("cut at max tokens");
  if (state === "done" && !text && !calls?.length && figures.finishReason === "stop") parts.push("the model had nothing to say");
  return parts.join(" · ");
}

function count(number) {
  return number.toLocaleString("en");
}
