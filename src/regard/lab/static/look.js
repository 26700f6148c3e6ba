// Look: what a model attends to in an input, or two of them side by side.
import { button, html } from "/components/dom.js";
import { LookPanel } from "./look_panel.js";
import { writeAddress } from "./address.js";

const SECOND = "b.";

export class LookView {
  constructor(place, { models }) {
    this.models = models;
    this.compare = button("Compare side by side", () => this.setCompare(!this.panels[1]));
    this.stage = html("div", { class: "sides" });
    this.panels = [null, null];
    place.append(html("div", { class: "view-top" }, html("h1", {}, "What does it attend to?"), this.compare), this.stage);
    this.open(0, {});
  }

  // Parameters of the second side begin with "b.".
  async restore(params) {
    const first = {}, second = {};
    for (const [name, value] of Object.entries(params)) {
      if (name.startsWith(SECOND)) second[name.slice(SECOND.length)] = value;
      else first[name] = value;
    }
    if (Object.keys(second).length && !this.panels[1]) this.open(1, second);
    else if (!Object.keys(second).length && this.panels[1]) this.close();
    await Promise.all([this.panels[0].restore(first), this.panels[1] && Object.keys(second).length ? this.panels[1].restore(second) : null]);
  }

  open(side) {
    const panel = new LookPanel(this.models, () => this.remember(), side ? "second" : "first");
    this.panels[side] = panel;
    this.stage.append(panel.element);
    this.stage.toggleAttribute("data-two", Boolean(this.panels[1]));
    this.compare.setAttribute("aria-pressed", String(Boolean(this.panels[1])));
    return panel;
  }

  close() {
    this.panels[1].stop();
    this.panels[1].element.remove();
    this.panels[1] = null;
    this.stage.removeAttribute("data-two");
    this.compare.setAttribute("aria-pressed", "false");
  }

  // The second side starts as a copy of the first, to be changed.
  async setCompare(on) {
    if (!on) this.close();
    else await this.open(1).restore({ ...this.panels[0].state });
    this.remember();
  }

  remember() {
    const [first, second] = this.panels.map((panel) => (panel ? panel.state : {}));
    writeAddress("look", { ...first, ...Object.fromEntries(Object.entries(second).map(([name, value]) => [SECOND + name, value])) });
  }
}
