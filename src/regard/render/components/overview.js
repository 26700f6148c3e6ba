// <regard-overview>: every head of every layer as a small picture; sorted by what a number says of it.
import { define, html, select, svg } from "./dom.js";
import { onPalette, paint, variable } from "./colors.js";
import { largest } from "./numbers.js";
import { wrapSVG } from "./export.js";

const HEAD_NUMBERS = {
  entropy: ["entropy", "in nats: low is focused, high is spread"],
  distance: ["distance", "mean distance between query and key"],
  previous: ["previous token", "weight on the token before"],
  next: ["next token", "weight on the token after"],
  same_word: ["same word", "weight on other occurrences of the same word"],
  first: ["first token", "weight on the first token"],
  delimiter: ["delimiter", "weight on separators and punctuation"],
  self: ["itself", "weight on the token itself"],
};

export const nameNumber = (key) => (HEAD_NUMBERS[key] || [key.replaceAll("_", " ")])[0];
export const formatNumber = (value) => (Number.isFinite(value) ? (Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2)) : "–");

class Overview extends HTMLElement {
  connectedCallback() {
    if (this.grid) return;
    this.grid = html("div", { class: "rg-heads" });
    this.bar = html("div", { class: "rg-row" });
    this.append(this.bar, this.grid);
    this.order = "";
    this.off = new Set();
    this.grid.addEventListener("keydown", (event) => this.onKey(event));
    onPalette(this, () => this.draw());
  }

  // `layers` as the server sends them, thumbnails decoded; `off` holds "layer.head" of heads that are switched off.
  show(layers, { chosen = null, order = "", off = new Set() } = {}) {
    const fresh = layers !== this.layers;
    Object.assign(this, { layers, chosen, off });
    if (fresh || order !== this.order) {
      this.order = order;
      this.draw();
    } else this.mark();
  }

  keys() {
    const head = this.layers.flat()[0];
    return head ? Object.keys(head.numbers) : [];
  }

  sorted() {
    const all = this.layers.flatMap((heads, layer) => heads.map((head) => ({ ...head, layer })));
    if (!this.order) return all;
    const [key, way] = this.order.split(":");
    const value = (head) => (Number.isFinite(head.numbers[key]) ? head.numbers[key] : -Infinity);
    return all.sort((a, b) => (way === "up" ? value(a) - value(b) : value(b) - value(a)));
  }

  draw() {
    if (!this.layers) return;
    const options = [["", "layer and head"], ...this.keys().flatMap((key) => [[`${key}:down`, `${nameNumber(key)}, most first`], [`${key}:up`, `${nameNumber(key)}, least first`]])];
    this.bar.replaceChildren(select("sort by", options, this.order, (order) => {
      this.order = order;
      this.draw();
      this.dispatchEvent(new CustomEvent("order", { detail: order, bubbles: true }));
    }));
    const key = this.order.split(":")[0];
    if (key && HEAD_NUMBERS[key]) this.bar.append(html("span", { class: "rg-faint" }, HEAD_NUMBERS[key][1]));
    const heads = this.sorted();
    if (this.order) {
      this.grid.replaceChildren(html("div", { class: "rg-sorted" }, heads.map((head) => this.cell(head, key))));
    } else {
      const count = Math.max(...this.layers.map((row) => row.length));
      this.grid.style.setProperty("--heads", count);
      this.grid.replaceChildren(html("div", { class: "rg-layer rg-top", "aria-hidden": "true" }, html("span"), Array.from({ length: count }, (_, head) => html("span", {}, String(head)))),
        ...this.layers.map((row, layer) => html("div", { class: "rg-layer", role: "group", "aria-label": `layer ${layer}` },
          html("span", { class: "rg-layer-name" }, String(layer)), row.map((head) => this.cell({ ...head, layer }, "")))));
    }
    this.mark();
    this.toggleAttribute("data-ready", true);
  }

