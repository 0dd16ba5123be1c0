// The conversation of this tab, kept over a reload and among the past chats. A message is
//   {role: "user", text}
//   {role: "assistant", text, reasoning, calls, tokens, figures, state, error}
//   {role: "tool", call, name, text}: what the call of this id has returned
// where `calls` are {id, name, arguments}, `tokens` log-probabilities, `figures` counts and times, and `state` one of
// streaming, done, stopped, failed.

import { chatOf, forgetChat, keepChat } from "./chats.js";
import { load, save } from "./storage.js";

const NAME = "conversation";
const ID = "conversation-id";

export class Conversation {
  messages = withoutRunning(load(sessionStorage, NAME, []));
  id = load(sessionStorage, ID, null) ?? newId();

  /** Adds a question and its answer, which is still empty, and returns the answer. */
  ask(text) {
    this.messages.push({ role: "user", text });
    return this.answer();
  }

  /** Adds what the last answer's calls have returned, and an answer to that, which it returns. */
  returned(results) {
    this.messages.push(...results.map((each) => ({ role: "tool", ...each })));
    return this.answer();
  }

  /** A new, empty answer to the last message of somebody else, in the place of one that there is. */
  answer() {
    while (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    const empty = { text: "", reasoning: "", calls: [], tokens: [], figures: {}, state: "streaming", error: null };
    this.messages.push({ role: "assistant", ...empty });
    return this.messages.at(-1);
  }

  /** Removes the message at the index and all behind it. */
  cut(index) {
    this.messages.length = index;
    this.save();
  }

  /** Begins another conversation. This one stays among the past chats. */
  begin() {
    this.save();
    this.messages = [];
    this.id = newId();
    this.save();
  }

  /** Continues a past chat. */
  open(id) {
    const chat = chatOf(id);
    if (chat === null) return;
    this.save();
    [this.id, this.messages] = [id, withoutRunning(chat.messages)];
    this.save();
  }

  /** The messages as the API takes them. An answer that failed before its first word is left out. */
  forRequest(systemPrompt) {
    const system = systemPrompt.trim() ? [{ role: "system", content: systemPrompt }] : [];
    const said = this.messages.filter(
      (each) => each.role !== "assistant" || ((each.text || each.calls?.length) && each.state !== "streaming"),
    );
    return [...system, ...said.map(asSent)];
  }

  /** Saves it for this tab and, unless it is empty, among the past chats. */
  save() {
    save(sessionStorage, ID, this.id);
    if (!save(sessionStorage, NAME, this.messages)) {
      // The largest part goes first.
      save(sessionStorage, NAME, this.messages.map((each) => (each.tokens ? { ...each, tokens: [] } : each)));
    }
    if (this.messages.length) keepChat(this.id, this.messages);
    else forgetChat(this.id);
  }
}

/** The messages as they were kept. An answer that was written then has ended since. */
function withoutRunning(messages) {
  return messages.map((each) => (each.state === "streaming" ? { ...each, state: "stopped" } : each));
}

function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).join("-");
}

function asSent({ role, text, calls, call, name }) {
  if (role === "tool") return { role, tool_call_id: call, name, content: text };
  if (!calls?.length) return { role, content: text };
  const sent = calls.map((each) => ({
    id: each.id, type: "function", function: { name: each.name, arguments: each.arguments },
  }));
  return { role, content: text || null, tool_calls: sent };
}
