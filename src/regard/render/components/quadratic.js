// <regard-quadratic>: nine heads that attend by position; as each narrows to one pixel, together they are a convolution.
import { choice, define, html, slider, svg } from "./dom.js";
import { onPalette, paint, variable } from "./colors.js";
import { convolve, quadraticHeads, quadraticWeights } from "./calculus.js";
import { exportBar, wrapSVG } from "./export.js";
import { heatNodes, titled } from "./heat.js";

export const GRID = [17, 23];
const OFFSETS = [-1, 0, 1].flatMap((down) => [-1, 0, 1].map((across) => [down, across]));
const KERNELS = {
  edges: ["edges", [-1, -1, -1, -1, 8, -1, -1, -1, -1]],
  blur: ["blur", OFFSETS.map(() => 1 / 9)],
  relief: ["relief", [-2, -1, 0, -1, 1, 1, 0, 1, 2]],
};

// A drawn letter A with a shade behind it: something with edges, made here.
export function sampleImage([rows, columns] = GRID) {
  return Array.from({ length: rows * columns }, (_, place) => {
    const y = Math.floor(place / columns) / (rows - 1), x = (place % columns) / (columns - 1);
    const leg = Math.abs(Math.abs(x - 0.5) - 0.38 * (y - 0.08) / 0.84) < 0.055 && y > 0.08 && y < 0.94;
    const bar = Math.abs(y - 0.62) < 0.05 && Math.abs(x - 0.5) < 0.25;
    return leg || bar ? 1 : 0.12 * x;
  });
}

