// One side of Look: a model, an input, all its heads, and one head closely.
import { button, choice, html, select } from "/components/dom.js";
import { decode, percent, tokenText, topPlaces } from "/components/numbers.js";
import { latest, post, stream } from "./api.js";
import { HeadSource } from "./head_source.js";
import { dataToBlob, imageOf } from "./images.js";
import { InputForm, exampleFor } from "./look_input.js";
import { Prediction } from "./look_prediction.js";
import { headLines } from "./look_python.js";
import { card, progressBar, showError } from "./parts.js";
import "/components/image.js";
import "/components/lines.js";
import "/components/matrix.js";
import { formatNumber, nameNumber } from "/components/overview.js";
import "/components/tokens.js";

const WEIGHTINGS = [["weights", "weights"], ["value", "weighted by values"], ["output", "weighted by outputs"], ["rollout", "rollout over layers"]];
const INPUTS = ["text", "source", "target", "image"];
const NAMES = { self: "self-attention", encoder: "encoder", decoder: "decoder", cross: "decoder to encoder" };
const whole = (text, otherwise) => (text === undefined || text === null || text === "" || !Number.isInteger(Number(text)) ? otherwise : Number(text));

const readHeads = (heads) => heads.map((one) => ({ ...one, thumbnail: decode(one.thumbnail) }));

export class LookPanel {
  constructor(models, remember, name) {
    this.models = models;
    this.remember = remember;
    this.state = {};
    this.form = new InputForm(models, { choose: (id) => this.choose(id), look: (values) => { this.exampled = false; return this.run({ ...values, token: null, off: null }); } });
    this.error = html("div");
    this.progress = progressBar();
    this.overview = html("regard-overview");
    this.overviewCard = card("All heads", this.overview, { python: () => headLines(this, true) });
    this.views = { matrix: html("regard-matrix"), lines: html("regard-lines"), image: html("regard-image") };
    this.viewPlace = html("div", { class: "head-view" });
    this.headControls = html("div", { class: "rg-row" });
    this.tokens = html("regard-tokens", { "aria-label": "tokens of the input; the pinned one is the query" });
    this.keys = html("regard-tokens", { "aria-label": "keys" });
    this.strips = html("div", { class: "strips" });
    this.numbers = html("p", { class: "rg-status head-numbers" });
    this.headCard = card("Head", html("div", {}, this.numbers, this.headControls, this.viewPlace), { figureOf: () => this.views[this.view()], name: "attention", python: () => headLines(this) });
    this.tokenCard = card("Tokens", this.strips, { saves: false });
    this.prediction = new Prediction(this);
    this.results = html("div", { class: "results", hidden: true }, html("div", { class: "column" }, this.overviewCard), html("div", { class: "column" }, this.headCard, this.tokenCard, this.prediction.element));
    this.element = html("div", { class: "side", "aria-label": `${name} side`, role: "group" }, this.form.element, this.error, this.progress, this.results);
    this.openModel = latest((signal, id) => stream("/api/open", { model: id }, { each: (line) => this.progress.tell(line.progress), signal }));
    this.sendInput = latest((signal, values) => this.postInput(values, signal));
    this.loadOverview = latest((signal, body) => stream("/api/overview", body, { each: (line) => this.takeLayer(line), signal }));
    this.loadRow = latest((signal, source, token) => source.row(token, this.side(), signal));
    this.listen();
  }

  listen() {
    for (const figure of [...Object.values(this.views), this.tokens]) figure.addEventListener("pin", (event) => this.pin(event.detail));
    this.overview.addEventListener("head", (event) => this.showHead(event.detail));
    this.overview.addEventListener("order", (event) => this.note({ order: event.detail }));
    this.views.lines.addEventListener("filter", (event) => this.note({ least: event.detail }));
  }

  note(changes) {
    Object.assign(this.state, changes);
    for (const [name, value] of Object.entries(this.state)) if (value === null || value === undefined || value === "") delete this.state[name];
    this.remember();
  }

