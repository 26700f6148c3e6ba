// <regard-chart>: curves with axes, linear or logarithmic; the arrow keys and the pointer read values.
import { define, html, svg } from "./dom.js";
import { onPalette } from "./colors.js";
import { short } from "./numbers.js";
import { standaloneSVG } from "./export.js";

const DASHES = ["", "9 4", "2 3", "12 3 2 3", "5 3", "1 4", "14 4"];

export function niceTicks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((one) => one * power >= raw) * power;
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return ticks;
}

export function powerTicks(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), stride = Math.max(1, Math.ceil((last - first) / 5));
  const ticks = [];
  for (let power = first; power <= last; power += stride) ticks.push(10 ** power);
  return ticks.length > 1 ? ticks : niceTicks(low, high, 4);
}

// Without zeros at the end: 10.0 k is 10 k.
const trim = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

class Chart extends HTMLElement {
  connectedCallback() {
    if (this.board) return;
    this.legend = html("ul", { class: "rg-legend" });
    this.board = html("div", { class: "rg-board", tabindex: 0, role: "group" });
    this.status = html("p", { class: "rg-status", "aria-live": "polite" });
    this.append(this.legend, this.board, this.status);
    this.board.addEventListener("pointermove", (event) => this.point(event));
    this.board.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    this.board.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this);
    onPalette(this, () => this.draw());
  }

  // series: [{name, points: [[x, y], ...]}]; axes: {x, y (titles), logX, logY, mark (an x to point out), format}.
  show(series, axes = {}) {
    Object.assign(this, { series, axes });
    this.draw();
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.series) return;
    event.preventDefault();
    const xs = this.allX();
    const place = this.at === null || this.at === undefined ? (step > 0 ? -1 : xs.length) : xs.indexOf(this.at);
    this.at = xs[Math.min(Math.max(place + step, 0), xs.length - 1)];
    this.draw();
  }

  allX() {
    return [...new Set(this.series.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
  }

  point(event) {
    if (!this.series || !this.toX) return;
    const area = this.board.getBoundingClientRect(), xs = this.allX(), across = event.clientX - area.left;
    if (!xs.length) return;
    const near = xs.reduce((best, x) => (Math.abs(this.toX(x) - across) < Math.abs(this.toX(best) - across) ? x : best), xs[0]);
    if (near !== this.at) {
      this.at = near;
      this.draw();
    }
  }

  draw() {
    const width = this.clientWidth;
    if (!width || !this.series) return;
    const { axes } = this, height = axes.height || Math.min(280, Math.max(180, width * 0.5)), [left, right, top, bottom] = [58, 14, 12, 40];
    const shown = this.series.map((one, place) => ({ ...one, color: one.color ?? place % 7, points: one.points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y) && (!axes.logX || x > 0) && (!axes.logY || y > 0)) }));
    const points = shown.flatMap((one) => one.points);
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "rg-drawing", role: "img", "aria-label": this.describe(shown) });
    this.legend.replaceChildren(...(shown.length > 1 || shown.some((one) => one.name) ? shown.map((one) => html("li", {}, svg("svg", { width: 26, height: 8, "aria-hidden": "true" }, svg("path", { d: "M1 4H25", class: `rg-curve rg-c${one.color}`, "stroke-dasharray": DASHES[one.color] })), one.name)) : []));
    if (!points.length) {
      this.board.replaceChildren(drawing);
      this.status.textContent = "No values yet.";
      return;
    }
    const range = (place, log, zero) => {
      let low = Math.min(...points.map((point) => point[place])), high = Math.max(...points.map((point) => point[place]));
      if (!log && zero && low > 0 && low < high * 0.5) low = 0;
      if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
      return [low, high];
    };
    const [x0, x1] = axes.rangeX || range(0, axes.logX), [y0, y1] = axes.rangeY || range(1, axes.logY, axes.zero !== false);
    const scale = (low, high, from, to, log) => (value) => from + (to - from) * (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
    const toX = scale(x0, x1, left, width - right, axes.logX), toY = scale(y0, y1, height - bottom, top, axes.logY);
    this.toX = toX;
    const xTicks = axes.logX ? powerTicks(x0, x1) : niceTicks(x0, x1, Math.max(2, Math.min(6, width / 90))), yTicks = axes.logY ? powerTicks(y0, y1) : niceTicks(y0, y1, 4);
    const format = axes.format || short;
    for (const tick of yTicks) drawing.append(svg("path", { class: "rg-grid", d: `M${left} ${toY(tick)}H${width - right}` }), svg("text", { class: "rg-axis", x: left - 8, y: toY(tick) + 4, "text-anchor": "end" }, trim(format(tick))));
    for (const tick of xTicks) drawing.append(svg("text", { class: "rg-axis", x: toX(tick), y: height - bottom + 18, "text-anchor": "middle" }, trim(short(tick))));
    if (axes.x) drawing.append(svg("text", { class: "rg-axis", x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, axes.x));
    if (axes.mark !== undefined && axes.mark >= x0 && axes.mark <= x1) drawing.append(svg("path", { class: "rg-markline", d: `M${toX(axes.mark)} ${top}V${height - bottom}` }));
    for (const one of shown) {
      if (one.points.length === 1) drawing.append(svg("circle", { class: `rg-point rg-c${one.color}`, cx: toX(one.points[0][0]), cy: toY(one.points[0][1]), r: 3.5 }));
      else drawing.append(svg("path", { class: `rg-curve rg-c${one.color}`, "stroke-dasharray": DASHES[one.color], d: one.points.map(([x, y], place) => `${place ? "L" : "M"}${toX(x).toFixed(2)} ${toY(y).toFixed(2)}`).join("") }));
    }
    this.status.textContent = axes.told || "";
    if (this.at !== null && this.at !== undefined) {
      drawing.append(svg("path", { class: "rg-markline", "data-screen": true, d: `M${toX(this.at)} ${top}V${height - bottom}` }));
      const told = shown.map((one) => [one, one.points.find(([x]) => x === this.at)]).filter(([, point]) => point);
      told.forEach(([one, [x, y]]) => drawing.append(svg("circle", { class: `rg-point rg-c${one.color}`, "data-screen": true, cx: toX(x), cy: toY(y), r: 4 })));
      this.status.textContent = `${axes.x || "x"} ${short(this.at)}: ${told.map(([one, [, y]]) => `${one.name ? `${one.name} ` : ""}${format(y)}`).join(" · ")}`;
    }
    this.board.replaceChildren(drawing);
    this.toggleAttribute("data-ready", true);
  }

  describe(shown) {
    return shown.map((one) => {
      const first = one.points[0], last = one.points[one.points.length - 1];
      return first ? `${one.name || this.axes.y || "curve"}: from ${short(first[1])} at ${short(first[0])} to ${short(last[1])} at ${short(last[0])}` : "";
    }).join("; ") || "an empty chart";
  }

  toSVG() {
    return standaloneSVG(this.board.firstElementChild);
  }
}

define("regard-chart", Chart);
