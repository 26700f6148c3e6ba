// <regard-softmax>: what the scale does to a row of scores: weights, entropy and the Jacobian.
import { define, html, slider } from "./dom.js";
import { onPalette } from "./colors.js";
import { entropy, entropySlope, jacobian, softmax } from "./calculus.js";
import { exportBar, standaloneSVG } from "./export.js";
import { heat, stackSVG, titled } from "./heat.js";
import "./bars.js";
import "./chart.js";

const LONGEST = 6, BETAS = Array.from({ length: 121 }, (_, place) => (place - 20) / 10);

class SoftmaxFigure extends HTMLElement {
  connectedCallback() {
    if (this.body) return;
    this.state = { beta: 1, scores: [2, 1, 0.5, 0, -1] };
    this.knobs = html("div", { class: "rg-knobs" });
    this.bars = html("regard-bars");
    this.entropy = html("regard-chart");
    this.matrix = html("div");
    this.facts = html("p", { class: "rg-status", "aria-live": "polite" });
    this.body = html("div", { class: "rg-pair" }, titled("weights", this.bars, this.facts), titled("entropy by scale", this.entropy), titled("Jacobian: weight (row) by score (column)", this.matrix));
    this.append(this.knobs, this.body, exportBar(this, "softmax"));
    this.build();
    onPalette(this, () => this.draw());
  }

  // {beta, scores}; what is left out stays.
  show(state) {
    Object.assign(this.state, state);
    this.state.scores = this.state.scores.slice(0, LONGEST);
    this.build();
  }

  build() {
    const { beta, scores } = this.state, changed = () => { this.draw(); this.dispatchEvent(new CustomEvent("change", { detail: this.state, bubbles: true })); };
    const plain = (value) => value.toFixed(1);
    this.knobs.replaceChildren(
      slider("scale β", { least: -2, most: 10, step: 0.1, value: beta, show: plain }, (value) => { this.state.beta = value; changed(); }),
      ...scores.map((score, place) => slider(`score ${place + 1}`, { least: -5, most: 5, step: 0.1, value: score, show: plain }, (value) => { this.state.scores[place] = value; changed(); })));
    this.draw();
  }

  draw() {
    const { beta, scores } = this.state, weights = softmax(scores, beta), now = entropy(scores, beta);
    this.bars.show(weights.map((share, place) => ({ name: `key ${place + 1}`, share })));
    this.entropy.show([{ name: "", points: BETAS.map((one) => [one, entropy(scores, one)]) }], { x: "scale β", y: "entropy", mark: beta, height: 220, format: (value) => value.toFixed(2) });
    this.matrix.replaceChildren(heat(jacobian(scores, beta), "Jacobian of softmax", { names: scores.map((_, place) => String(place + 1)) }));
    this.facts.textContent = `entropy ${now.toFixed(3)} nats, ${Math.exp(now).toFixed(2)} keys effectively, slope ${entropySlope(scores, beta).toFixed(3)}`;
    this.toggleAttribute("data-ready", true);
  }

  toSVG() {
    return stackSVG([this.bars.toSVG(), this.entropy.toSVG(), standaloneSVG(this.matrix.firstElementChild)]);
  }

  pythonLines() {
    const { beta, scores } = this.state;
    return `import torch\nfrom regard import calculus\n\nscores = torch.tensor(${JSON.stringify(scores)}, dtype=torch.float64)\nprint(calculus.softmax(scores, beta=${beta}))\nprint(calculus.entropy(scores, beta=${beta}))\nprint(calculus.jacobian(scores, beta=${beta}))\n`;
  }
}

define("regard-softmax", SoftmaxFigure);
