// What the browser keeps of this page. Where storage is turned off or full, things last as long as the page.

const PREFIX = "headrace.";

/** The value that was saved under the name in this storage (localStorage, sessionStorage), else `otherwise`. */
export function load(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Whether the value could be saved; null removes it. */
export function save(storage, name, value) {
  try {
    if (value === null) storage.removeItem(PREFIX + name);
    else storage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** The names that begin so and have a value. */
export function list(storage, start) {
  try {
    return Object.keys(storage)
      .filter((name) => name.startsWith(PREFIX + start))
      .map((name) => name.slice(PREFIX.length));
  } catch {
    return [];
  }
}
