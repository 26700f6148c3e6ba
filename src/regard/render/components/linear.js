// <regard-linear>: softmax and linear attention of the same queries and keys: weights, and what each costs by length.
import { choice, define, html, slider } from "./dom.js";
import { onPalette } from "./colors.js";
import { attend, linearAttend } from "./calculus.js";
import { exportBar, standaloneSVG } from "./export.js";
import { heat, stackSVG, titled } from "./heat.js";
import "./chart.js";

// Reproducible numbers between -1 and 1, as in Python's lines below.
export function numbersFrom(seed, count) {
  return Array.from({ length: count }, (_, place) => Math.sin((seed + 1) * (12.9898 * place + 78.233)));
}

const table = (values, width) => Array.from({ length: values.length / width }, (_, row) => values.slice(row * width, (row + 1) * width));

class LinearFigure extends HTMLElement {
  connectedCallback() {
    if (this.maps) return;
    this.state = { tokens: 13, dim: 8, contrast: 2, causal: "yes", seed: 0 };
    this.knobs = html("div", { class: "rg-knobs" });
    this.maps = [html("div"), html("div")];
    this.costs = html("regard-chart");
    this.told = html("p", { class: "rg-status", "aria-live": "polite" });
    this.append(this.knobs, html("div", { class: "rg-pair" }, titled("softmax attention", this.maps[0]), titled("linear attention, φ = elu + 1", this.maps[1]), titled("multiply-adds by length", this.costs)), this.told, exportBar(this, "linear attention"));
    this.build();
    onPalette(this, () => this.draw());
  }

  show(state) {
    Object.assign(this.state, state);
    this.build();
  }

  build() {
    const { state } = this, whole = (value) => String(Math.round(value));
    const set = (name) => (value) => { state[name] = value; this.draw(); this.dispatchEvent(new CustomEvent("change", { detail: state, bubbles: true })); };
    this.knobs.replaceChildren(
      slider("tokens", { least: 2, most: 32, step: 1, value: state.tokens, show: whole }, set("tokens")),
      slider("head dim", { least: 1, most: 64, step: 1, value: state.dim, show: whole }, set("dim")),
      slider("size of scores", { least: 0, most: 8, step: 0.1, value: state.contrast, show: (value) => value.toFixed(1) }, set("contrast")),
      html("span", {}, choice("mask", [["yes", "causal"], ["no", "full"]], state.causal, set("causal"))));
    this.draw();
  }

  inputs() {
    const { tokens, dim, contrast, seed } = this.state;
    return [0, 1, 2].map((part) => table(numbersFrom(3 * seed + part, tokens * dim).map((value) => (part < 2 ? value * contrast : value)), dim));
  }

  draw() {
    const { dim, tokens } = this.state, causal = this.state.causal === "yes", [queries, keys, values] = this.inputs();
    const soft = attend(queries, keys, values, 1 / Math.sqrt(dim), causal), linear = linearAttend(queries, keys, values, causal);
    [soft, linear].forEach((one, place) => this.maps[place].replaceChildren(heat(one.weights, place ? "weights of linear attention" : "weights of softmax attention", { numbers: false })));
    const lengths = Array.from({ length: 15 }, (_, place) => 2 ** place);
    this.costs.show([
      { name: "softmax", points: lengths.map((n) => [n, (causal ? n * (n + 1) / 2 : n * n) * 2 * dim]) },
      { name: "linear", points: lengths.map((n) => [n, 2 * n * dim * dim]) }], { x: "tokens", y: "multiply-adds", logX: true, logY: true, mark: tokens, height: 230 });
    const apart = Math.max(...soft.output.flatMap((row, i) => row.map((value, j) => Math.abs(value - linear.output[i][j]))));
    const crossing = causal ? 2 * dim - 1 : dim;
    this.told.textContent = `outputs differ by at most ${apart.toFixed(3)}; linear attention needs fewer multiply-adds beyond ${crossing} tokens`;
    this.toggleAttribute("data-ready", true);
  }

  toSVG() {
    return stackSVG([...this.maps.map((one) => standaloneSVG(one.firstElementChild)), this.costs.toSVG()]);
  }

  pythonLines() {
    const { tokens, dim, contrast, seed } = this.state, pattern = this.state.causal === "yes" ? "Causal()" : "Full()";
    return `import torch\nfrom regard import ${pattern.slice(0, -2)}, attend\n\ndef numbers(seed):\n    place = torch.arange(${tokens * dim}, dtype=torch.float64)\n    return ((seed + 1) * (12.9898 * place + 78.233)).sin().view(1, 1, ${tokens}, ${dim})\n\nq, k, v = numbers(${3 * seed}) * ${contrast}, numbers(${3 * seed + 1}) * ${contrast}, numbers(${3 * seed + 2})\nprint(attend(q, k, v, pattern=${pattern}))\nprint(attend(q, k, v, pattern=${pattern}, feature_map="elu1"))\n`;
  }
}

define("regard-linear", LinearFigure);
