// Elements made in code. Text only ever becomes a text node, so nothing that a model wrote is parsed as HTML.

/**
 * An element. `properties`: attributes; a name that begins with `on` is an event and its listener; true is an attribute
 * without a value; false, null and undefined are left out. `children`: nodes, texts and lists of them, of which null
 * and undefined are left out. Long lists are passed as lists: a call takes only so many arguments.
 */
export function make(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for SVG. */
export function makeSvg(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

/** An icon of 20 by 20 units, drawn by the path; decoration for screen readers. */
export function icon(path) {
  return makeSvg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, makeSvg("path", { d: path }));
}

/** Says a text to screen readers. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** Copies the text, and tells of it on the button for a moment. */
export async function copyFrom(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // without HTTPS, browsers have a clipboard on localhost alone
  }
  announce(button.textContent);
  setTimeout(() => (button.textContent = before), 1500);
}
