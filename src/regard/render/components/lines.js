// <regard-lines>: lines from each query to the keys it attends to; of a long text, those of the pinned query alone.
import { define, html, slider, svg } from "./dom.js";
import { onPalette } from "./colors.js";
import { percent, tokenText, topPlaces } from "./numbers.js";
import { standaloneSVG } from "./export.js";

const ROW = 24, TOP = 26;
const WHOLE = 64; // tokens of which all are listed
const AROUND = 12, STRONGEST = 40; // of a longer text: the queries around the pinned one, and the keys with most weight

class Lines extends HTMLElement {
  connectedCallback() {
    if (this.board) return;
    this.least = 0.05;
    this.control = slider("hide weights below", { least: 0, most: 0.5, step: 0.01, value: this.least, show: percent }, (value) => {
      this.least = value;
      this.draw();
      this.dispatchEvent(new CustomEvent("filter", { detail: value, bubbles: true }));
    });
    this.board = html("div", { class: "rg-board" });
    this.status = html("p", { class: "rg-status", "aria-live": "polite" });
    this.append(html("div", { class: "rg-row" }, this.control), this.board, this.status);
    this.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this);
    onPalette(this, () => this.draw());
  }

  setLeast(value) {
    this.least = value;
    this.control.set(value);
  }

  // `row` is the pinned query's weights; `side` "key" turns the question around: which queries attend to the pinned key.
  async show(source, { pinned = null, row = null, side = "query" } = {}) {
    const fresh = source !== this.source;
    Object.assign(this, { source, pinned, row, side });
    if (fresh) {
      this.whole = null;
      if (Math.max(source.queries.length, source.keys.length) <= WHOLE) {
        const tile = await source.tile({ rows: [0, source.queries.length], columns: [0, source.keys.length], size: 128 });
        if (source !== this.source) return;
        this.whole = tile.values;
      }
    }
    this.draw();
  }

  listed() {
    const { queries, keys } = this.source, all = (list) => list.map((_, place) => place);
    const middle = this.pinned === null ? 0 : this.pinned, around = (list) => all(list).slice(Math.max(0, middle - AROUND), middle + AROUND + 1);
    if (this.side === "key" && this.row) {
      return { left: queries.length <= WHOLE ? all(queries) : topPlaces(this.row, STRONGEST).sort((a, b) => a - b), right: keys.length <= WHOLE ? all(keys) : around(keys) };
    }
    const left = queries.length <= WHOLE ? all(queries) : around(queries);
    const right = keys.length <= WHOLE ? all(keys) : (this.row ? topPlaces(this.row, STRONGEST).sort((a, b) => a - b) : all(keys).slice(0, STRONGEST));
    return { left, right };
  }

  weightsOf(query) {
    const width = this.source.keys.length;
    if (this.whole) return this.whole.subarray(query * width, (query + 1) * width);
    return query === this.pinned ? this.row : null;
  }

  draw() {
    const width = this.clientWidth;
    if (!width || !this.source) return;
    const { left, right } = this.listed(), { queries, keys } = this.source;
    const margin = Math.min(150, width * 0.34), height = TOP + ROW * Math.max(left.length, right.length) + 6;
    const at = (place) => TOP + (place + 0.5) * ROW;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "rg-drawing", role: "group", "aria-label": "Lines from queries to keys. Arrow keys move the pinned query." });
    drawing.append(svg("text", { x: margin - 10, y: 14, class: "rg-axis", "text-anchor": "end" }, "query"), svg("text", { x: width - margin + 10, y: 14, class: "rg-axis" }, "key"));
    const lines = svg("g", { class: "rg-threads" });
    let drawn = 0;
    const received = this.side === "key" && this.pinned !== null && this.row;
    left.forEach((query, from) => {
      if (this.pinned !== null && !received && query !== this.pinned) return;
      const weights = received ? this.row : this.weightsOf(query);
      if (!weights) return;
      right.forEach((key, to) => {
        if (received && key !== this.pinned) return;
        const weight = received ? weights[query] : weights[key];
        if (weight < Math.max(this.least, 0.001)) return;
        drawn += 1;
        lines.append(svg("path", { d: `M${margin} ${at(from)}C${width / 2} ${at(from)} ${width / 2} ${at(to)} ${width - margin} ${at(to)}`,
          "stroke-opacity": Math.min((this.pinned === null ? 0.06 : 0.3) + weight, 1).toFixed(3), "stroke-width": (0.75 + 3.5 * weight).toFixed(2) },
        svg("title", {}, `${tokenText(queries[query])} → ${tokenText(keys[key])}: ${percent(weight)}`)));
      });
    });
    drawing.append(lines);
    left.forEach((query, place) => drawing.append(this.word(queries[query], margin - 10, at(place), "end", query)));
    const row = this.pinned === null || received ? null : this.weightsOf(this.pinned);
    right.forEach((key, place) => {
      const strong = row && row[key] >= Math.max(this.least, 0.001);
      drawing.append(svg("text", { x: width - margin + 10, y: at(place) + 5, class: received && key === this.pinned ? "rg-word rg-pinned" : row && !strong ? "rg-word rg-pale" : "rg-word" },
        tokenText(keys[key]), strong ? svg("tspan", { class: "rg-axis", dx: 8 }, percent(row[key])) : null));
      const before = place > 0 ? right[place - 1] : key - 1;
      if (key !== before + 1) drawing.append(svg("path", { class: "rg-gap", d: `M${width - margin + 10} ${at(place) - ROW / 2}h60` }));
    });
    const focused = this.board.contains(document.activeElement);
    this.board.replaceChildren(drawing);
    if (focused) (drawing.querySelector("[aria-pressed=true]") || drawing.querySelector("[tabindex]")).focus();
    this.status.textContent = `${drawn} lines${!received && right.length < keys.length ? `; the ${right.length} strongest of ${keys.length} keys` : ""}`;
    this.toggleAttribute("data-ready", true);
  }

  word(token, x, y, anchor, query) {
    const on = query === this.pinned;
    const first = this.pinned === null ? query === 0 : on;
    return svg("text", { x, y: y + 5, class: on ? "rg-word rg-pinned" : "rg-word rg-link", "text-anchor": anchor, role: "button", tabindex: first ? 0 : -1, "aria-pressed": String(on),
      on: { click: () => this.choose(on ? null : query) } }, tokenText(token));
  }

  choose(query) {
    this.dispatchEvent(new CustomEvent("pin", { detail: query, bubbles: true }));
  }

  onKey(event) {
    if (!this.source || event.target.tagName !== "text") return;
    const step = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key], last = this.source.queries.length - 1;
    if (step) this.choose(Math.min(Math.max((this.pinned === null ? 0 : this.pinned) + step, 0), last));
    else if (event.key === "Escape") this.choose(null);
    else if (event.key === "Enter" || event.key === " ") this.choose(this.pinned === null ? 0 : null);
    else return;
    event.preventDefault();
  }

  toSVG() {
    return standaloneSVG(this.board.firstElementChild);
  }
}

define("regard-lines", Lines);