  cell(head, key) {
    const canvas = html("canvas", { class: "rg-thumbnail" }), { shape, values } = head.thumbnail;
    paint(canvas, values, shape[0], shape[1], largest(values));
    const told = this.keys().map((one) => `${nameNumber(one)} ${formatNumber(head.numbers[one])}`).join(", ");
    return html("button", { type: "button", class: "rg-head", "data-place": `${head.layer}.${head.head}`, title: `layer ${head.layer}, head ${head.head}\n${told.replaceAll(", ", "\n")}`,
      "aria-label": `layer ${head.layer}, head ${head.head}${key ? `, ${nameNumber(key)} ${formatNumber(head.numbers[key])}` : ""}`,
      on: { click: () => this.dispatchEvent(new CustomEvent("head", { detail: { layer: head.layer, head: head.head }, bubbles: true })) } },
    canvas, this.order ? html("span", {}, `${head.layer}·${head.head}`, html("b", {}, formatNumber(head.numbers[key]))) : null);
  }

  mark() {
    const chosen = this.chosen ? `${this.chosen.layer}.${this.chosen.head}` : "";
    const cells = Array.from(this.grid.querySelectorAll(".rg-head"));
    const there = cells.some((cell) => cell.dataset.place === chosen);
    cells.forEach((cell, place) => {
      const on = cell.dataset.place === chosen;
      cell.setAttribute("aria-pressed", String(on));
      cell.tabIndex = on || (!there && place === 0) ? 0 : -1;
      cell.toggleAttribute("data-off", this.off.has(cell.dataset.place));
    });
  }

  onKey(event) {
    const cells = Array.from(this.grid.querySelectorAll(".rg-head")), place = cells.indexOf(event.target);
    if (place < 0) return;
    const here = event.target.getBoundingClientRect();
    const beside = (down) => {
      const rows = cells.map((cell) => [cell, cell.getBoundingClientRect()]).filter(([, box]) => (down ? box.top > here.top + 2 : box.top < here.top - 2));
      rows.sort(([, a], [, b]) => (Math.abs(a.top - here.top) - Math.abs(b.top - here.top)) || (Math.abs(a.left - here.left) - Math.abs(b.left - here.left)));
      return rows.length ? rows[0][0] : null;
    };
    const next = { ArrowLeft: () => cells[place - 1], ArrowRight: () => cells[place + 1], ArrowUp: () => beside(false), ArrowDown: () => beside(true),
      Home: () => cells[0], End: () => cells[cells.length - 1] }[event.key];
    if (!next) return;
    event.preventDefault();
    const cell = next();
    if (!cell) return;
    cells.forEach((one) => { one.tabIndex = -1; });
    cell.tabIndex = 0;
    cell.focus();
  }

  toSVG() {
    const size = 64, gap = 10, line = 16, nodes = [], ink = { fill: variable("ink"), "font-size": 11 };
    const rows = this.order ? this.sorted().reduce((all, head, place) => { if (place % 12 === 0) all.push([]); all[all.length - 1].push(head); return all; }, [])
      : this.layers.map((heads, layer) => heads.map((head) => ({ ...head, layer })));
    const key = this.order.split(":")[0], canvas = html("canvas");
    rows.forEach((heads, row) => heads.forEach((head, column) => {
      const x = gap + column * (size + gap), y = gap + row * (size + gap + line), { shape, values } = head.thumbnail;
      paint(canvas, values, shape[0], shape[1], largest(values));
      nodes.push(svg("image", { href: canvas.toDataURL(), x, y, width: size, height: size, preserveAspectRatio: "none", "image-rendering": "pixelated" }),
        svg("rect", { x, y, width: size, height: size, fill: "none", stroke: variable("line") }),
        svg("text", { ...ink, x, y: y + size + 12 }, key ? `${head.layer}·${head.head}  ${formatNumber(head.numbers[key])}` : `${head.layer}·${head.head}`));
    }));
    return wrapSVG(nodes, [0, 0, gap + Math.max(...rows.map((row) => row.length)) * (size + gap), gap + rows.length * (size + gap + line)]);
  }
}

define("regard-overview", Overview);
