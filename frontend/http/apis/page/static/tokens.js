// An answer token by token: coloured by probability, with each token's alternatives where the pointer or the focus is.

import { make } from "./dom.js";

const GAP_PX = 6; // between a token and its alternatives
const STEPS = [0.9, 0.6, 0.3, 0.1]; // classes p0 (at least 90%) to p4

export class TokenView {
  element = make("div", { class: "tokens", role: "group", "aria-label": "Tokens: arrow keys go through them" });
  #tip = make("div", { class: "tip", role: "tooltip", hidden: true });
  #decoder = new TextDecoder("utf-8");
  #tokens = []; // those that are shown
  #spans = [];

  constructor() {
    this.element.addEventListener("pointerover", (event) => this.#show(event.target));
    this.element.addEventListener("focusin", (event) => this.#show(event.target));
    this.element.addEventListener("pointerleave", () => this.#hide());
    this.element.addEventListener("focusout", () => this.#hide());
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
    document.addEventListener("scroll", () => this.#hide(), { capture: true, passive: true });
    this.element.append(this.#tip);
  }

  /** Shows the tokens; those of the last call must be their beginning. */
  update(tokens) {
    for (const token of tokens.slice(this.#spans.length)) {
      const text = token.bytes ? this.#decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token;
      const step = STEPS.findIndex((least) => Math.exp(token.logprob) >= least);
      // One of them takes part in the order of focus; the arrow keys lead on from there.
      const span = make("span", {
        class: `token p${step < 0 ? STEPS.length : step}`,
        tabindex: this.#spans.length ? "-1" : "0",
        role: "button",
        "aria-label": labelOf(token),
      });
      span.textContent = text || "·"; // a part of a character
      this.#tokens.push(token);
      this.#spans.push(span);
      this.element.insertBefore(span, this.#tip);
    }
  }

  #onKey(event) {
    const at = this.#spans.indexOf(event.target);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.#spans.length - 1 }[event.key];
    if (event.key === "Escape") this.#hide();
    if (at < 0 || !this.#spans[next]) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    this.#spans[next].tabIndex = 0;
    this.#spans[next].focus();
  }

  #show(target) {
    const token = this.#tokens[this.#spans.indexOf(target)];
    if (!token) return;
    const rows = (token.others.length ? token.others : [[token.token, token.logprob]]).map(([text, logprob]) =>
      make("tr", { class: text === token.token ? "chosen" : null }, make("td", {}, visible(text)), make("td", {}, percent(logprob)), make("td", {}, logprob.toFixed(2))),
    );
    const isListed = token.others.some(([text]) => text === token.token);
    if (token.others.length && !isListed) {
      rows.push(make("tr", { class: "chosen" }, make("td", {}, visible(token.token)), make("td", {}, percent(token.logprob)), make("td", {}, token.logprob.toFixed(2))));
    }
    this.#tip.replaceChildren(make("table", {}, make("tbody", {}, ...rows)));
    this.#tip.hidden = false;
    // Below the token, or above it where there is no room; within the window.
    const { left, top, bottom } = target.getBoundingClientRect();
    const hasRoom = bottom + this.#tip.offsetHeight + GAP_PX < innerHeight;
    this.#tip.style.left = `${Math.max(GAP_PX, Math.min(left, innerWidth - this.#tip.offsetWidth - GAP_PX))}px`;
    this.#tip.style.top = `${hasRoom ? bottom + GAP_PX : top - this.#tip.offsetHeight - GAP_PX}px`;
  }

  #hide() {
    this.#tip.hidden = true;
  }
}

/** A token's text with its spaces and line ends visible. */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(nothing)";
}

function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100%" : `${share.toFixed(1)}%`;
}

function labelOf(token) {
  const others = token.others.filter(([text]) => text !== token.token).slice(0, 2);
  const rest = others.map(([text, logprob]) => `${visible(text)} ${percent(logprob)}`).join(", ");
  return `${visible(token.token)} ${percent(token.logprob)}${rest ? `; else ${rest}` : ""}`;
}
