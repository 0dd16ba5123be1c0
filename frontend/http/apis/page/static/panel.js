// A panel beside the chat that a button shows and hides.

import { make } from "./dom.js";

/**
 * Connects a panel with its button, and begins it with a title and a way to close it. Returns a function that shows or
 * hides it. `onShow` is called before it is shown; where the focus goes then is the first of `first`.
 */
export function connectPanel(element, toggle, title, first, onShow) {
  const show = (isShown) => {
    if (isShown) onShow();
    element.hidden = !isShown;
    toggle.setAttribute("aria-expanded", String(isShown));
  };
  const close = make("button", { type: "button", class: "quiet" }, "Close");
  close.addEventListener("click", () => {
    show(false);
    toggle.focus();
  });
  toggle.addEventListener("click", () => {
    show(element.hidden);
    if (!element.hidden) (element.querySelector(first) ?? close).focus();
  });
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // it does not stop an answer too
    close.click();
  });
  element.append(make("div", { class: "panel-head" }, make("h2", {}, title), close));
  return show;
}
