// Play: patterns of pairs, and the mathematics of softmax attention, with knobs.
import { choice, html, slider } from "/components/dom.js";
import { quadraticWeights } from "/components/calculus.js";
import { decode, grouped, percent } from "/components/numbers.js";
import { latest, post, stream } from "./api.js";
import { writeAddress } from "./address.js";
import { card, progressBar, showError } from "./parts.js";
import "/components/chart.js";
import "/components/key.js";
import "/components/linear.js";
import "/components/pattern.js";
import { GRID } from "/components/quadratic.js";
import "/components/softmax.js";

const FIGURES = [["pattern", "Patterns"], ["scale", "Scale"], ["key", "A key moves"], ["convolution", "Heads and convolution"], ["linear", "Linear attention"]];
const WORDS = {
  pattern: "Which queries may attend to which keys. Patterns are combined with & (and), | (or) and ~ (not).",
  scale: "The scale β is an inverse temperature: 0 attends to all keys alike, a large one to the best alone, a negative one to the worst.",
  key: "One key moves or is stretched. Its weight follows an exact law; attention computed anew gives the same numbers.",
  convolution: "Each head attends to a place relative to the query. Make α large and put the centers one pixel apart: the heads are a convolution.",
  linear: "An inner product of features in place of exp: the same queries and keys, other weights, and a cost that is linear in the length.",
};
const EXAMPLES = ["Causal()", "Causal() & Window(8, 0) | First(1)", "Window(4, 4)", "Window(8, 0, step=3)", "Strided(5) & Causal()", "Blocks(8)", "Random(3, seed=1, block=4)", "~Window(2, 2)", "Neighborhood((6, 8), 1)", "Axial((6, 8))"];
const LENGTHS = [8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192];

const pack = (state) => Object.fromEntries(Object.entries(state).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]));

function unpack(params, like) {
  const state = {};
  for (const [name, value] of Object.entries(like)) {
    if (params[name] === undefined) continue;
    try {
      const read = typeof value === "string" ? params[name] : JSON.parse(params[name]);
      if (typeof read === typeof value && Array.isArray(read) === Array.isArray(value)) state[name] = read;
    } catch { /* an address written by hand: what cannot be read stays as it was */ }
  }
  return state;
}

export class PlayView {
  constructor(place) {
    this.tabs = html("div");
    this.words = html("p", { class: "lead" });
    this.stage = html("div");
    place.append(html("div", { class: "view-top" }, html("h1", {}, "Turn the knobs"), this.tabs), this.words, this.stage);
    this.compared = html("p", { class: "rg-status", role: "status" });
    this.askHeads = latest((signal, body) => post("/api/quadratic", body, signal));
    this.editor = new PatternEditor((params) => this.remember(params));
    const figures = { scale: "regard-softmax", key: "regard-key", convolution: "regard-quadratic", linear: "regard-linear" };
    this.figures = Object.fromEntries(Object.entries(figures).map(([name, tag]) => {
      const figure = html(tag);
      figure.addEventListener("change", (event) => {
        if (!event.detail || typeof event.detail !== "object") return;
        this.remember(pack(event.detail));
        if (name === "convolution") this.compare();
      });
      return [name, figure];
    }));
  }

  async restore(params) {
    const name = FIGURES.some(([one]) => one === params.figure) ? params.figure : "pattern";
    this.tabs.replaceChildren(choice("figure", FIGURES, name, (next) => { writeAddress("play", { figure: next }); this.restore({ figure: next }); }));
    this.name = name;
    this.words.textContent = WORDS[name];
    if (name === "pattern") {
      this.stage.replaceChildren(this.editor.element);
      await this.editor.restore(params);
    } else {
      const figure = this.figures[name];
      this.compared.textContent = "";
      this.stage.replaceChildren(html("section", { class: "card" }, figure, this.compared));
      figure.show(unpack(params, figure.state));
      if (name === "convolution") this.compare();
    }
  }

  // The page's weights of the nine heads beside those that Regard computes for the same heads.
  compare() {
    clearTimeout(this.comparing);
    this.comparing = setTimeout(async () => {
      const figure = this.figures.convolution, { alpha, row, column } = figure.state, centers = figure.centers();
      try {
        const answer = await this.askHeads({ grid: GRID, heads: centers.map((center) => ({ center, width: 1 / Math.sqrt(2 * alpha) })), query: [row, column] });
        if (!answer) return;
        const { values } = decode(answer.maps), own = centers.flatMap((center) => quadraticWeights(GRID, [row, column], center, alpha));
        const apart = Math.max(...own.map((weight, place) => Math.abs(weight - values[place])));
        this.compared.textContent = `these weights and those of regard.Quadratic differ by at most ${apart.toExponential(1)}`;
      } catch (failure) {
        this.compared.textContent = failure.message;
      }
    }, 250);
  }

