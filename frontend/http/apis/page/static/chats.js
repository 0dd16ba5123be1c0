// Past chats, kept in this browser alone. Each is an entry of its own, so that tabs do not overwrite each other's:
//   headrace.chat.ID: {id, title, at, messages}, where `at` is the time of its last change in milliseconds.

import { list, load, save } from "./storage.js";

const NAME = "chat.";
const MOST = 200;
const LONGEST_TITLE = 80;

/** The chats that there are, the latest first. */
export function pastChats() {
  const all = list(localStorage, NAME).map((name) => load(localStorage, name, null));
  return all.filter((each) => Array.isArray(each?.messages)).sort((a, b) => b.at - a.at);
}

export function chatOf(id) {
  return load(localStorage, NAME + id, null);
}

/** Keeps a chat, without log-probabilities, which are most of it. The oldest make room where there is none. */
export function keepChat(id, messages) {
  const question = messages.find((each) => each.role === "user")?.text ?? "";
  const title = question.trim().replace(/\s+/g, " ").slice(0, LONGEST_TITLE) || "Without a question";
  const kept = messages.map((each) => (each.tokens?.length ? { ...each, tokens: [] } : each));
  const chat = { id, title, at: Date.now(), messages: kept };
  const isKept = () => save(localStorage, NAME + id, chat);
  if (isKept() && list(localStorage, NAME).length <= MOST) return;
  const others = pastChats().filter((each) => each.id !== id);
  for (const each of others.splice(MOST - 1)) forgetChat(each.id);
  while (!isKept() && others.length) forgetChat(others.pop().id);
}

export function forgetChat(id) {
  save(localStorage, NAME + id, null);
}
