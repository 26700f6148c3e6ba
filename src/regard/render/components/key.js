// <regard-key>: a key is moved or stretched; the exact law of the change stands beside attention computed anew.
import { define, html, slider, svg } from "./dom.js";
import { onPalette, variable } from "./colors.js";
import { attend, perturbKey, scoreChange } from "./calculus.js";
import { exportBar, standaloneSVG } from "./export.js";
import { stackSVG, titled } from "./heat.js";
import "./bars.js";

const REACH = 3, SIZE = 300;

class KeyFigure extends HTMLElement {
  connectedCallback() {
    if (this.plane) return;
    this.state = { query: [1.2, 0.8], keys: [[1, 1], [-1.5, 0.5], [0.5, -1.5], [2, -0.5]], moved: 0, shift: [0, 0], stretch: 1 };
    this.values = [[1, 0], [0, 1], [-1, 0], [0, -1]];
    this.knobs = html("div", { class: "rg-knobs" });
    this.plane = html("div");
    this.bars = html("regard-bars");
    this.law = html("dl", { class: "rg-facts" });
    this.append(this.knobs, html("div", { class: "rg-pair" }, titled("query and keys: drag one, or use the arrow keys", this.plane), titled("weights, and what they were", this.bars), titled("law and run", this.law)), exportBar(this, "key"));
    this.plane.addEventListener("pointerdown", (event) => this.drag(event));
    this.plane.addEventListener("keydown", (event) => this.onKey(event));
    this.build();
    onPalette(this, () => this.draw());
  }

  show(state) {
    Object.assign(this.state, state);
    this.build();
  }

  changed() {
    this.build();
    this.dispatchEvent(new CustomEvent("change", { detail: this.state, bubbles: true }));
  }

  build() {
    const { state } = this, plain = (value) => value.toFixed(2);
    const knob = (label, least, most, value, act) => slider(label, { least, most, step: 0.05, value, show: plain }, (next) => { act(next); this.draw(); this.dispatchEvent(new CustomEvent("change", { detail: state, bubbles: true })); });
    this.knobs.replaceChildren(
      knob("stretch", -1, 4, state.stretch, (value) => { state.stretch = value; state.shift = [0, 0]; this.sliders[1].set(0); this.sliders[2].set(0); }),
      knob("shift right", -REACH, REACH, state.shift[0], (value) => { state.shift[0] = value; state.stretch = 1; this.sliders[0].set(1); }),
      knob("shift up", -REACH, REACH, state.shift[1], (value) => { state.shift[1] = value; state.stretch = 1; this.sliders[0].set(1); }));
    this.sliders = Array.from(this.knobs.children);
    this.draw();
  }

  changedKey() {
    const { keys, moved, shift, stretch } = this.state;
    return keys[moved].map((part, axis) => part * stretch + shift[axis]);
  }

  // The law for the moved key, and attention with all keys computed anew.
  compute() {
    const { query, keys, moved, shift, stretch } = this.state, { values } = this;
    const before = attend([query], keys, values);
    const change = scoreChange(query, keys[moved], stretch === 1 ? { shift } : { stretch });
    const law = perturbKey(before.weights[0][moved], before.output[0], values[moved], change);
    const after = attend([query], keys.map((key, place) => (place === moved ? this.changedKey() : key)), values);
    return { before: before.weights[0], after: after.weights[0], change, law, run: after.output[0] };
  }

