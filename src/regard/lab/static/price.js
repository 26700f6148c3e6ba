// What a model or a pattern costs: parts, formulas and curves, with a slider for each size.
import { html, select, slider } from "/components/dom.js";
import { grouped, short } from "/components/numbers.js";
import { latest, post } from "./api.js";
import { card, showError, table } from "./parts.js";
import "/components/chart.js";

const PATTERN = "=pattern";
const SIZES = { tokens: [1, 131072], batch: [1, 512], dim: [1, 16384], heads: [1, 128], layers: [1, 128] };
const NAMES = { tokens: "length", batch: "batch", dim: "width", heads: "heads", layers: "layers" };
const CURVES = [["macs", "multiply-adds"], ["bytes", "bytes"], ["activations", "saved activations"]];

// Sizes as people choose them: with three leading bits.
function roundSize(value) {
  const unit = Math.max(1, 2 ** (Math.floor(Math.log2(value)) - 3));
  return Math.max(1, Math.round(value / unit) * unit);
}

export class CostPanel {
  constructor(models, remember) {
    this.models = models;
    this.remember = remember;
    this.state = { target: null, sizes: {}, devices: 1, strategy: "fsdp", link_gbps: 400, curve: "macs" };
    this.knobs = html("div", { class: "rg-knobs" });
    this.target = html("div", { class: "rg-row" });
    this.error = html("div");
    this.parts = html("div");
    this.parallel = html("div");
    this.formulas = html("dl", { class: "rg-facts" });
    this.chart = html("regard-chart");
    this.curves = html("div", { class: "rg-row" });
    this.element = html("div", { class: "column" },
      card("Cost", html("div", {}, this.target, this.knobs, this.error, this.formulas, this.parallel, this.parts), { saves: false }),
      card("Cost by length", html("div", {}, this.curves, this.chart), { figureOf: () => this.chart, name: "cost", python: () => (this.answer ? this.answer.python : "") }));
    this.ask = latest((signal, body) => post("/api/cost", body, signal));
  }

  async restore(params) {
    const { state } = this;
    state.target = params.target || params.model || (this.models[0] ? this.models[0].id : PATTERN);
    if (state.target !== PATTERN && !this.models.some((one) => one.id === state.target)) state.target = this.models[0] ? this.models[0].id : PATTERN;
    state.expression = params.expression || "Causal() & Window(128, 0)";
    state.sizes = {};
    for (const name of Object.keys(SIZES)) if (Number(params[name]) > 0) state.sizes[name] = Math.round(Number(params[name]));
    state.devices = Math.max(1, Math.round(Number(params.devices) || 1));
    state.strategy = params.strategy || "fsdp";
    state.curve = CURVES.some(([name]) => name === params.curve) ? params.curve : "macs";
    this.known = null;
    await this.update();
  }