class QuadraticFigure extends HTMLElement {
  connectedCallback() {
    if (this.stage) return;
    this.state = { alpha: 0.3, spread: 1, kernel: "edges", row: 8, column: 11 };
    this.image = sampleImage();
    this.stage = html("canvas", { class: "rg-cells", tabindex: 0, role: "application", "aria-label": "The image with the pixel that all heads attend from. Arrow keys move it." });
    this.heads = html("div", { class: "rg-nine" });
    this.result = html("canvas", { class: "rg-cells", role: "img", "aria-label": "output of the heads" });
    this.target = html("canvas", { class: "rg-cells", role: "img", "aria-label": "output of the convolution" });
    this.told = html("p", { class: "rg-status", "aria-live": "polite" });
    this.knobs = html("div", { class: "rg-knobs" });
    this.append(this.knobs, html("div", { class: "rg-pair" }, titled("image and centers of the heads", this.stage), titled("what each of nine heads attends to", this.heads), titled("sum of the heads", this.result), titled("convolution", this.target)), this.told, exportBar(this, "quadratic heads"));
    const point = (event) => {
      const area = this.stage.getBoundingClientRect();
      this.move(Math.floor((event.clientY - area.top) / area.height * GRID[0]), Math.floor((event.clientX - area.left) / area.width * GRID[1]));
    };
    this.stage.addEventListener("pointerdown", point);
    this.stage.addEventListener("pointermove", (event) => { if (event.buttons) point(event); });
    this.stage.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      this.move(this.state.row + step[0], this.state.column + step[1]);
    });
    this.build();
    onPalette(this, () => this.draw());
  }

  show(state) {
    Object.assign(this.state, state);
    this.build();
  }

  changed() {
    this.draw();
    this.dispatchEvent(new CustomEvent("change", { detail: this.state, bubbles: true }));
  }

  move(row, column) {
    const next = [Math.min(Math.max(row, 0), GRID[0] - 1), Math.min(Math.max(column, 0), GRID[1] - 1)];
    if (next[0] === this.state.row && next[1] === this.state.column) return;
    [this.state.row, this.state.column] = next;
    this.changed();
  }

  build() {
    const { state } = this, set = (name) => (value) => { state[name] = value; this.changed(); };
    this.knobs.replaceChildren(
      slider("steepness α", { least: -2, most: 2, step: 0.05, value: Math.log10(state.alpha), show: (value) => (10 ** value).toFixed(2) }, (value) => set("alpha")(10 ** value)),
      slider("centers apart", { least: 0, most: 3, step: 0.05, value: state.spread, show: (value) => value.toFixed(2) }, set("spread")),
      html("span", {}, choice("kernel", Object.entries(KERNELS).map(([key, [name]]) => [key, name]), state.kernel, set("kernel"))));
    this.draw();
  }

  centers() {
    return OFFSETS.map((offset) => offset.map((part) => part * this.state.spread));
  }

  draw() {
    const { alpha, kernel, row, column } = this.state, values = KERNELS[kernel][1], centers = this.centers();
    const heads = centers.map((center) => ({ center, alpha }));
    const sum = quadraticHeads(this.image, GRID, heads, values), target = convolve(this.image, GRID, OFFSETS, values);
    const most = Math.max(...target.map(Math.abs), 1e-9);
    paint(this.stage, this.image, ...GRID, 1.6);
    this.mark(row, column, centers);
    paint(this.result, sum.map(Math.abs), ...GRID, most);
    paint(this.target, target.map(Math.abs), ...GRID, most);
    for (const canvas of [this.stage, this.result, this.target]) canvas.style.aspectRatio = `${GRID[1]} / ${GRID[0]}`;
    this.heads.replaceChildren(...centers.map((center, head) => {
      const weights = quadraticWeights(GRID, [row, column], center, alpha), canvas = html("canvas", { class: "rg-cells", role: "img", "aria-label": `head ${head}, largest weight ${Math.max(...weights).toFixed(2)}` });
      paint(canvas, weights, ...GRID, Math.max(...weights));
      return canvas;
    }));
    this.error = Math.max(...sum.map((value, place) => Math.abs(value - target[place])));
    this.told.textContent = `largest difference between the heads and the convolution: ${this.error < 0.01 ? this.error.toExponential(1) : this.error.toFixed(2)}${this.error < 1e-3 ? ": the heads are the convolution" : ""}`;
    this.toggleAttribute("data-ready", true);
  }

  mark(row, column, centers) {
    const scale = 14, [rows, columns] = GRID, small = html("canvas");
    paint(small, this.image, rows, columns, 1.6);
    this.stage.width = columns * scale;
    this.stage.height = rows * scale;
    const pen = this.stage.getContext("2d");
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, 0, 0, columns * scale, rows * scale);
    pen.strokeStyle = variable("query");
    pen.lineWidth = 2;
    pen.strokeRect(column * scale, row * scale, scale, scale);
    centers.forEach(([down, across], head) => {
      pen.fillStyle = variable(`h${head}`);
      pen.beginPath();
      pen.arc((column + across + 0.5) * scale, (row + down + 0.5) * scale, 4, 0, 7);
      pen.fill();
    });
  }

  toSVG() {
    const { alpha, kernel } = this.state, values = KERNELS[kernel][1], [rows, columns] = GRID, nodes = [];
    const grids = [["image", this.image], ["sum of the heads", quadraticHeads(this.image, GRID, this.centers().map((center) => ({ center, alpha })), values)], ["convolution", convolve(this.image, GRID, OFFSETS, values)]];
    grids.forEach(([title, cells], place) => {
      const table = Array.from({ length: rows }, (_, row) => cells.slice(row * columns, (row + 1) * columns)), { nodes: inner } = heatNodes(table, { width: 230, numbers: false });
      nodes.push(svg("g", { transform: `translate(${place * 250} 24)` }, inner), svg("text", { x: place * 250, y: 15, "font-size": 13, fill: variable("ink") }, title));
    });
    return wrapSVG(nodes, [0, 0, 730, 24 + 230 * rows / columns]);
  }

  pythonLines() {
    const { alpha, row, column } = this.state, start = row * GRID[1] + column;
    return `import torch\nfrom regard import Quadratic\n\nbias = Quadratic(9, grid=(${GRID}), centre=${JSON.stringify(this.centers())}, alpha=${alpha}, dtype=torch.float64)\nscores = bias.scores(torch.tensor([[${start}]]), torch.arange(${GRID[0] * GRID[1]})[None])\nprint(scores.softmax(-1))\n`;
  }
}

define("regard-quadratic", QuadraticFigure);
