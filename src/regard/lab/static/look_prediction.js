// What the model predicts, and what it would predict without some heads; generation step by step.
import { button, html, slider } from "/components/dom.js";
import { tokenText } from "/components/numbers.js";
import { latest, post, stream } from "./api.js";
import { inputLines } from "./look_python.js";
import { card, showError } from "./parts.js";
import "/components/bars.js";

const TITLES = { next: "next token", mask: "guess for the masked token", class: "class" };

export class Prediction {
  constructor(panel) {
    this.panel = panel;
    this.bars = html("regard-bars");
    this.told = html("p", { class: "rg-status", role: "status" });
    this.error = html("div");
    this.off = html("div", { class: "rg-row chips", role: "group", "aria-label": "heads that are switched off" });
    this.generator = html("div");
    this.body = html("div", {}, this.off, this.bars, this.told, this.generator, this.error);
    this.element = card("Prediction", this.body, { figureOf: () => this.bars, python: () => this.python() });
    this.element.hidden = true;
    this.temperature = 0;
    this.ask = latest((signal, body) => post("/api/predict", body, signal));
    this.steps = latest((signal, body, each) => stream("/api/generate", body, { each, signal }));
  }

  able() {
    return this.panel.info && this.panel.info.abilities.some((one) => ["predict", "mlm", "generate"].includes(one));
  }

  async show() {
    const { panel } = this;
    this.element.hidden = !this.able() || !panel.input;
    if (this.element.hidden) return;
    this.showOff();
    this.showGenerator();
    try {
      const position = panel.info.abilities.includes("mlm") ? panel.state.token ?? null : null;
      const answer = await this.ask({ input: panel.input.input, position: position === null ? null : Number(position), off: panel.offList(), top: 10 });
      if (!answer) return;
      const before = new Map(answer.before.map((one) => [one.token, one.probability])), changed = panel.offList().length > 0;
      const entries = answer.after.map((one) => ({ name: one.token, share: one.probability, before: changed ? before.get(one.token) ?? 0 : null }));
      this.bars.show(entries);
      this.told.textContent = this.tell(answer, position, changed);
      showError(this.error, null);
    } catch (failure) {
      showError(this.error, failure);
    }
  }

  tell(answer, position, changed) {
    const { panel } = this, tokens = panel.text().queries;
    const what = answer.kind === "mask" && position !== null ? `guesses for token ${position}, ${tokenText(tokens[position] || "")}, if it were masked` : TITLES[answer.kind] || answer.kind;
    return changed ? `${what}; the orange mark is what it was with all heads` : what;
  }

  showOff() {
    const { panel } = this, off = panel.offList();
    this.off.replaceChildren(...off.map(([attention, layer, head]) => button(`${attention === "self" ? "" : `${attention} `}${layer}·${head} off ×`, () => panel.toggleHead(attention, layer, head), { "aria-label": `switch on layer ${layer}, head ${head}` })));
    if (off.length) this.off.append(button("all on", () => panel.setOff([])));
    else this.off.append(html("span", { class: "rg-faint" }, "Switch a head off in the figure above, and see what changes."));
  }

  showGenerator() {
    const can = this.panel.info.abilities.includes("generate");
    if (!can || this.generator.childElementCount) {
      if (!can) this.generator.replaceChildren();
      return;
    }
    const run = (steps) => this.generate(steps);
    this.written = html("p", { class: "written", "aria-live": "polite" });
    this.generator.replaceChildren(html("div", { class: "rg-row" }, button("One token", () => run(1)), button("Ten tokens", () => run(10)), button("Stop", () => this.steps.stop()),
      slider("temperature", { least: 0, most: 2, step: 0.1, value: this.temperature, show: (value) => (value ? value.toFixed(1) : "greedy") }, (value) => { this.temperature = value; })), this.written);
  }

  async generate(steps) {
    const { panel } = this;
    this.written.replaceChildren();
    try {
      const result = await this.steps({ input: panel.input.input, steps, temperature: this.temperature, seed: panel.text().queries.length }, (line) => {
        if (line.token === undefined) return;
        this.written.append(html("mark", {}, line.token));
        if (line.probabilities && line.probabilities.length && line.probabilities[0].token !== undefined) this.bars.show(line.probabilities.map((one) => ({ name: one.token, share: one.probability, before: null })));
      });
      if (result) await panel.continueWith(result);
    } catch (failure) {
      showError(this.error, failure);
    }
  }

  python() {
    const lines = inputLines(this.panel), shown = lines[lines.length - 1].match(/^show\(model, (\w+)/);
    if (shown) lines.splice(-1, 1, `output = model(${shown[1]})`, "logits = getattr(output, \"logits\", output)", "print(logits[0].softmax(-1).topk(5))");
    return `${lines.join("\n")}\n`;
  }

  stop() {
    this.ask.stop();
    this.steps.stop();
  }
}
