// A small matrix of numbers as cells, with the number in each where there is room.
import { html, svg } from "./dom.js";
import { inkOn, rampColor, variable } from "./colors.js";
import { wrapSVG } from "./export.js";

const write = (value) => (value === 0 ? "0" : Math.abs(value) < 0.001 ? value.toExponential(0) : value.toFixed(Math.abs(value) < 1 ? 3 : 2));

// Negative numbers are in the color of queries. `names` label rows and columns.
export function heatNodes(rows, { width = 300, names = null, numbers = rows[0].length <= 8, most = null, mark = null } = {}) {
  const left = names ? 34 : 0, top = names ? 22 : 0, cell = (width - left) / rows[0].length;
  const scale = most ?? Math.max(...rows.flat().map(Math.abs), 1e-300), nodes = [];
  rows.forEach((row, i) => row.forEach((value, j) => {
    const share = Math.abs(value) / scale, x = left + j * cell, y = top + i * cell;
    nodes.push(svg("rect", { x, y, width: cell, height: cell, fill: value < 0 ? variable("query") : rampColor(share), "fill-opacity": value < 0 ? (0.08 + 0.85 * share).toFixed(3) : 1, stroke: variable("line"), "stroke-width": 0.5 }));
    if (numbers) nodes.push(svg("text", { x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle", "font-size": Math.min(12, cell / 4.2).toFixed(1), fill: value < 0 && share < 0.6 ? variable("ink") : inkOn(share) }, write(value)));
  }));
  if (names) names.forEach((name, place) => nodes.push(
    svg("text", { x: left - 8, y: top + (place + 0.5) * cell + 4, "text-anchor": "end", "font-size": 12, fill: variable("faint") }, name),
    svg("text", { x: left + (place + 0.5) * cell, y: top - 7, "text-anchor": "middle", "font-size": 12, fill: variable("faint") }, name)));
  if (mark !== null) nodes.push(svg("rect", { x: left + mark * cell, y: top, width: cell, height: rows.length * cell, fill: "none", stroke: variable("query"), "stroke-width": 2 }));
  return { nodes, size: [width, top + rows.length * cell] };
}

export function heat(rows, label, options = {}) {
  const { nodes, size: [width, height] } = heatNodes(rows, options);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "rg-drawing", width, height, role: "img", "aria-label": label }, nodes);
}

// Several drawings and charts of a figure below one another, in one file.
export function stackSVG(parts) {
  let down = 0, wide = 0;
  const nodes = [];
  for (const text of parts) {
    const drawn = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    const [, , width, height] = drawn.getAttribute("viewBox").split(" ").map(Number);
    drawn.setAttribute("y", String(down));
    nodes.push(document.importNode(drawn, true));
    down += height + 16;
    wide = Math.max(wide, width);
  }
  return wrapSVG(nodes, [0, 0, wide, down]);
}

export function titled(title, ...content) {
  return html("div", {}, html("h4", {}, title), ...content);
}
