// A line chart over the last minutes, drawn in SVG at the size that it has on the page.

import { make, makeSvg } from "./dom.js";

const HEIGHT = 168;
const MARGIN = { top: 8, right: 8, bottom: 20 };
const GAP = 8; // before and after the labels of the axis of values
const LEAST_LEFT = 56; // so that charts below each other mostly begin alike
const LONGEST_GAP_S = 12; // points further apart are not joined

export class Chart {
  /** format: of a value, for axis and legend. fixedMax: the axis' end, where it does not follow the values. */
  constructor(title, format, { fixedMax = null, leastMax = 0 } = {}) {
    this.#format = format;
    this.#fixedMax = fixedMax;
    this.#leastMax = leastMax;
    this.#svg = makeSvg("svg", { class: "plot", role: "img", height: HEIGHT });
    this.#title = title;
    this.element = make("figure", { class: "chart" }, make("figcaption", {}, make("h3", {}, title), this.#legend), this.#svg, this.#tip);
    this.#svg.addEventListener("pointermove", (event) => this.#hover(event));
    this.#svg.addEventListener("pointerleave", () => this.#leave());
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  #title;
  #format;
  #fixedMax;
  #leastMax;
  #svg;
  #legend = make("ul", { class: "legend" });
  #tip = make("div", { class: "tip", hidden: true });
  #series = [];
  #from = 0;
  #to = 1;
  #left = LEAST_LEFT; // where the lines begin: behind the widest label

  /** series: {label, color (0 to 7), isDashed, points: [[time, value or null], ...]}. from, to: in seconds. */
  update(series, from, to) {
    [this.#series, this.#from, this.#to] = [series, from, to];
    const now = series.map(({ label, points }) => `${label} ${this.#text(points.at(-1)?.[1])}`);
    this.#svg.setAttribute("aria-label", `${this.#title} now: ${now.join(", ") || "nothing measured"}`);
    this.#legend.replaceChildren(
      ...series.map(({ label, color, isDashed, points }) =>
        make(
          "li",
          {},
          make("span", { class: `key c${color}${isDashed ? " dashed" : ""}`, "aria-hidden": "true" }),
          `${label} `,
          make("strong", {}, this.#text(points.at(-1)?.[1])),
        ),
      ),
    );
    this.#draw();
  }

  #text(value) {
    return value === null || value === undefined ? "–" : this.#format(value);
  }

  get #max() {
    if (this.#fixedMax !== null) return this.#fixedMax;
    const values = this.#series.flatMap(({ points }) => points.map(([, value]) => value ?? 0));
    return niceAbove(values.reduce((most, value) => Math.max(most, value), this.#leastMax));
  }

  #x(at) {
    const width = this.element.clientWidth - this.#left - MARGIN.right;
    return this.#left + (width * (at - this.#from)) / (this.#to - this.#from);
  }

  #draw() {
    const width = this.element.clientWidth;
    if (width === 0) return; // not shown
    const max = this.#max;
    const y = (value) => HEIGHT - MARGIN.bottom - ((HEIGHT - MARGIN.top - MARGIN.bottom) * value) / max;
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.#svg.setAttribute("width", width);
    const parts = [0, 0.5, 1].map((share) =>
      makeSvg("text", { class: "tick", y: y(share * max) + 4, "text-anchor": "end" }, this.#format(share * max)));
    this.#svg.replaceChildren(...parts); // a label's width depends on the visitor's fonts
    this.#left = Math.max(LEAST_LEFT, ...parts.map((label) => label.getComputedTextLength() + 2 * GAP));
    for (const label of parts.slice()) {
      label.setAttribute("x", this.#left - GAP);
      const at = Number(label.getAttribute("y")) - 4;
      parts.push(makeSvg("line", { class: "grid", x1: this.#left, x2: width - MARGIN.right, y1: at, y2: at }));
    }
    const minutes = (this.#to - this.#from) / 60;
    for (const [share, text] of [[0, `${minutes} min ago`], [0.5, `${minutes / 2} min`], [1, "now"]]) {
      const at = this.#left + share * (width - this.#left - MARGIN.right);
      const anchor = { 0: "start", 1: "end" }[share] ?? "middle";
      parts.push(makeSvg("text", { class: "tick", x: at, y: HEIGHT - 4, "text-anchor": anchor }, text));
    }
    for (const { color, isDashed, points } of this.#series) {
      const d = pathOf(points, (at) => this.#x(at), (value) => y(Math.min(value, max)));
      parts.push(makeSvg("path", { class: `line c${color}${isDashed ? " dashed" : ""}`, d }));
    }
    this.#svg.replaceChildren(...parts);
  }

  #hover(event) {
    const x = event.clientX - this.#svg.getBoundingClientRect().left;
    const times = this.#series[0]?.points.map(([at]) => at) ?? [];
    if (!times.length) return;
    const nearest = times.reduce((best, at, index) =>
      Math.abs(this.#x(at) - x) < Math.abs(this.#x(times[best]) - x) ? index : best, 0);
    const rows = this.#series.map(({ label, points }) => make("div", {}, `${label} ${this.#text(points[nearest]?.[1])}`));
    this.#tip.replaceChildren(make("div", { class: "tip-time" }, new Date(times[nearest] * 1000).toLocaleTimeString()), ...rows);
    this.#tip.hidden = false;
    const left = this.#x(times[nearest]);
    this.#tip.style.left = `${Math.min(left + 10, this.element.clientWidth - this.#tip.offsetWidth)}px`;
    this.#svg.querySelector(".cursor")?.remove();
    this.#svg.append(makeSvg("line", { class: "cursor", x1: left, x2: left, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
  }

  #leave() {
    this.#tip.hidden = true;
    this.#svg.querySelector(".cursor")?.remove();
  }
}

/** The line through the points, interrupted where there is no value. */
function pathOf(points, x, y) {
  let path = "";
  let before = null;
  for (const [at, value] of points) {
    if (value === null) {
      before = null;
      continue;
    }
    const isJoined = before !== null && at - before < LONGEST_GAP_S;
    // A point on its own is drawn too, as a line of no length with round ends.
    path += `${isJoined ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}${isJoined ? "" : "h0"}`;
    before = at;
  }
  return path;
}

/** An even digit or 1, times a power of ten, at least the value: the axis names its half too. */
function niceAbove(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((each) => each * power).find((each) => each >= value * 0.999);
}
