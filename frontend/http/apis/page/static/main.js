// The page's beginning: makes its parts and connects them.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Conversation } from "./conversation.js";
import { Engines } from "./engines.js";
import { Feed } from "./feed.js";
import { History } from "./history.js";
import { Key } from "./key.js";
import { LiveView } from "./live.js";
import { Samples } from "./samples.js";
import { Settings } from "./settings.js";
import { load, save } from "./storage.js";

const by = (id) => document.getElementById(id);

const key = new Key();
const api = new Api(() => key.value);
const feed = new Feed(api, key);
const samples = new Samples();
const settings = new Settings(by("settings"), by("settings-toggle"), key);
const engines = new Engines(by("engine"));
const chat = new Chat({ api, key, settings, conversation: new Conversation(), choice: () => engines.choice });
new History(by("past"), by("past-toggle"), chat);
const live = new LiveView(by("live"), samples);

engines.addEventListener("choice", () => {
  settings.showDefaults(engines.choice?.defaults ?? {});
  chat.showEngines();
});
feed.addEventListener("state", ({ detail: snapshot }) => {
  if (snapshot !== null) {
    samples.add(snapshot);
    engines.take(snapshot);
  }
  live.take(snapshot);
  showState(snapshot);
});
feed.addEventListener("happened", ({ detail }) => live.note(detail));
addEventListener("pagehide", () => samples.keep());
addEventListener("hashchange", showView);
connectTheme();
showView();
feed.run();

/** Shows the view that the address names. */
function showView() {
  const isLive = location.hash === "#live";
  by("chat").hidden = isLive;
  by("live").hidden = !isLive;
  document.title = isLive ? "Live · Headrace" : "Headrace";
  for (const [id, isShown] of [["tab-chat", !isLive], ["tab-live", isLive]]) {
    if (isShown) by(id).setAttribute("aria-current", "page");
    else by(id).removeAttribute("aria-current");
  }
  feed.isWatched = isLive;
  feed.hurry();
  live.draw();
}

/** The engines' state in the bar, and what is wrong above everything else. */
function showState(snapshot) {
  const all = snapshot?.engines ?? [];
  const ready = all.filter(({ state }) => state === "ready").length;
  const away = all.filter(({ state }) => state !== "ready");
  const state = snapshot === null ? "lost" : ready === 0 ? (away[0]?.state ?? "starting") : away.length ? "partly" : "ready";
  const texts = {
    lost: snapshot === null ? "No answer" : "Engine lost",
    partly: `${ready} of ${all.length} engines`,
    ready: ready === 1 ? "Ready" : `${ready} engines`,
    starting: "Loading",
  };
  by("state").dataset.state = state;
  by("state-text").textContent = texts[state] ?? `Engine ${state}`;
  const problems = away.filter(({ problem }) => problem).map(({ index, problem }) => `Engine ${index}: ${problem}`);
  const text = snapshot === null ? "The server does not answer. This page tries again until it does." : problems.join(" ");
  if (by("banner").textContent !== text) by("banner").textContent = text;
  by("banner").hidden = text === "";
}

/** The button goes through the themes: the system's, light, dark. */
function connectTheme() {
  const button = by("theme");
  const names = { auto: "as the system has it", light: "light", dark: "dark" };
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.setAttribute("aria-label", `Theme: ${names[theme]}`);
    button.title = `Theme: ${names[theme]}`;
    return theme;
  };
  let theme = show(load(localStorage, "theme", "auto"));
  button.addEventListener("click", () => {
    theme = show({ auto: "light", light: "dark", dark: "auto" }[theme]);
    save(localStorage, "theme", theme === "auto" ? null : theme);
  });
}