  draw() {
    const found = this.compute(), { moved, keys, query } = this.state, to = (value) => SIZE / 2 + value * SIZE / (2 * REACH + 0.6);
    const drawing = svg("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, width: SIZE, height: SIZE, class: "rg-drawing", role: "group", "aria-label": "plane of query and keys" });
    drawing.append(svg("rect", { x: 0.5, y: 0.5, width: SIZE - 1, height: SIZE - 1, rx: 8, fill: variable("wash"), stroke: variable("line") }), svg("path", { d: `M0 ${to(0)}H${SIZE}M${to(0)} 0V${SIZE}`, stroke: variable("line") }));
    const arrow = (end, color, wide) => drawing.append(svg("path", { d: `M${to(0)} ${to(0)}L${to(end[0])} ${to(-end[1])}`, stroke: color, "stroke-width": wide, fill: "none" }));
    arrow(query, variable("query"), 2);
    keys.forEach((key, place) => {
      const now = place === moved ? this.changedKey() : key;
      arrow(now, `rgb(${variable("weight")})`, 1 + 6 * found.after[place]);
      if (place === moved && (now[0] !== key[0] || now[1] !== key[1])) drawing.append(svg("path", { d: `M${to(key[0])} ${to(-key[1])}L${to(now[0])} ${to(-now[1])}`, stroke: variable("faint"), "stroke-dasharray": "3 3" }));
      drawing.append(this.dot(now, `key ${place + 1}`, String(place + 1), place === moved ? variable("ink") : `rgb(${variable("weight")})`, place, to));
    });
    drawing.append(this.dot(query, "query", "q", variable("query"), "q", to));
    const focused = this.plane.contains(document.activeElement) ? document.activeElement.dataset.dot : null;
    this.plane.replaceChildren(drawing);
    if (focused) this.plane.querySelector(`[data-dot="${focused}"]`).focus();
    this.bars.show(found.after.map((share, place) => ({ name: `key ${place + 1}`, share, before: found.before[place] })));
    const write = (values) => values.map((value) => value.toFixed(6)).join(", ");
    const facts = [["score change s", found.change.toFixed(4)], ["weight by the law", found.law.weight.toFixed(6)], ["weight of the run", found.after[moved].toFixed(6)],
      ["output by the law", write(found.law.output)], ["output of the run", write(found.run)], ["other weights", `× ${found.law.factor.toFixed(6)}`],
      ["largest difference", Math.max(Math.abs(found.law.weight - found.after[moved]), ...found.law.output.map((part, place) => Math.abs(part - found.run[place]))).toExponential(1)]];
    this.law.replaceChildren(...facts.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]));
    this.toggleAttribute("data-ready", true);
  }

  dot([x, y], label, letter, color, place, to) {
    return svg("g", { transform: `translate(${to(x)} ${to(-y)})`, tabindex: 0, role: "button", "data-dot": place, "aria-label": `${label} at ${x.toFixed(1)}, ${y.toFixed(1)}`, style: { cursor: "grab" } },
      svg("circle", { r: 11, fill: color, stroke: variable("card"), "stroke-width": 1.5 }), svg("text", { y: 4, "text-anchor": "middle", "font-size": 12, "font-weight": 700, fill: variable("dot") }, letter));
  }

  // The moved key keeps its old place and gets a shift; other keys and the query go where they are put.
  place(name, to) {
    const { state } = this, spot = to.map((value) => Math.min(Math.max(value, -REACH), REACH));
    if (name === "q") state.query = spot;
    else if (Number(name) === state.moved) {
      state.stretch = 1;
      state.shift = spot.map((value, axis) => value - state.keys[state.moved][axis]);
    } else {
      state.keys = state.keys.map((key, place) => (place === state.moved ? this.changedKey() : key));
      state.moved = Number(name);
      state.stretch = 1;
      state.shift = spot.map((value, axis) => value - state.keys[state.moved][axis]);
    }
    this.changed();
  }

  drag(event) {
    const dot = event.target.closest("[data-dot]");
    if (!dot) return;
    event.preventDefault();
    const name = dot.dataset.dot, area = this.plane.firstElementChild.getBoundingClientRect(), scale = (2 * REACH + 0.6) / area.width;
    dot.focus();
    const move = (now) => this.place(name, [(now.clientX - area.left - area.width / 2) * scale, -(now.clientY - area.top - area.height / 2) * scale]);
    const stop = () => { window.removeEventListener("pointermove", move); window.removeEventListener("pointerup", stop); };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", stop);
  }

  onKey(event) {
    const dot = event.target.closest("[data-dot]"), step = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] }[event.key];
    if (!dot || !step) return;
    event.preventDefault();
    const name = dot.dataset.dot, { state } = this;
    const now = name === "q" ? state.query : Number(name) === state.moved ? this.changedKey() : state.keys[Number(name)];
    this.place(name, now.map((value, axis) => value + step[axis]));
  }

  toSVG() {
    return stackSVG([standaloneSVG(this.plane.firstElementChild), this.bars.toSVG()]);
  }

  pythonLines() {
    const { query, keys, moved, shift, stretch } = this.state, tensor = (value) => `torch.tensor(${JSON.stringify(value)}, dtype=torch.float64)`;
    const change = stretch === 1 ? `shift=${tensor(shift)}` : `stretch=${stretch}`;
    return `import torch\nfrom regard import calculus\n\nquery = ${tensor([query])}\nkey = ${tensor(keys)}\nvalue = ${tensor(this.values)}\nweights, output = calculus.perturb_attention(query, key, value, ${moved}, ${change})\nprint(weights, output)\n`;
  }
}

define("regard-key", KeyFigure);