  async restore(params) {
    if (this.restored && JSON.stringify(params) === JSON.stringify(this.asParams())) return;
    this.restored = true;
    const known = this.models.find((one) => one.id === params.model) || this.models[0];
    if (!known) {
      showError(this.error, { parts: { title: "There is no model to look at.", instead: "regard lab FOLDER, a run of `regard train`, or module:object" } });
      return;
    }
    const given = INPUTS.some((name) => params[name]);
    this.exampled = !given;
    this.state = { ...params, model: known.id, ...(given || !known.kind ? {} : exampleFor(known)) };
    if (params.model && params.model !== known.id) showError(this.error, { parts: { title: "The address names a model that this lab does not have.", asked: params.model, instead: known.name } });
    this.form.show(known, this.state, null);
    // Without a word in the address nothing is loaded: the reader chooses first.
    if (params.model) await this.run({});
  }

  asParams() {
    return Object.fromEntries(Object.entries(this.state).map(([name, value]) => [name, String(value)]));
  }

  async choose(id) {
    const model = this.models.find((one) => one.id === id);
    const kept = model.kind === this.model().kind ? Object.fromEntries(INPUTS.filter((name) => this.state[name]).map((name) => [name, this.state[name]])) : {};
    this.stop();
    this.exampled = !Object.keys(kept).length;
    this.state = { model: id, ...(!model.kind ? {} : Object.keys(kept).length ? { ...kept, ...(/rxn/i.test(id) ? exampleFor(model) : {}) } : exampleFor(model)), ...(this.state.view ? { view: this.state.view } : {}) };
    this.form.show(model, this.state, null);
    await this.run({});
  }

  model() {
    return this.models.find((one) => one.id === this.state.model);
  }

  // Open the model, read the input, and show what there is to see.
  async run(changes) {
    Object.assign(this.state, changes);
    this.note({});
    showError(this.error, null);
    this.element.setAttribute("aria-busy", "true");
    try {
      if (!this.info || this.info.model !== this.state.model) {
        this.progress.tell({ label: "loading the model", done: 0, total: 0 });
        const info = await this.openModel(this.state.model);
        if (!info) return;
        this.info = info;
        const model = this.model();
        model.kind = info.kind;
        if (this.exampled || !INPUTS.some((name) => this.state[name])) Object.assign(this.state, exampleFor(model, info.image_size));
        this.exampled = false;
        this.form.show(model, this.state, info);
      }
      this.progress.tell({ label: "running the model", done: 0, total: 0 });
      const input = await this.sendInput(this.state);
      if (!input) return;
      await this.take(input);
    } catch (failure) {
      this.progress.tell(null);
      this.results.hidden = true;
      showError(this.error, failure);
    } finally {
      this.element.removeAttribute("aria-busy");
    }
  }

  postInput(state, signal) {
    const { model, text, source, target, image } = state;
    const { kind } = this.info;
    if (kind !== "image") return post("/api/input", kind === "translation" ? { model, source, target } : { model, text }, signal);
    const body = new FormData(), address = imageOf(image);
    body.append("model", model);
    if (address) body.append("image", dataToBlob(address), "image");
    return post("/api/input", body, signal);
  }

  async take(input) {
    this.input = input;
    this.results.hidden = false;
    const names = Object.keys(input.attentions);
    if (!names.includes(this.state.attention)) delete this.state.attention;
    if (input.cut) showError(this.error, { parts: { title: "The input was cut.", because: input.cut } });
    await this.showAttention();
    this.prediction.show();
  }

  async continueWith(result) {
    const text = this.text().queries;
    this.note({ text: result.text ?? this.state.text + (result.added ?? ""), token: null });
    this.form.show(this.model(), this.state, this.info);
    if (result.attentions) await this.take(result);
    else await this.run({});
    return text;
  }

  attention() {
    return this.state.attention || Object.keys(this.input.attentions)[0];
  }

  text() {
    return this.input.attentions[this.attention()];
  }

  // The overview and the chosen head come at the same time: the head does not wait for the others.
  async showAttention() {
    const input = this.input.input, attention = this.attention();
    const head = this.showHead({ layer: whole(this.state.layer, 0), head: whole(this.state.head, 0) });
    try {
      this.arriving = [];
      const answer = await this.loadOverview({ input, attention });
      if (!answer) return;
      this.progress.tell(null);
      this.layers = answer.layers.map(readHeads);
      this.markOverview();
      await head;
    } catch (failure) {
      this.progress.tell(null);
      showError(this.error, failure);
    }
  }

