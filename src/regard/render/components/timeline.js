// <regard-timeline>: attention on one input over training: a slider of steps, every layer and head.
import { button, define, html, select } from "./dom.js";
import { onPalette } from "./colors.js";
import { tokenText } from "./numbers.js";
import { heat } from "./heat.js";
import { standaloneSVG } from "./export.js";

class Timeline extends HTMLElement {
  connectedCallback() {
    if (this.stage) return;
    this.state = { frame: 0, layer: 0, head: 0 };
    this.slider = html("input", { type: "range", min: 0, step: 1, "aria-label": "step", on: { input: () => { this.stop(); this.go(Number(this.slider.value)); } } });
    this.play = button("Play", () => (this.timer ? this.stop() : this.start()));
    this.told = html("output");
    this.pick = html("div", { class: "rg-row" });
    this.stage = html("div", { class: "rg-board" });
    this.append(this.pick, this.stage, html("div", { class: "rg-row rg-time" }, this.play, this.slider, this.told));
    onPalette(this, () => this.draw());
  }

  disconnectedCallback() {
    this.stop();
  }

  // {labels, tokens, layers, heads, maps: {shape: [frames, layers, heads, n, n], values (0 to 255)}}
  show(data) {
    const latest = !this.data || this.state.frame >= this.data.labels.length - 1;
    this.data = data;
    this.slider.max = String(data.labels.length - 1);
    const options = (count) => Array.from({ length: count }, (_, place) => [place, place]);
    this.pick.replaceChildren(select("layer", options(data.layers), this.state.layer, (value) => { this.state.layer = Number(value); this.draw(); }), select("head", options(data.heads), this.state.head, (value) => { this.state.head = Number(value); this.draw(); }));
    this.go(latest ? data.labels.length - 1 : this.state.frame);
  }

  go(frame) {
    this.state.frame = frame;
    this.slider.value = String(frame);
    this.told.textContent = this.label(frame);
    this.slider.setAttribute("aria-valuetext", this.told.textContent);
    this.draw();
  }

  label(frame) {
    const label = String(this.data.labels[frame]);
    return /[a-z]/i.test(label) ? label : `step ${label}`;
  }

  start() {
    if (this.state.frame >= this.data.labels.length - 1) this.go(0);
    this.play.textContent = "Pause";
    this.timer = setInterval(() => {
      if (this.state.frame >= this.data.labels.length - 1) this.stop();
      else this.go(this.state.frame + 1);
    }, 250);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    if (this.play) this.play.textContent = "Play";
  }

  draw() {
    if (!this.data) return;
    const { frame, layer, head } = this.state, { maps: { shape, values }, tokens } = this.data, [, layers, heads, rows, columns] = shape;
    const start = ((frame * layers + layer) * heads + head) * rows * columns;
    const table = Array.from({ length: rows }, (_, row) => Array.from(values.subarray(start + row * columns, start + (row + 1) * columns), (value) => value / 255));
    const named = tokens && tokens.length === rows && rows <= 24 && tokens.every((token) => token.length <= 6);
    this.stage.replaceChildren(heat(table, `attention of layer ${layer}, head ${head} at ${this.label(frame)}`, { width: 420, numbers: false, names: named ? tokens.map((token) => tokenText(token).slice(0, 4)) : null }));
    this.toggleAttribute("data-ready", true);
  }

  toSVG() {
    return standaloneSVG(this.stage.firstElementChild);
  }
}

define("regard-timeline", Timeline);