  changed() {
    const { state } = this;
    this.remember({ target: state.target, ...(state.target === PATTERN ? { expression: state.expression } : { expression: null }), ...Object.fromEntries(Object.keys(SIZES).map((name) => [name, state.sizes[name]])), devices: state.devices > 1 ? state.devices : null, strategy: state.devices > 1 ? state.strategy : null, curve: state.curve === "macs" ? null : state.curve });
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.update(), 200);
  }

  async update() {
    const { state } = this;
    this.showTarget();
    try {
      const what = state.target === PATTERN ? { expression: state.expression } : { model: state.target };
      const answer = await this.ask({ ...what, sizes: state.sizes, devices: state.devices, strategy: state.strategy, link_gbps: state.link_gbps });
      if (!answer) return;
      this.answer = answer;
      showError(this.error, null);
      this.showKnobs(answer.sizes || {});
      this.showNumbers();
    } catch (failure) {
      showError(this.error, failure);
    }
  }

  showTarget() {
    const { state } = this, key = `${state.target}`;
    if (this.shownTarget === key) return;
    this.shownTarget = key;
    const options = [...this.models.map((one) => [one.id, one.name]), [PATTERN, "an attention by its pattern"]];
    this.target.replaceChildren(select("of", options, state.target, (next) => { state.target = next; state.sizes = {}; this.known = null; this.changed(); }));
    if (state.target === PATTERN) this.target.append(html("input", { type: "text", class: "code", "aria-label": "pattern", spellcheck: "false", value: state.expression, on: { change: (event) => { state.expression = event.target.value; this.changed(); } } }));
  }

  showKnobs(sizes) {
    const { state } = this, key = JSON.stringify([state.target, Object.keys(sizes), state.devices > 1]);
    if (this.known === key) return;
    this.known = key;
    const log = (value) => Math.log2(value);
    const knobs = Object.entries(sizes).filter(([name]) => SIZES[name]).map(([name, given]) => {
      const spec = typeof given === "object" ? given : { value: given }, least = spec.least ?? SIZES[name][0], most = spec.most ?? SIZES[name][1];
      const value = Math.min(Math.max(state.sizes[name] ?? spec.value, least), most), round = (place, own) => [own, least, most].find((exact) => Math.abs(2 ** place - exact) < 0.5) ?? roundSize(2 ** place);
      return slider(NAMES[name], { least: log(least), most: log(most), step: "any", value: log(value), show: (place) => grouped(round(place, spec.value)) }, (place) => { state.sizes[name] = Math.min(Math.max(round(place, spec.value), least), most); this.changed(); });
    });
    knobs.push(slider("devices", { least: 0, most: 8, step: 1, value: log(state.devices), show: (place) => String(2 ** place) }, (place) => { state.devices = 2 ** place; this.changed(); }));
    if (state.devices > 1) knobs.push(select("strategy", [["ddp", "whole copies"], ["fsdp", "sharded"], ["tensor", "tensor parallel"], ["context", "context parallel"]], state.strategy, (next) => { state.strategy = next; this.changed(); }));
    this.knobs.replaceChildren(...knobs);
  }

  showNumbers() {
    const { answer, state } = this, names = ["parameters", "macs", "bytes", "activations"];
    this.formulas.replaceChildren(...Object.entries(answer.formulas || {}).flatMap(([name, text]) => [html("dt", {}, name === "macs" ? "multiply-adds" : name), html("dd", {}, html("code", {}, text))]));
    const shown = names.filter((name) => answer.parts.some((one) => one[name] !== undefined && one[name] !== null));
    this.parts.replaceChildren(table([["part"], ...shown.map((name) => [name === "macs" ? "multiply-adds" : name, "number"])], answer.parts.map((one) => [one.name || "all", ...shown.map((name) => (one[name] === null || one[name] === undefined ? "" : short(one[name])))])));
    const parallel = answer.parallel;
    this.parallel.replaceChildren(...(parallel ? [html("h3", {}, `One step on ${state.devices} devices`), html("dl", { class: "rg-facts" }, [["memory of a device", `${short(parallel.memory)}B`], ["computing", `${parallel.compute_ms.toPrecision(3)} ms`], ["waiting for the network", `${parallel.exposed_ms.toPrecision(3)} ms`],
      ...(parallel.collectives || []).map((one) => [one.name, `${short(one.bytes)}B`])].flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]))] : []));
    const curves = CURVES.filter(([name]) => answer.curves[name] && answer.curves[name].length);
    if (!curves.some(([name]) => name === state.curve) && curves.length) state.curve = curves[0][0];
    this.curves.replaceChildren(select("curve", curves, state.curve, (next) => { state.curve = next; this.changed(); }));
    if (curves.length) this.chart.show([{ name: "", points: answer.curves[state.curve] }], { x: "tokens", y: state.curve, logX: true, logY: true, mark: state.sizes.tokens ?? (answer.sizes && answer.sizes.tokens && (answer.sizes.tokens.value ?? answer.sizes.tokens)) });
  }
}