  // Layers appear as soon as they are computed, but no more often than the eye follows.
  takeLayer(line) {
    this.progress.tell(line.progress);
    if (line.heads === undefined) return;
    this.arriving[line.layer] = readHeads(line.heads);
    if (this.arriving.length > 1 && performance.now() - this.drawnAt < 150) return;
    this.drawnAt = performance.now();
    this.layers = this.arriving.slice();
    this.markOverview();
  }

  markOverview() {
    if (!this.layers) return;
    const attention = this.attention();
    const off = new Set(this.offList().filter(([name]) => name === attention).map(([, layer, head]) => `${layer}.${head}`));
    const own = this.layers[whole(this.state.layer, 0)]?.[whole(this.state.head, 0)];
    this.numbers.textContent = own && this.state.weighting !== "rollout" ? Object.entries(own.numbers).map(([name, value]) => `${nameNumber(name)} ${formatNumber(value)}`).join(" · ") : "";
    this.overview.show(this.layers, { chosen: { layer: whole(this.state.layer, 0), head: whole(this.state.head, 0) }, order: this.state.order || "", off });
  }

  // What can be shown of a head: not every model says how its values and outputs are made.
  weightings() {
    const { abilities } = this.info, needs = { value: "weighted", output: "output_weighted" };
    return WEIGHTINGS.filter(([name]) => (name === "rollout" ? this.attention() !== "cross" : !needs[name] || abilities.includes(needs[name])));
  }

  view() {
    const text = this.text(), rollout = this.state.weighting === "rollout";
    const views = [...(text.grid ? ["image"] : []), ...(rollout ? [] : ["matrix"]), "lines"];
    return views.includes(this.state.view) ? this.state.view : views[0];
  }

  async showHead({ layer, head }) {
    const attention = this.attention(), shapes = this.info.attentions.find((one) => one.name === attention);
    const counts = shapes ? shapes.heads : [1];
    layer = Math.min(Math.max(layer, 0), counts.length - 1);
    head = Math.min(Math.max(head, 0), counts[layer] - 1);
    this.note({ layer, head });
    const able = this.weightings(), weighting = this.state.weighting || "weights";
    this.source = new HeadSource(this.input.input, attention, this.text(), { layer, head, weighting: able.some(([name]) => name === weighting) ? weighting : "weights" });
    this.showControls(counts, able);
    this.markOverview();
    const queries = this.source.queries.length;
    if (this.state.token !== undefined && whole(this.state.token, -1) >= queries) this.note({ token: null });
    if (this.state.token === undefined && (queries > 64 || this.text().grid || weighting === "rollout")) this.state.token = this.text().causal || !this.text().grid ? queries - 1 : Math.min(queries - 1, this.source.start + Math.floor(queries / 2));
    await this.pin(whole(this.state.token, null), true);
  }

  showControls(counts, able) {
    const { state } = this, attention = this.attention(), view = this.view(), names = Object.keys(this.input.attentions);
    const again = (changes) => { this.note(changes); return this.showHead({ layer: whole(state.layer, 0), head: whole(state.head, 0) }); };
    const isOff = this.offList().some(([name, layer, head]) => name === attention && layer === state.layer && head === state.head);
    const sided = attention !== "cross" && state.weighting !== "rollout";
    const views = [["matrix", "matrix"], ["lines", "lines"], ["image", "image"]].filter(([name]) => (name !== "image" || this.text().grid) && (name !== "matrix" || state.weighting !== "rollout"));
    const focused = document.activeElement && this.headControls.contains(document.activeElement) ? document.activeElement.dataset.value || document.activeElement.dataset.role : null;
    this.headControls.replaceChildren(...[
      choice("view", views, view, (next) => again({ view: next })),
      names.length > 1 ? select("attention", names.map((name) => [name, NAMES[name] || name]), attention, (next) => { this.note({ attention: next, token: null }); this.layers = null; this.showAttention(); }) : null,
      select("layer", counts.map((_, place) => [place, place]), state.layer, (next) => again({ layer: Number(next) })),
      select("head", Array.from({ length: counts[state.layer] }, (_, place) => [place, place]), state.head, (next) => again({ head: Number(next) })),
      select("show", able, state.weighting || "weights", (next) => again({ weighting: next === "weights" ? null : next })),
      sided ? select("pinned token", [["query", "attends to"], ["key", "is attended by"]], this.side(), (next) => again({ side: next === "query" ? null : next })) : null,
      this.info.abilities.includes("switch_off") && this.prediction.able() ? button(isOff ? "Switch on" : "Switch off", () => this.toggleHead(attention, state.layer, state.head), { "aria-pressed": String(isOff), "data-role": "switch", title: "See what the model predicts without this head" }) : null,
    ].filter(Boolean));
    if (focused) {
      const next = this.headControls.querySelector(`[data-value="${focused}"], [data-role="${focused}"]`);
      if (next) next.focus();
    }
    this.headCard.heading.textContent = state.weighting === "rollout" ? "Rollout over all layers" : `Layer ${state.layer}, head ${state.head}`;
    this.viewPlace.replaceChildren(this.views[view]);
    const crossed = attention === "cross";
    this.tokenCard.hidden = Boolean(this.text().grid);
    if (crossed !== this.crossed || !this.strips.childElementCount) {
      this.crossed = crossed;
      this.strips.replaceChildren(...(crossed ? [html("h3", {}, "target"), this.tokens, html("h3", {}, "source"), this.keys] : [this.tokens]), this.top = html("p", { class: "rg-status", "aria-live": "polite" }));
    }
  }

