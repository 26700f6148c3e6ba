// Check and price: the laws on a loaded model, and what it costs at any size.
import { button, html, select } from "/components/dom.js";
import { latest, stream } from "./api.js";
import { writeAddress } from "./address.js";
import { CostPanel } from "./price.js";
import { card, progressBar, showError, table } from "./parts.js";

const WORDS = { holds: "holds", broken: "broken", flaky: "flaky", silent: "not checked", undecided: "undecided", "not applicable": "does not apply" };

export class CheckView {
  constructor(place, { models }) {
    this.models = models;
    this.state = {};
    this.picker = html("span");
    this.error = html("div");
    this.progress = progressBar();
    this.run = html("button", { type: "button", class: "primary", on: { click: () => this.check() } }, "Check the laws");
    this.cancel = button("Stop", () => { this.ask.stop(); this.finish(); }, { hidden: true });
    this.verdicts = html("div", { "aria-live": "polite" });
    this.broken = html("div");
    this.cost = new CostPanel(models, (changes) => this.remember(changes));
    place.append(html("div", { class: "view-top" }, html("h1", {}, "Is it right, and what does it cost?")),
      html("div", { class: "two" },
        html("div", { class: "column" }, card("Laws", html("div", {}, html("p", { class: "lead" }, "Causality, padding, KV cache, gradients and more: each law is searched for the smallest case in which the model breaks it."), html("div", { class: "rg-row" }, this.picker, this.run, this.cancel), this.progress, this.error, this.verdicts, this.broken), { saves: false })),
        html("div", { class: "column" }, this.cost.element)));
    this.ask = latest((signal, body) => stream("/api/check", body, { each: (line) => this.advance(line), signal }));
  }

  async restore(params) {
    const model = this.models.find((one) => one.id === params.model) || this.models[0];
    if (!model) {
      showError(this.error, { parts: { title: "There is no model to check.", instead: "regard lab FOLDER" } });
      return;
    }
    const changed = this.state.model !== model.id;
    this.state = { ...params, model: model.id };
    this.picker.replaceChildren(select("model", this.models.map((one) => [one.id, one.name]), model.id, (id) => { this.remember({ model: id, target: null }); this.clear(); this.cost.restore({ ...this.state, target: id }); }));
    if (changed) this.clear();
    await this.cost.restore(params);
  }

  remember(changes) {
    Object.assign(this.state, changes);
    writeAddress("check", this.state);
  }

  clear() {
    this.ask.stop();
    this.finish();
    this.verdicts.replaceChildren();
    this.broken.replaceChildren();
    showError(this.error, null);
  }

  finish() {
    this.progress.tell(null);
    this.run.hidden = false;
    this.cancel.hidden = true;
  }

  advance(line) {
    if (line.progress) this.progress.tell(line.progress);
    if (line.verdict) {
      this.found.push(line.verdict);
      this.showVerdicts(this.found);
    }
  }

  async check() {
    this.clear();
    this.found = [];
    this.run.hidden = true;
    this.cancel.hidden = false;
    this.cancel.focus();
    this.progress.tell({ label: "making example inputs", done: 0, total: 0 });
    try {
      const answer = await this.ask({ model: this.state.model, laws: null });
      if (!answer) return;
      this.finish();
      this.showVerdicts(answer.verdicts);
      if (answer.counterexample) {
        this.broken.replaceChildren(html("h3", {}, "The smallest counterexample"), html("iframe", { class: "page", sandbox: "", title: "counterexample", srcdoc: answer.counterexample }));
      }
    } catch (failure) {
      this.finish();
      showError(this.error, failure);
    }
  }

  showVerdicts(verdicts) {
    const counts = Object.entries(WORDS).map(([kind, word]) => [verdicts.filter((one) => one.verdict === kind).length, word]).filter(([count]) => count);
    const rows = verdicts.map((one) => [one.title || one.law, html("span", { class: one.verdict.replaceAll(" ", "-") }, WORDS[one.verdict] || one.verdict), String(one.cases ?? ""), one.message || ""]);
    this.verdicts.replaceChildren(html("p", { class: "rg-status" }, counts.map(([count, word]) => `${count} ${word}`).join(", ")), table([["law"], ["verdict"], ["cases", "number"], ["what was found"]], rows));
  }

  pause() {
    this.ask.stop();
    this.finish();
  }
}
