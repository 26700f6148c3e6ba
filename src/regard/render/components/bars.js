// <regard-bars>: shares as bars; with a second list, what each was before.
import { define, svg } from "./dom.js";
import { onPalette } from "./colors.js";
import { percent, tokenText } from "./numbers.js";
import { standaloneSVG } from "./export.js";

const ROW = 28;

class Bars extends HTMLElement {
  connectedCallback() {
    if (this.watched) return;
    this.watched = true;
    new ResizeObserver(() => this.draw()).observe(this);
    onPalette(this, () => this.draw());
  }

  // entries: [{name, share, before (or null)}]
  show(entries) {
    this.entries = entries;
    this.draw();
  }

  draw() {
    const width = this.clientWidth;
    if (!width || !this.entries || width === this.drawnWidth && this.entries === this.drawnEntries) return;
    [this.drawnWidth, this.drawnEntries] = [width, this.entries];
    const left = Math.min(130, width * 0.32), right = this.entries.some((one) => one.before !== null && one.before !== undefined) ? 130 : 64, height = Math.max(1, this.entries.length) * ROW + 4;
    const told = this.entries.map((one) => `${one.name} ${percent(one.share)}${one.before === null || one.before === undefined ? "" : `, before ${percent(one.before)}`}`).join("; ");
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "rg-drawing", role: "img", "aria-label": told || "no values" });
    const most = Math.max(...this.entries.map((one) => Math.max(one.share, one.before || 0)), 1e-9), long = (share) => Math.max(0, (width - left - right) * share / most);
    this.entries.forEach((one, place) => {
      const y = place * ROW, changed = one.before !== null && one.before !== undefined && Math.abs(one.share - one.before) > 5e-4;
      drawing.append(svg("text", { class: "rg-word", x: left - 10, y: y + 19, "text-anchor": "end" }, tokenText(one.name, true)), svg("rect", { class: "rg-bar", x: left, y: y + 6, width: long(one.share), height: 16, rx: 2 }));
      if (changed) drawing.append(svg("path", { class: "rg-before", d: `M${left + long(one.before)} ${y + 3}v22` }));
      drawing.append(svg("text", { class: "rg-axis", x: left + long(Math.max(one.share, changed ? one.before : 0)) + 8, y: y + 19 }, changed ? `${percent(one.share)}, was ${percent(one.before)}` : percent(one.share)));
    });
    this.replaceChildren(drawing);
    this.toggleAttribute("data-ready", true);
  }

  toSVG() {
    return standaloneSVG(this.firstElementChild);
  }
}

define("regard-bars", Bars);