  // Whether the pinned token is the query (its row) or the key (its column).
  side() {
    const own = this.attention() !== "cross" && this.state.weighting !== "rollout";
    return own && this.state.side === "key" ? "key" : "query";
  }

  // The pinned query: its row is fetched, and every figure shows it.
  async pin(token, fresh = false) {
    if (!fresh) this.note({ token });
    const source = this.source;
    const early = performance.now();
    this.showPinned(source, token, null, true);
    try {
      const row = token === null ? null : await this.loadRow(source, token);
      if (row === undefined || source !== this.source) return;
      this.showPinned(source, token, row, false);
      this.pinTime = performance.now() - early;
      if (!fresh && this.info.abilities.includes("mlm")) this.prediction.show();
    } catch (failure) {
      showError(this.error, failure);
    }
  }

  showPinned(source, token, row, waiting) {
    const view = this.view(), figure = this.views[view];
    if (view === "matrix") figure.show(source, { pinned: token });
    if (waiting && token !== null) {
      // The next key press starts from here, whether or not the weights have come.
      figure.pinned = token;
      if (this.tokens.tokens === source.queries) this.tokens.mark(token);
      return;
    }
    if (view === "lines") {
      if (this.state.least !== undefined) figure.setLeast(Number(this.state.least));
      figure.show(source, { pinned: token, row, side: this.side() });
    } else if (view === "image") figure.show(source, { image: this.input.image, pinned: token, row });
    const crossed = this.attention() === "cross";
    this.tokens.show(source.queries, { weights: crossed ? null : row, pinned: token });
    if (crossed) this.keys.show(source.keys, { weights: row, pinned: null });
    this.top.textContent = row ? `“${tokenText(source.queries[token])}” ${this.side() === "key" ? "is attended by" : "attends to"} ${topPlaces(row, 5).map((place) => `“${tokenText((this.side() === "key" ? source.queries : source.keys)[place])}” ${percent(row[place])}`).join(", ")}` : "Choose a token to pin it; arrow keys move it.";
    this.element.toggleAttribute("data-pinned", token !== null);
  }

  // Heads that are switched off, as [attention, layer, head].
  offList() {
    return (this.state.off || "").split(",").filter(Boolean).map((one) => one.split(".")).map(([name, layer, head]) => [name, Number(layer), Number(head)]);
  }

  setOff(list) {
    this.note({ off: list.map((one) => one.join(".")).join(",") });
    this.markOverview();
    this.showControls(this.info.attentions.find((one) => one.name === this.attention()).heads, this.weightings());
    return this.prediction.show();
  }

  toggleHead(attention, layer, head) {
    const name = [attention, layer, head].join("."), off = this.offList().filter((one) => one.join(".") !== name);
    return this.setOff(off.length === this.offList().length ? [...off, [attention, layer, head]] : off);
  }

  stop() {
    for (const work of [this.openModel, this.sendInput, this.loadOverview, this.loadRow, this.prediction]) work.stop();
    this.progress.tell(null);
  }
}
