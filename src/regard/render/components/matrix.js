// <regard-matrix>: the attention matrix of a head, as large as memory on the server allows: blocks come as they are looked at.
import { button, define, html, svg } from "./dom.js";
import { onPalette, rampColor, variable } from "./colors.js";
import { percent, tokenText } from "./numbers.js";
import { TILE, Tiles } from "./tiles.js";
import { wrapSVG } from "./export.js";

const READABLE = 12; // pixels of a cell whose token is written beside it
const MOST_CELLS = 40; // the largest cell when the whole matrix fits
const VECTOR = 8000; // cells; beyond them the exported drawing holds a picture

const clip = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

class Matrix extends HTMLElement {
  connectedCallback() {
    if (this.canvas) return;
    this.canvas = html("canvas", { tabindex: 0, role: "application",
      "aria-label": "Attention matrix. Arrow keys move, Enter pins the query, plus and minus zoom, 0 shows all." });
    this.status = html("p", { class: "rg-status", "aria-live": "polite" });
    const gain = html("input", { type: "range", min: 0, max: 6, step: 0.25, value: 0, "aria-label": "contrast",
      on: { input: () => { if (this.tiles) { this.tiles.gain = 2 ** Number(gain.value); this.tiles.repaint(); } } } });
    this.gain = gain;
    this.controls = html("div", { class: "rg-row", role: "group", "aria-label": "zoom" },
      button("−", () => this.zoom(0.5), { "aria-label": "zoom out" }), button("+", () => this.zoom(2), { "aria-label": "zoom in" }),
      button("Fit", () => { this.fit(); this.draw(); }), html("label", { class: "rg-slider" }, html("span", {}, "contrast"), gain));
    this.append(this.controls, this.canvas, this.status);
    this.cursor = null;
    this.listen();
    new ResizeObserver(() => { if (this.source) { this.fit(); this.draw(); } }).observe(this);
    onPalette(this, () => this.tiles && this.tiles.repaint());
  }

  disconnectedCallback() {
    if (this.tiles) this.tiles.close();
  }

  show(source, { pinned = null } = {}) {
    this.pinned = pinned;
    if (source !== this.source) {
      if (this.tiles) this.tiles.close();
      this.source = source;
      this.tiles = new Tiles(source, () => this.draw());
      this.tiles.gain = 2 ** Number(this.gain.value);
      this.cursor = null;
      this.fit();
    }
    this.draw();
  }

  fit() {
    const width = this.clientWidth;
    if (!width || !this.source) return;
    const { queries, keys } = this.source;
    this.width = width;
    const cell = Math.min((width - 96 - 34) / keys.length, (Math.max(window.innerHeight * 0.7, 320) - 84) / queries.length, MOST_CELLS);
    [this.left, this.top] = cell >= READABLE ? [96, 84] : [0, 0];
    this.fitted = cell >= READABLE ? cell : Math.min(width / keys.length, Math.max(window.innerHeight * 0.7, 320) / queries.length);
    this.cell = this.fitted;
    this.height = Math.ceil(this.top + queries.length * this.cell) + 1;
    [this.x, this.y] = [0, 0];
    this.canvas.style.touchAction = "pan-y";
  }

  // Zoom around the cursor, the pinned query, or the middle.
  zoom(factor, at = null) {
    const { queries, keys } = this.source;
    const spot = at || { x: this.left + (this.width - this.left) / 2, y: this.top + (this.height - this.top) / 2 };
    const column = this.x + (spot.x - this.left) / this.cell, row = this.y + (spot.y - this.top) / this.cell;
    this.cell = Math.min(Math.max(this.cell * factor, this.fitted), 48);
    const labelled = this.cell >= READABLE;
    [this.left, this.top] = labelled ? [96, 84] : [0, 0];
    this.height = Math.max(this.height, labelled ? Math.min(84 + queries.length * this.cell, 480) : 0);
    this.x = column - (spot.x - this.left) / this.cell;
    this.y = row - (spot.y - this.top) / this.cell;
    this.keepInside(queries.length, keys.length);
    this.draw();
  }

  keepInside(rows, columns) {
    this.x = Math.max(0, Math.min(this.x, columns - (this.width - this.left) / this.cell));
    this.y = Math.max(0, Math.min(this.y, rows - (this.height - this.top) / this.cell));
    this.canvas.style.touchAction = this.cell > this.fitted * 1.01 ? "none" : "pan-y";
  }

  draw() {
    if (this.planned || !this.source || !this.width) return;
    this.planned = requestAnimationFrame(() => { this.planned = null; this.drawNow(); });
  }