  remember(params) {
    writeAddress("play", { figure: this.name, ...params });
  }
}

class PatternEditor {
  constructor(remember) {
    this.remember = remember;
    this.state = { expression: EXAMPLES[1], tokens: 32 };
    this.field = html("input", { type: "text", class: "code", spellcheck: "false", autocomplete: "off", autocapitalize: "off", "aria-label": "pattern", value: this.state.expression, on: { input: () => this.later() } });
    this.length = slider("tokens", { least: 0, most: LENGTHS.length - 1, step: 1, value: LENGTHS.indexOf(32), show: (place) => grouped(LENGTHS[place]) }, (place) => { this.state.tokens = LENGTHS[place]; this.later(); });
    this.error = html("div");
    this.progress = progressBar();
    this.picture = html("regard-pattern");
    this.facts = html("dl", { class: "rg-facts" });
    this.curve = html("regard-chart");
    this.time = html("button", { type: "button", on: { click: () => this.measure() } }, "Measure on this machine");
    this.timed = html("p", { class: "rg-status", role: "status" });
    const examples = html("div", { class: "rg-row chips", role: "group", "aria-label": "examples" }, EXAMPLES.map((text) => html("button", { type: "button", on: { click: () => { this.field.value = text; this.update(); } } }, text)));
    this.element = html("div", {}, html("section", { class: "card" }, this.field, examples, this.length, this.error),
      html("div", { class: "two" }, card("Pairs", this.picture, { name: "pattern", python: () => this.answer.python }), html("div", { class: "column" }, html("section", { class: "card", "aria-label": "numbers" }, html("h2", {}, "Numbers"), this.facts, html("div", { class: "rg-row spaced" }, this.time), this.progress, this.timed),
        card("Cost by length", this.curve, { name: "cost" }))));
    this.ask = latest((signal, body) => post("/api/pattern", body, signal));
    this.clock = latest((signal, body) => stream("/api/time", body, { each: (line) => this.progress.tell(line.progress), signal }));
  }

  async restore(params) {
    if (params.expression) this.field.value = params.expression;
    const place = LENGTHS.indexOf(Number(params.tokens));
    if (place >= 0) {
      this.state.tokens = LENGTHS[place];
      this.length.set(place);
    }
    await this.update();
  }

  later() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.update(), 180);
  }

  async update() {
    clearTimeout(this.waiting);
    this.state.expression = this.field.value;
    this.remember({ ...this.state });
    this.clock.stop();
    this.progress.tell(null);
    this.timed.textContent = "";
    try {
      const answer = await this.ask({ ...this.state });
      if (!answer) return;
      this.answer = answer;
      showError(this.error, null);
      this.field.setAttribute("aria-invalid", "false");
      this.picture.show(decode(answer.picture), `${answer.expression}: ${answer.pairs} pairs`);
      const yes = answer.supports_kv_cache;
      const facts = [["pattern", html("code", {}, answer.expression)], ["pairs", `${grouped(answer.pairs)} of ${grouped(this.state.tokens ** 2)}`], ["density", percent(answer.density)], ["multiply-adds", html("code", {}, answer.formula)],
        ["KV cache", typeof yes === "string" ? yes : yes ? "yes: no query sees a later key" : "no: a query sees later keys"]];
      this.facts.replaceChildren(...facts.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]));
      this.curve.show([{ name: "", points: answer.curve }], { x: "tokens", y: "multiply-adds", logX: true, logY: true, mark: this.state.tokens });
    } catch (failure) {
      this.field.setAttribute("aria-invalid", "true");
      showError(this.error, failure);
    }
  }

  async measure() {
    try {
      this.progress.tell({ label: "measuring", done: 0, total: 0 });
      const answer = await this.clock({ ...this.state });
      this.progress.tell(null);
      if (answer) this.timed.textContent = `${answer.milliseconds.toPrecision(3)} ms forward at ${grouped(this.state.tokens)} tokens, backend ${answer.backend}`;
    } catch (failure) {
      this.progress.tell(null);
      showError(this.error, failure);
    }
  }
}
