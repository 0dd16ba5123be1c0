// The conversation of this tab, kept over a reload. A message is
//   {role: "user", text}  or  {role: "assistant", text, reasoning, tokens, figures, state, error}
// where `tokens` are log-probabilities, `figures` counts and times, and `state` one of streaming, done, stopped, failed.

import { load, save } from "./storage.js";

const NAME = "conversation";

export class Conversation {
  messages = load(sessionStorage, NAME, []);

  constructor() {
    for (const message of this.messages) {
      if (message.state === "streaming") message.state = "stopped"; // the reload ended it
    }
  }

  /** Adds a question and its answer, which is still empty, and returns the answer. */
  ask(text) {
    this.messages.push({ role: "user", text });
    return this.answer();
  }

  /** A new, empty answer to the last question, in the place of those that there are. */
  answer() {
    while (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    const answer = { role: "assistant", text: "", reasoning: "", tokens: [], figures: {}, state: "streaming", error: null };
    this.messages.push(answer);
    return answer;
  }

  /** Removes the message at the index and all behind it. */
  cut(index) {
    this.messages.length = index;
    this.save();
  }

  /** The messages as the API takes them. An answer that failed before its first word is left out. */
  forRequest(systemPrompt) {
    const system = systemPrompt.trim() ? [{ role: "system", content: systemPrompt }] : [];
    const said = this.messages.filter((each) => each.role === "user" || (each.text && each.state !== "streaming"));
    return [...system, ...said.map(({ role, text }) => ({ role, content: text }))];
  }

  save() {
    if (save(sessionStorage, NAME, this.messages)) return;
    // The largest part goes first.
    save(sessionStorage, NAME, this.messages.map((each) => (each.tokens ? { ...each, tokens: [] } : each)));
  }
}
