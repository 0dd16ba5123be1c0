// The Markdown within a paragraph, as DOM nodes: emphasis, code, links. What a model writes is hostile input: nothing is
// parsed as HTML, links lead to web and mail addresses alone, images become links, since loading one would tell
// another site about the visitor. Time is linear in the text but for what the bounds below allow.

import { make } from "./dom.js";

const MOST_DEPTH = 24; // of elements within each other; deeper ones are left out, and their text stays
const LONGEST_URL = 2000;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const IS_SPACE = /\s/;
const IS_SIGN = /[\p{P}\p{S}]/u;
const TARGET = new RegExp(
  String.raw`\([ \n]{0,4}(?:<([^<>\n]{0,${LONGEST_URL}})>|((?:[^\s()<>]|\([^\s()]{0,200}\)){0,${LONGEST_URL}}))` +
    String.raw`(?:[ \n]{1,4}(?:"(?:[^"\\\n]|\\[^\n]){0,300}"|'(?:[^'\\\n]|\\[^\n]){0,300}'))?[ \n]{0,4}\)`,
  "y",
);
const IN_ANGLES = new RegExp(String.raw`<((?:https?:\/\/|mailto:)[^\s<>]{1,${LONGEST_URL}})>`, "y");
const BARE = new RegExp(String.raw`https?:\/\/[^\s<>"\x60]{1,${LONGEST_URL}}`, "y");
const ENTITY = /&(amp|lt|gt|quot|apos|nbsp|#39);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };

/** The nodes of a paragraph's text. */
export function inline(text) {
  return new Scanner(text).nodes();
}

/** The address that a link may lead to, as a URL; null for any other, such as javascript: and data:. */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // relative ones would lead into this server
  }
}

// Pieces, in the order of the text:
//   {text}                            plain text
//   {node}                            an element that is done
//   {run, count, closes, opens}       what is left of a run of * _ or ~, the elements that end at it, and those that begin
// and, while links are looked for, {bracket, isImage}, an opening bracket that may yet become a link's.
class Scanner {
  constructor(text) {
    this.#text = text;
  }

  #text;
  #at = 0;
  #pieces = [];
  #brackets = []; // indices of the pieces that are opening brackets
  #unclosed = new Set(); // lengths of runs of backticks that nothing further on closes

  nodes() {
    let plainFrom = 0;
    const flush = () => {
      if (plainFrom < this.#at) this.#pieces.push({ text: this.#text.slice(plainFrom, this.#at) });
    };
    while (this.#at < this.#text.length) {
      const read = this.#reader(this.#text[this.#at]);
      if (read === null) {
        this.#at++;
        continue;
      }
      flush();
      const before = this.#at;
      read();
      plainFrom = this.#at = Math.max(this.#at, before + 1);
    }
    flush();
    return assembled(this.#pieces);
  }

  #reader(sign) {
    switch (sign) {
      case "\\": return () => this.#escape();
      case "`": return () => this.#code();
      case "*": case "_": case "~": return () => this.#run(sign);
      case "[": return () => this.#openBracket(false);
      case "!": return this.#text[this.#at + 1] === "[" ? () => this.#openBracket(true) : null;
      case "]": return () => this.#closeBracket();
      case "<": return () => this.#angles();
      case "&": return () => this.#entity();
      case "\n": return () => this.#lineBreak();
      case "h": return this.#startsWord() && this.#matches(BARE) ? () => this.#bareUrl() : null;
      default: return null;
    }
  }

  #matches(pattern) {
    pattern.lastIndex = this.#at;
    return pattern.exec(this.#text);
  }

  #startsWord() {
    return this.#at === 0 || !/[\p{L}\p{N}]/u.test(this.#text[this.#at - 1]);
  }

