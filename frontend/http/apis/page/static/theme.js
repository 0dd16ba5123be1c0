// A classic script in the head: it sets the chosen theme before anything is drawn, so that no page flashes in the other.
"use strict";
try {
  const chosen = JSON.parse(localStorage.getItem("headrace.theme"));
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is turned off: the system's theme it is.
}
