// <regard-image>: attention over an image: choose a patch, and see where it attends.
import { define, html, svg } from "./dom.js";
import { onPalette, variable } from "./colors.js";
import { largest, percent } from "./numbers.js";
import { wrapSVG } from "./export.js";

class AttendedImage extends HTMLElement {
  connectedCallback() {
    if (this.board) return;
    this.picture = html("img", { class: "rg-pixels", alt: "", on: { load: () => this.picture.classList.toggle("rg-coarse", this.picture.naturalWidth <= 64) } });
    this.canvas = html("canvas", { class: "rg-pixels rg-over" });
    this.mark = html("i", { class: "rg-mark", hidden: true });
    this.board = html("div", { class: "rg-image", tabindex: 0, role: "application", "aria-label": "The image. Arrow keys move the pinned patch." }, this.picture, this.canvas, this.mark);
    this.outside = html("div", { class: "rg-row", role: "group", "aria-label": "tokens outside the image" });
    this.status = html("p", { class: "rg-status", "aria-live": "polite" });
    this.append(this.board, this.outside, this.status);
    const point = (event) => {
      const token = this.tokenAt(event);
      if (token !== null && token !== this.pinned) this.choose(token);
    };
    this.board.addEventListener("pointerdown", point);
    this.board.addEventListener("pointermove", (event) => { if (event.buttons) point(event); });
    this.board.addEventListener("keydown", (event) => this.onKey(event));
    onPalette(this, () => this.draw());
  }

  // `source.grid` is [rows, columns] of patches, `source.start` how many tokens come before them.
  show(source, { image, pinned = null, row = null } = {}) {
    Object.assign(this, { source, pinned, row });
    if (image && image !== this.shown) {
      this.shown = image;
      this.picture.src = image;
    }
    this.draw();
  }

  tokenAt(event) {
    const area = this.board.getBoundingClientRect(), [rows, columns] = this.source.grid;
    const y = Math.floor((event.clientY - area.top) / area.height * rows), x = Math.floor((event.clientX - area.left) / area.width * columns);
    return y < 0 || x < 0 || y >= rows || x >= columns ? null : this.source.start + y * columns + x;
  }

  choose(token) {
    this.dispatchEvent(new CustomEvent("pin", { detail: token, bubbles: true }));
  }

  onKey(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (!step || !this.source) return;
    event.preventDefault();
    const [rows, columns] = this.source.grid;
    const patch = this.pinned === null || this.pinned < this.source.start ? Math.floor(rows / 2) * columns + Math.floor(columns / 2) : this.pinned - this.source.start;
    const y = Math.min(Math.max(Math.floor(patch / columns) + step[0], 0), rows - 1), x = Math.min(Math.max(patch % columns + step[1], 0), columns - 1);
    this.choose(this.source.start + y * columns + x);
  }

  draw() {
    if (!this.source) return;
    const { source, row, pinned } = this, [rows, columns] = source.grid, { start } = source;
    this.board.style.aspectRatio = `${columns} / ${rows}`;
    this.outside.replaceChildren(...source.queries.slice(0, start).map((token, place) => html("button", { type: "button", "aria-pressed": String(place === pinned), on: { click: () => this.choose(place) } }, token)));
    this.canvas.width = columns;
    this.canvas.height = rows;
    let most = 0;
    if (row) {
      const cells = row.slice(start, start + rows * columns);
      most = largest(cells);
      const color = variable("weight").split(",").map(Number), picture = new ImageData(columns, rows);
      cells.forEach((weight, cell) => {
        picture.data.set(color, 4 * cell);
        picture.data[4 * cell + 3] = most ? 225 * Math.pow(weight / most, 0.8) : 0;
      });
      this.canvas.getContext("2d").putImageData(picture, 0, 0);
    }
    const patch = pinned === null ? -1 : pinned - start;
    this.mark.hidden = patch < 0 || patch >= rows * columns;
    if (!this.mark.hidden) {
      Object.assign(this.mark.style, { left: `${100 * (patch % columns) / columns}%`, top: `${100 * Math.floor(patch / columns) / rows}%`, width: `${100 / columns}%`, height: `${100 / rows}%` });
    }
    this.picture.classList.toggle("rg-dimmed", Boolean(row));
    this.status.textContent = pinned === null ? "Choose a patch." : `${patch >= 0 ? `row ${Math.floor(patch / columns)}, column ${patch % columns}` : source.queries[pinned]}${row ? ` · strongest patch ${percent(most)}` : ""}`;
    this.toggleAttribute("data-ready", Boolean(row));
  }

  toSVG() {
    const [rows, columns] = this.source.grid, size = 480, wide = size * columns / rows, nodes = [];
    if (this.shown && this.shown.startsWith("data:")) nodes.push(svg("image", { href: this.shown, width: wide, height: size, opacity: this.row ? 0.55 : 1, preserveAspectRatio: "none" }));
    if (this.row) {
      const cells = this.row.slice(this.source.start, this.source.start + rows * columns), most = largest(cells);
      cells.forEach((weight, cell) => {
        const share = most ? Math.pow(weight / most, 0.8) : 0;
        if (share > 0.01) nodes.push(svg("rect", { x: (cell % columns) * wide / columns, y: Math.floor(cell / columns) * size / rows, width: wide / columns, height: size / rows, fill: `rgb(${variable("weight")})`, "fill-opacity": (0.88 * share).toFixed(3) }));
      });
    }
    const patch = this.pinned === null ? -1 : this.pinned - this.source.start;
    if (patch >= 0) nodes.push(svg("rect", { x: (patch % columns) * wide / columns, y: Math.floor(patch / columns) * size / rows, width: wide / columns, height: size / rows, fill: "none", stroke: variable("query"), "stroke-width": 3 }));
    return wrapSVG(nodes, [0, 0, wide, size]);
  }
}

define("regard-image", AttendedImage);
