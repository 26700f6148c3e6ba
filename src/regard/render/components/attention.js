// <regard-attention>: all heads of a model on one input, from data in the page: for saved pages, the book and notebooks.
import { choice, define, html, readData, select } from "./dom.js";
import { decode, percent, tokenText, topPlaces } from "./numbers.js";
import { exportBar } from "./export.js";
import { entropyOf, poolMatrix } from "./pooling.js";
import "./image.js";
import "./lines.js";
import "./matrix.js";
import "./overview.js";
import "./tokens.js";

// A head whose weights are all in the page, as the figures ask for it.
class PageSource {
  constructor(data, layer, head) {
    const { weights, largest } = data.layers[layer], [rows, columns] = weights.shape.slice(1);
    Object.assign(this, { queries: data.queries, keys: data.keys, grid: data.grid, start: data.start || 0 });
    const first = head * rows * columns;
    this.matrix = Float32Array.from({ length: rows * columns }, (_, place) => weights.values[first + place] / 255 * largest.values[head * rows + Math.floor(place / columns)]);
  }

  async tile({ rows: [top, bottom], columns: [left, right], size }) {
    const width = this.keys.length, part = new Float32Array((bottom - top) * (right - left));
    for (let row = top; row < bottom; row++) part.set(this.matrix.subarray(row * width + left, row * width + right), (row - top) * (right - left));
    return { ...poolMatrix(part, bottom - top, right - left, size), exact: Math.max(bottom - top, right - left) <= size };
  }

  row(token) {
    return this.matrix.subarray(token * this.keys.length, (token + 1) * this.keys.length);
  }
}

class Attention extends HTMLElement {
  connectedCallback() {
    const data = readData(this);
    if (data && !this.data) this.show(data);
  }

  // {queries, keys, grid, start, image, layers: [{title, weights: array (head, query, key), largest: array (head, query)}], python}
  show(data, state = {}) {
    this.data = { ...data, layers: data.layers.map((layer) => ({ ...layer, weights: decode(layer.weights), largest: decode(layer.largest) })) };
    this.state = { layer: 0, head: 0, token: data.grid ? Math.floor(data.queries.length / 2) : null, view: data.grid ? "image" : "matrix", ...state };
    this.build();
  }

  build() {
    const { data, state } = this;
    this.overview = html("regard-overview");
    this.views = { matrix: html("regard-matrix"), lines: html("regard-lines"), image: html("regard-image") };
    this.tokens = html("regard-tokens", { "aria-label": "tokens; the pinned one is the query" });
    this.place = html("div");
    this.told = html("p", { class: "rg-status", "aria-live": "polite" });
    this.bar = html("div", { class: "rg-row" });
    const saved = { toSVG: () => this.views[state.view].toSVG(), ...(data.python ? { pythonLines: () => data.python } : {}) };
    this.replaceChildren(html("div", { class: "rg-split" }, html("div", {}, this.overview), html("div", {}, this.bar, this.place, data.grid ? null : this.tokens, this.told, exportBar(saved, "attention"))));
    this.overview.addEventListener("head", (event) => this.change(event.detail));
    for (const figure of [...Object.values(this.views), this.tokens]) figure.addEventListener("pin", (event) => this.change({ token: event.detail }));
    this.overview.show(this.describeHeads(), { chosen: state });
    this.draw();
  }

  // A picture and a few numbers of every head.
  describeHeads() {
    return this.data.layers.map((layer, place) => Array.from({ length: layer.weights.shape[0] }, (_, head) => {
      const source = new PageSource(this.data, place, head), rows = source.queries.length, columns = source.keys.length, { matrix } = source;
      const small = poolMatrix(matrix, rows, columns, 32), numbers = { entropy: entropyOf(matrix, rows, columns), first: 0 };
      let distance = 0, previous = 0;
      for (let row = 0; row < rows; row++) {
        numbers.first += matrix[row * columns] / rows;
        if (row > 0) previous += matrix[row * columns + row - 1] / Math.max(rows - 1, 1);
        for (let column = 0; column < columns; column++) distance += matrix[row * columns + column] * Math.abs(row - column) / rows;
      }
      if (rows === columns && !this.data.grid) Object.assign(numbers, { distance, previous });
      return { head, thumbnail: small, numbers };
    }));
  }

  change(changes) {
    Object.assign(this.state, changes);
    this.draw();
    this.dispatchEvent(new CustomEvent("change", { detail: this.state, bubbles: true }));
  }

  draw() {
    const { data, state } = this, count = data.layers[state.layer].weights.shape[0];
    state.head = Math.min(state.head, count - 1);
    const key = `${state.layer}.${state.head}`;
    if (key !== this.sourceKey || this.sourceData !== data) [this.source, this.sourceKey, this.sourceData] = [new PageSource(data, state.layer, state.head), key, data];
    const places = (total) => Array.from({ length: total }, (_, place) => [place, place]);
    this.bar.replaceChildren(choice("view", [["matrix", "matrix"], ["lines", "lines"], ...(data.grid ? [["image", "image"]] : [])], state.view, (view) => this.change({ view })),
      select("layer", places(data.layers.length), state.layer, (layer) => this.change({ layer: Number(layer) })), select("head", places(count), state.head, (head) => this.change({ head: Number(head) })));
    this.place.replaceChildren(this.views[state.view]);
    const row = state.token === null ? null : this.source.row(state.token);
    this.views[state.view].show(this.source, { pinned: state.token, row, image: data.image });
    if (!data.grid) this.tokens.show(data.queries, { weights: data.queries.length === data.keys.length ? row : null, pinned: state.token });
    this.overview.show(this.overview.layers, { chosen: state, order: this.overview.order });
    this.told.textContent = row ? `“${tokenText(data.queries[state.token])}” attends to ${topPlaces(row, 5).map((place) => `“${tokenText(data.keys[place])}” ${percent(row[place])}`).join(", ")}` : "";
    this.toggleAttribute("data-ready", true);
  }
}

define("regard-attention", Attention);
