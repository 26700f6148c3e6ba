// <regard-pattern>: which queries may attend to which keys, as cells; longer lengths come pooled to shares.
import { define, html, svg } from "./dom.js";
import { onPalette, paint, rampColor, variable } from "./colors.js";
import { largest } from "./numbers.js";
import { wrapSVG } from "./export.js";

class PatternPicture extends HTMLElement {
  connectedCallback() {
    if (this.canvas) return;
    this.canvas = html("canvas", { class: "rg-cells", role: "img" });
    this.append(this.canvas);
    onPalette(this, () => this.draw());
  }

  // `picture` is {shape: [queries, keys], values}.
  show(picture, label) {
    this.picture = picture;
    this.canvas.setAttribute("aria-label", label || "pattern");
    this.draw();
  }

  draw() {
    if (!this.picture) return;
    const { shape: [rows, columns], values } = this.picture;
    paint(this.canvas, values, rows, columns, largest(values));
    this.canvas.style.aspectRatio = `${columns} / ${rows}`;
    this.toggleAttribute("data-ready", true);
  }

  toSVG() {
    const { shape: [rows, columns], values } = this.picture, size = 480, cell = size / Math.max(rows, columns), most = largest(values), nodes = [];
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns;) { // cells of one color in a row are one rectangle
        const value = values[row * columns + column];
        let end = column + 1;
        while (end < columns && values[row * columns + end] === value) end += 1;
        if (value) nodes.push(svg("rect", { x: +(column * cell).toFixed(3), y: +(row * cell).toFixed(3), width: +((end - column) * cell).toFixed(3), height: +cell.toFixed(3), fill: rampColor(value / most) }));
        column = end;
      }
    }
    nodes.push(svg("rect", { x: 0.5, y: 0.5, width: columns * cell - 1, height: rows * cell - 1, fill: "none", stroke: variable("line") }));
    return wrapSVG(nodes, [0, 0, columns * cell, rows * cell]);
  }
}

define("regard-pattern", PatternPicture);