  #put(text) {
    this.#pieces.push({ text });
  }

  #escape() {
    const next = this.#text[this.#at + 1] ?? "";
    this.#put(PUNCTUATION.test(next) ? next : "\\");
    this.#at += PUNCTUATION.test(next) ? 2 : 1;
  }

  #lengthOfRun(sign) {
    let end = this.#at;
    while (this.#text[end] === sign) end++;
    return end - this.#at;
  }

  #code() {
    const length = this.#lengthOfRun("`");
    const fence = "`".repeat(length);
    let end = this.#unclosed.has(length) ? -1 : this.#text.indexOf(fence, this.#at + length);
    while (end >= 0 && (this.#text[end + length] === "`" || this.#text[end - 1] === "`")) {
      let next = end;
      while (this.#text[next] === "`") next++; // a run of another length
      end = this.#text.indexOf(fence, next);
    }
    if (end < 0) {
      this.#unclosed.add(length);
      this.#put(fence);
      this.#at += length;
      return;
    }
    const code = this.#text.slice(this.#at + length, end).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
    this.#pieces.push({ node: make("code", {}, isPadded ? code.slice(1, -1) : code) });
    this.#at = end + length;
  }

  /** Whether a run may begin or end emphasis depends on its neighbours (CommonMark, "left-flanking"). */
  #run(sign) {
    const count = this.#lengthOfRun(sign);
    const before = this.#text[this.#at - 1] ?? " ";
    const after = this.#text[this.#at + count] ?? " ";
    this.#at += count;
    const [spaceBefore, spaceAfter] = [IS_SPACE.test(before), IS_SPACE.test(after)];
    const [signBefore, signAfter] = [IS_SIGN.test(before), IS_SIGN.test(after)];
    const left = !spaceAfter && (!signAfter || spaceBefore || signBefore);
    const right = !spaceBefore && (!signBefore || spaceAfter || signAfter);
    const canOpen = sign === "_" ? left && (!right || signBefore) : left;
    const canClose = sign === "_" ? right && (!left || signAfter) : right;
    this.#pieces.push({ run: sign, count, length: count, canOpen, canClose, closes: [], opens: [] });
  }

  #openBracket(isImage) {
    this.#brackets.push(this.#pieces.length);
    this.#pieces.push({ text: isImage ? "![" : "[", isImage });
    this.#at += isImage ? 2 : 1;
  }

  #closeBracket() {
    const opened = this.#brackets.pop();
    this.#at++;
    const target = opened === undefined ? null : this.#matches(TARGET);
    if (target === null) {
      this.#put("]");
      return;
    }
    const { isImage } = this.#pieces[opened];
    const inside = this.#pieces.splice(opened).slice(1);
    const address = target[1] ?? target[2];
    this.#at += target[0].length;
    if (!isImage) this.#brackets = []; // a link has no link in it
    const label = isImage ? [textOf(inside) || "image"] : assembled(inside);
    this.#pieces.push({ node: link(address, label, isImage) });
  }

  #angles() {
    const found = this.#matches(IN_ANGLES);
    if (found === null) {
      this.#put("<");
      this.#at++;
      return;
    }
    this.#pieces.push({ node: link(found[1], [found[1]]) });
    this.#at += found[0].length;
  }

  #bareUrl() {
    const [found] = this.#matches(BARE);
    const trailing = found.includes("(") ? ".,;:!?*_~']" : ".,;:!?*_~'])"; // more likely the sentence's than the address's
    let end = found.length;
    while (trailing.includes(found[end - 1])) end--;
    const url = found.slice(0, end);
    this.#pieces.push({ node: link(url, [url]) });
    this.#at += url.length;
  }

  #entity() {
    const found = this.#matches(ENTITY);
    this.#put(found === null ? "&" : ENTITIES[found[1]]);
    this.#at += found === null ? 1 : found[0].length;
  }

  /** Line ends stay line ends, as in most chats, since models write lists without a list's signs. */
  #lineBreak() {
    this.#at++;
    this.#pieces.push({ node: make("br") });
  }
}

function link(address, label, isImage = false) {
  const href = safeUrl(address);
  if (href === null) return make("span", { class: "dead-link", title: "Not a web address" }, label);
  const properties = { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href.slice(0, 200) };
  return make("a", properties, isImage ? "Image: " : null, label);
}

function textOf(pieces) {
  const texts = pieces.map((piece) => piece.text ?? piece.node?.textContent ?? piece.run.repeat(piece.count));
  return texts.join("").slice(0, 200);
}

function assembled(pieces) {
  pairRuns(pieces.filter((piece) => piece.run));
  const root = document.createDocumentFragment();
  const open = [root]; // elements that have begun, innermost last; beyond MOST_DEPTH the same one stands for itself
  for (const piece of pieces) {
    if (!piece.run) {
      open.at(-1).append(piece.node ?? piece.text);
      continue;
    }
    piece.closes.forEach(() => open.pop());
    if (piece.count) open.at(-1).append(piece.run.repeat(piece.count));
    for (const tag of piece.opens.reverse()) {
      const element = open.length > MOST_DEPTH ? open.at(-1) : make(tag);
      if (element !== open.at(-1)) open.at(-1).append(element);
      open.push(element);
    }
  }
  return [...root.childNodes];
}

/** Finds which runs begin and end an element, by CommonMark's algorithm. Elements are never interleaved. */
function pairRuns(runs) {
  const openers = []; // runs that may still begin something
  const bottoms = new Map(); // by kind of closer: below which of them no opener for it is left
  for (const closer of runs) {
    while (closer.canClose && closer.count) {
      const kind = `${closer.run}${closer.canOpen}${closer.length % 3}`;
      const bottom = bottoms.get(kind) ?? 0;
      let at = openers.length - 1;
      while (at >= bottom && !fits(openers[at], closer)) at--;
      if (at < bottom) {
        bottoms.set(kind, openers.length);
        break;
      }
      const opener = openers[at];
      const size = opener.count >= 2 && closer.count >= 2 ? 2 : 1;
      const tag = TAGS[closer.run][size - 1];
      opener.opens.push(tag);
      closer.closes.push(tag);
      opener.count -= size;
      closer.count -= size;
      openers.length = opener.count ? at + 1 : at; // those between the two begin nothing more
      for (const [each, value] of bottoms) bottoms.set(each, Math.min(value, openers.length));
    }
    if (closer.canOpen && closer.count) openers.push(closer);
  }
}

function fits(opener, closer) {
  if (opener.run !== closer.run) return false;
  if (closer.run === "~") return opener.count >= 2 && closer.count >= 2;
  const isOdd = (opener.canClose || closer.canOpen) && (opener.length + closer.length) % 3 === 0;
  return !isOdd || (opener.length % 3 === 0 && closer.length % 3 === 0);
}
