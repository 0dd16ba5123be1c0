// Markdown as DOM nodes, drawn again and again while it grows: paragraphs, headings, lists, quotes, code and tables.
// HTML in it is shown as text. Blocks that are complete are drawn once; only what is still written changes.

import { copyFrom, make } from "./dom.js";
import { inline } from "./inline.js";

const MOST_DEPTH = 12; // lists and quotes within each other
const MOST_COLUMNS = 64;
const MOST_CELLS = 5000; // of one table; further rows are shown as text
// No pattern may take more than linear time on any line.
const FENCE = /^( {0,3})(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>[ ]?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TASK = /^\[([ xX])\][ \t]+/;
const DELIMITER = /^:?-+:?$/;

/** An element that shows a text which grows. */
export class MarkdownView {
  element = make("div", { class: "markdown" });
  #shown = []; // {key, node} for each block

  /** Shows the text; what has not changed since the last call stays. */
  update(text) {
    const blocks = blocksOf(text.split("\n"), 0);
    let level = 2; // of the heading before: headings go down one by one, as screen readers expect it
    let same = true;
    blocks.forEach((block, index) => {
      if (block.kind === "heading") block.level = level = Math.min(block.depth + 2, level + 1, 6);
      const key = `${block.kind} ${block.level ?? ""} ${block.language ?? ""} ${block.lines.join("\n")}`;
      same &&= this.#shown[index]?.key === key;
      if (same) return;
      const node = drawn(block, 0);
      if (this.#shown[index]) this.#shown[index].node.replaceWith(node);
      else this.element.append(node);
      this.#shown[index] = { key, node };
    });
    for (const { node } of this.#shown.splice(blocks.length)) node.remove();
  }
}

/** The blocks of some lines: {kind, lines, ...}. */
function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = blockAt(lines, at, depth);
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    return { kind: "heading", depth: heading[1].length, lines: [withoutHashes(heading[2] ?? "")], end: at + 1 };
  }
  if (RULE.test(line)) return { kind: "rule", lines: [], end: at + 1 };
  if (depth < MOST_DEPTH && QUOTE.test(line)) {
    const end = endOf(lines, at, (each) => QUOTE.test(each));
    return { kind: "quote", lines: lines.slice(at, end).map((each) => each.replace(QUOTE, "")), end };
  }
  if (depth < MOST_DEPTH && ITEM.test(line)) return list(lines, at);
  if (isTable(lines, at)) {
    const end = endOf(lines, at + 1, (each) => each.includes("|"));
    return { kind: "table", lines: lines.slice(at, end), end };
  }
  const end = endOf(lines, at, (each, index) => each.trim() !== "" && !interrupts(lines, index, depth));
  return { kind: "paragraph", lines: lines.slice(at, end), end };
}

/** The index behind the lines that belong to the block whose first line is at `at`. */
function endOf(lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && belongs(lines[end], end)) end++;
  return end;
}

function interrupts(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, at)) return true;
  const item = depth < MOST_DEPTH && ITEM.exec(line);
  // A number other than 1 at the beginning of a line is part of a sentence.
  return depth < MOST_DEPTH && (QUOTE.test(line) || (item && (/\D/.test(item[2][0]) || Number.parseInt(item[2], 10) === 1)));
}

/** A heading's text without the signs that may close it. */
function withoutHashes(text) {
  const trimmed = text.trim();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end--;
  return end === 0 || /\s/.test(trimmed[end - 1]) ? trimmed.slice(0, end).trimEnd() : trimmed;
}

function isTable(lines, at) {
  const next = lines[at + 1];
  if (next === undefined || !lines[at].includes("|") || /[^-|: \t]/.test(next)) return false;
  const delimiters = cellsOf(next);
  const isOne = delimiters.length <= MOST_COLUMNS && delimiters.every((each) => DELIMITER.test(each));
  return isOne && cellsOf(lines[at]).length === delimiters.length;
}

function fenced(lines, at, [, indent, ticks, ofTicks, tildes, ofTildes]) {
  const fence = ticks ?? tildes;
  const closes = (line) => {
    const trimmed = line.trim();
    return trimmed.length >= fence.length && !trimmed.replaceAll(fence[0], "");
  };
  const end = endOf(lines, at, (line) => !closes(line));
  const code = lines.slice(at + 1, end).map((line) => outdented(line, indent.length));
  const language = (ofTicks ?? ofTildes).trim().split(/\s/)[0];
  return { kind: "code", language, lines: code, end: end === lines.length ? end : end + 1 };
}