  drawNow() {
    const dense = window.devicePixelRatio || 1, { canvas, left, top, cell, x, y } = this;
    canvas.width = Math.round(this.width * dense);
    canvas.height = Math.round(this.height * dense);
    canvas.style.height = `${this.height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(dense, dense);
    pen.save();
    pen.beginPath();
    pen.rect(left, top, this.width - left, this.height - top);
    pen.clip();
    const { rows, columns } = this.visible();
    const level = Math.min(this.tiles.wholeLevel, Math.max(0, Math.ceil(Math.log2(0.75 / cell)))), span = TILE * 2 ** level;
    pen.imageSmoothingEnabled = false;
    const place = (tile) => pen.drawImage(this.tiles.picture(tile), left + (tile.columns[0] - x) * cell, top + (tile.rows[0] - y) * cell,
      (tile.columns[1] - tile.columns[0]) * cell, (tile.rows[1] - tile.rows[0]) * cell);
    this.tiles.beginFrame();
    const whole = this.tiles.find(this.tiles.wholeLevel, 0, 0);
    if (whole) place(whole);
    if (level < this.tiles.wholeLevel) {
      for (let i = Math.floor(rows[0] / span); i * span < rows[1]; i++) for (let j = Math.floor(columns[0] / span); j * span < columns[1]; j++) {
        const tile = this.tiles.find(level, i, j);
        if (tile) place(tile);
      }
    }
    this.tiles.endFrame();
    this.drawMarks(pen);
    pen.restore();
    if (left) this.drawLabels(pen, rows, columns);
    if (this.tiles.failure) this.status.textContent = this.tiles.failure.message;
    else if (!this.cursor) this.status.textContent = this.pinned === null ? "Point at a cell; click pins its query." : `Pinned: ${tokenText(this.source.queries[this.pinned] || "")}`;
    this.toggleAttribute("data-ready", Boolean(whole));
  }

  visible() {
    const { queries, keys } = this.source;
    const bound = (start, size, count) => [Math.max(0, Math.floor(start)), Math.min(count, Math.ceil(start + size / this.cell))];
    return { rows: bound(this.y, this.height - this.top, queries.length), columns: bound(this.x, this.width - this.left, keys.length) };
  }

  drawMarks(pen) {
    const { left, top, cell, x, y } = this;
    const tall = Math.max(cell, 2);
    if (this.pinned !== null) {
      pen.strokeStyle = variable("query");
      pen.lineWidth = 1.5;
      pen.strokeRect(left, top + (this.pinned - y) * cell, Math.min((this.source.keys.length - x) * cell, this.width - left), tall);
    }
    if (this.cursor) {
      pen.strokeStyle = variable("ink");
      pen.lineWidth = 1;
      pen.strokeRect(left + (this.cursor[1] - x) * cell, top + (this.cursor[0] - y) * cell, tall, tall);
    }
  }

  drawLabels(pen, rows, columns) {
    const { left, top, cell, x, y } = this, { queries, keys } = this.source;
    pen.font = `${Math.min(13, Math.max(11, cell * 0.55))}px ${getComputedStyle(this).fontFamily}`;
    pen.textBaseline = "middle";
    for (let row = rows[0]; row < rows[1]; row++) {
      const middle = top + (row - y + 0.5) * cell;
      if (middle < top) continue;
      pen.fillStyle = variable(row === this.pinned ? "query" : "ink");
      pen.textAlign = "right";
      pen.fillText(clip(tokenText(queries[row]), 13), left - 8, middle);
    }
    pen.fillStyle = variable("ink");
    for (let column = columns[0]; column < columns[1]; column++) {
      const middle = left + (column - x + 0.5) * cell;
      if (middle < left) continue;
      pen.save();
      pen.translate(middle, top - 8);
      pen.rotate(-Math.PI / 2.6);
      pen.textAlign = "left";
      pen.fillText(clip(tokenText(keys[column]), 12), 0, 0);
      pen.restore();
    }
  }

  // The cell under the pointer.
  cellAt(event) {
    const area = this.canvas.getBoundingClientRect();
    const column = Math.floor(this.x + (event.clientX - area.left - this.left) / this.cell);
    const row = Math.floor(this.y + (event.clientY - area.top - this.top) / this.cell);
    if (column < 0 || row < 0 || event.clientX - area.left < this.left || event.clientY - area.top < this.top) return null;
    return row < this.source.queries.length && column < this.source.keys.length ? [row, column] : null;
  }

  moveCursor(cell) {
    this.cursor = cell;
    if (cell) {
      const known = this.tiles.value(...cell), { queries, keys } = this.source;
      this.status.textContent = `${tokenText(queries[cell[0]])} (${cell[0]}) → ${tokenText(keys[cell[1]])} (${cell[1]})${known ? `: ${known.exact ? "" : "about "}${percent(known.value)}` : ""}`;
    }
    this.draw();
  }

  listen() {
    let dragged = null;
    const spot = (event) => ({ x: event.offsetX, y: event.offsetY });
    this.canvas.addEventListener("pointerdown", (event) => { dragged = { ...spot(event), x0: this.x, y0: this.y, far: false }; });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.source) return;
      if (dragged && event.buttons) {
        const [right, down] = [event.offsetX - dragged.x, event.offsetY - dragged.y];
        if (Math.abs(right) + Math.abs(down) > 4) dragged.far = true;
        if (dragged.far && this.cell > this.fitted) {
          this.x = dragged.x0 - right / this.cell;
          this.y = dragged.y0 - down / this.cell;
          this.keepInside(this.source.queries.length, this.source.keys.length);
        }
      }
      this.moveCursor(this.cellAt(event));
    });
    this.canvas.addEventListener("pointerleave", () => { dragged = null; if (this.source) this.moveCursor(null); });
    this.canvas.addEventListener("click", (event) => {
      const cell = this.source && this.cellAt(event);
      if (cell && !(dragged && dragged.far)) this.choose(cell[0]);
      dragged = null;
    });
    this.canvas.addEventListener("wheel", (event) => {
      if (!this.source || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 1.25 : 0.8, spot(event));
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    if (!this.source) return;
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const { queries, keys } = this.source;
    if (step) {
      const [row, column] = this.cursor || [(this.pinned || 0) - step[0], -step[1]];
      const cell = [Math.min(Math.max(row + step[0], 0), queries.length - 1), Math.min(Math.max(column + step[1], 0), keys.length - 1)];
      const across = (this.width - this.left) / this.cell - 1, down = (this.height - this.top) / this.cell - 1;
      this.x = Math.min(Math.max(this.x, cell[1] - across), cell[1]);
      this.y = Math.min(Math.max(this.y, cell[0] - down), cell[0]);
      this.keepInside(queries.length, keys.length);
      this.moveCursor(cell);
    } else if (event.key === "Enter" && this.cursor) this.choose(this.cursor[0]);
    else if (event.key === "+" || event.key === "=") this.zoom(2);
    else if (event.key === "-") this.zoom(0.5);
    else if (event.key === "0") { this.fit(); this.draw(); }
    else return;
    event.preventDefault();
  }

  choose(row) {
    this.dispatchEvent(new CustomEvent("pin", { detail: row === this.pinned ? null : row, bubbles: true }));
  }

  toSVG() {
    const { left, top, cell, x, y } = this, { rows, columns } = this.visible(), { queries, keys } = this.source;
    const nodes = [], count = (rows[1] - rows[0]) * (columns[1] - columns[0]);
    if (count <= VECTOR) {
      const scale = this.tiles.scale(Math.max(0, ...this.tiles.most.keys()));
      for (let row = rows[0]; row < rows[1]; row++) for (let column = columns[0]; column < columns[1]; column++) {
        const known = this.tiles.value(row, column), share = known && scale ? known.value / scale : 0;
        if (share < 0.004) continue;
        nodes.push(svg("rect", { x: (left + (column - x) * cell).toFixed(2), y: (top + (row - y) * cell).toFixed(2), width: (cell + 0.05).toFixed(2), height: (cell + 0.05).toFixed(2), fill: rampColor(share) }));
      }
    } else {
      nodes.push(svg("image", { href: this.canvas.toDataURL("image/png"), width: this.width, height: this.height, preserveAspectRatio: "none" }));
    }
    const frame = { x: left, y: top, width: Math.min(this.width - left, (keys.length - x) * cell), height: this.height - top, fill: "none", stroke: variable("line") };
    nodes.push(svg("rect", frame));
    if (left && count <= VECTOR) {
      const ink = { fill: variable("ink"), "font-size": 12 };
      for (let row = rows[0]; row < rows[1]; row++) nodes.push(svg("text", { ...ink, x: left - 8, y: top + (row - y + 0.5) * cell + 4, "text-anchor": "end" }, clip(tokenText(queries[row]), 13)));
      for (let column = columns[0]; column < columns[1]; column++) {
        const middle = left + (column - x + 0.5) * cell;
        nodes.push(svg("text", { ...ink, transform: `translate(${middle + 4} ${top - 8}) rotate(-69)` }, clip(tokenText(keys[column]), 12)));
      }
      if (this.pinned !== null) nodes.push(svg("rect", { x: left, y: top + (this.pinned - y) * cell, width: frame.width, height: cell, fill: "none", stroke: variable("query"), "stroke-width": 1.5 }));
    }
    return wrapSVG(nodes, [0, 0, this.width, this.height]);
  }
}

define("regard-matrix", Matrix);