/** The line without its first spaces, at most so many. */
function outdented(line, most) {
  let count = 0;
  while (count < most && line[count] === " ") count++;
  return line.slice(count);
}

/** A list: its items' lines are indented, or follow without an empty line. */
function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const own = (line) => {
    const item = ITEM.exec(line);
    return item && item[1].length < indent + 2 && /\d/.test(item[2]) === isOrdered && !RULE.test(line);
  };
  let wasEmpty = false;
  const end = endOf(lines, at, (line) => {
    const belongs = !line.trim() || own(line) || /^\s/.test(line) || (!wasEmpty && !startsBlock(line));
    wasEmpty = !line.trim();
    return belongs;
  });
  const items = [];
  for (const line of lines.slice(at, end)) {
    const item = own(line) ? ITEM.exec(line) : null;
    if (item) {
      items.push({ width: item[0].length, lines: [line.slice(item[0].length)] });
    } else {
      const { width, lines: rest } = items.at(-1);
      rest.push(outdented(line, width));
    }
  }
  const start = isOrdered ? Number.parseInt(first[2], 10) : 1;
  return { kind: "list", isOrdered, start, items: items.map((item) => item.lines), lines: lines.slice(at, end), end };
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

/** The cells of a table's row; \| is no border. */
function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// --- drawing ---------------------------------------------------------------------------------------------------------

function drawn(block, depth) {
  switch (block.kind) {
    case "heading": {
      const text = inline(block.lines[0]);
      return block.level ? make(`h${block.level}`, {}, text) : make("p", {}, make("strong", {}, text));
    }
    case "rule": return make("hr");
    case "quote": return make("blockquote", {}, nested(block.lines, depth));
    case "list": return listDrawn(block, depth);
    case "code": return codeDrawn(block);
    case "table": return tableDrawn(block);
    default: return make("p", {}, inline(block.lines.map((line) => line.trim()).join("\n")));
  }
}

function nested(lines, depth) {
  return blocksOf(lines, depth + 1).map((block) => drawn(block, depth + 1));
}

function listDrawn({ isOrdered, start, items, lines }, depth) {
  const isTight = !lines.slice(0, lines.findLastIndex((line) => line.trim()) + 1).some((line) => !line.trim());
  const children = items.map((item) => {
    const task = TASK.exec(item[0]);
    const rest = task ? [item[0].slice(task[0].length), ...item.slice(1)] : item;
    const nodes = nested(rest, depth).flatMap((node) => (isTight && node.tagName === "P" ? [...node.childNodes] : [node]));
    if (!task) return make("li", {}, nodes);
    const isDone = task[1] !== " ";
    const box = make("span", { class: "task", role: "img", "aria-label": isDone ? "done" : "to do" }, isDone ? "☑" : "☐");
    return make("li", { class: "task-item" }, box, " ", nodes);
  });
  return isOrdered ? make("ol", { start: start === 1 ? null : start }, children) : make("ul", {}, children);
}

/** A block of code with its language and a button that copies it. */
function codeDrawn({ language, lines }) {
  const text = lines.join("\n");
  const button = make("button", { type: "button", class: "quiet small" }, "Copy");
  button.addEventListener("click", () => copyFrom(button, text));
  const name = language.slice(0, 40) || "text";
  return make(
    "div",
    { class: "code" },
    make("div", { class: "code-head" }, make("span", {}, name), button),
    // What scrolls can be focused, so that the arrow keys reach all of it.
    make("pre", { tabindex: "0", role: "region", "aria-label": `Code: ${name}` }, make("code", {}, text)),
  );
}

function tableDrawn({ lines }) {
  const sides = cellsOf(lines[1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null,
  );
  const row = (line, tag) =>
    make("tr", {}, cellsOf(line).slice(0, sides.length).map((cell, index) => {
      const scope = tag === "th" ? "col" : null;
      return make(tag, { scope, class: sides[index] && `to-${sides[index]}` }, inline(cell));
    }));
  const most = Math.floor(MOST_CELLS / sides.length);
  const body = lines.slice(2, 2 + most).map((line) => row(line, "td"));
  const table = make("table", {}, make("thead", {}, row(lines[0], "th")), make("tbody", {}, body));
  const scrolled = make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
  const rest = lines.slice(2 + most);
  return rest.length ? make("div", {}, scrolled, make("pre", { tabindex: "0" }, rest.join("\n"))) : scrolled;
}
