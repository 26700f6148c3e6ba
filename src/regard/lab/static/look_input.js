// What a model is given: a text, an image, or both sides of a translation.
import { button, html, select } from "/components/dom.js";
import { SAMPLES, drawSample, imageOf, shrinkImage } from "./images.js";

export const EXAMPLES = {
  encoder: "The quick brown fox jumps over the lazy dog, while the old dog dreams of a fox that it once knew.",
  decoder: "Once upon a time, there was a little girl named Lily. She loved to play outside. One day, Lily",
  translation: ["In the beginning God created the heaven and the earth.", "Am Anfang schuf Gott Himmel und Erde."],
  reactions: "CC(=O)O.OCC>>CC(=O)OCC.O",
};

// Small images are digits more often than photographs.
export function exampleFor(model, size = null) {
  if (model.example) return Array.isArray(model.example) ? { source: model.example[0], target: model.example[1] } : { text: model.example };
  if (model.kind === "translation") return { source: EXAMPLES.translation[0], target: EXAMPLES.translation[1] };
  if (model.kind === "image") return { image: size && Math.max(...[size].flat()) <= 32 ? "digit" : "shapes" };
  if (/rxn/i.test(`${model.id} ${model.name}`)) return { text: EXAMPLES.reactions };
  return { text: EXAMPLES[model.kind] || EXAMPLES.encoder };
}

export class InputForm {
  // `look(values)` is called with {text}, {source, target} or {image}.
  constructor(models, { choose, look }) {
    this.models = models;
    this.look = look;
    this.choose = choose;
    this.fields = html("div", { class: "fields" });
    this.go = html("button", { type: "submit", class: "primary" }, "Look");
    this.info = html("span", { class: "rg-faint" });
    this.models_place = html("div", { class: "rg-row" });
    this.element = html("form", { class: "input", on: { submit: (event) => { event.preventDefault(); this.submit(); } } },
      this.models_place, this.fields, html("div", { class: "rg-row" }, this.go, this.info));
  }

  show(model, values, info) {
    const options = this.models.map((one) => [one.id, one.real_weights === false ? `${one.name} (random weights)` : one.name]);
    this.models_place.replaceChildren(select("model", options, model.id, (id) => this.choose(id)), html("span", { class: "kind" }, model.kind || "not loaded yet"));
    this.kind = model.kind;
    this.image_size = info && info.image_size;
    this.info.textContent = info && info.max_tokens ? `up to ${info.max_tokens.toLocaleString("en-US")} tokens` : "";
    if (!model.kind) this.fields.replaceChildren(html("p", { class: "rg-faint" }, "The model is loaded when you look; then its input can be typed here."));
    else if (model.kind === "image") this.showImage(values.image);
    else if (model.kind === "translation") this.fields.replaceChildren(this.area("source", values.source, "source"), this.area("target", values.target, "target, or its beginning"));
    else this.fields.replaceChildren(this.area("text", values.text, "text"));
  }

  area(name, value, label) {
    const field = html("textarea", { name, rows: 3, spellcheck: "false", value: value || "", on: { keydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.submit();
    } } });
    return html("label", { class: "area" }, html("span", {}, label), field);
  }

  showImage(text) {
    this.image = text;
    const file = html("input", { type: "file", accept: "image/*", "aria-label": "image file", on: { change: () => this.take(file.files[0]) } });
    const preview = html("img", { alt: "the chosen image", src: imageOf(text) || "" });
    const drop = html("label", { class: "drop" }, preview, html("span", {}, "Drop an image here, or choose a file"), file);
    drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      this.take(event.dataTransfer.files[0]);
    });
    const samples = Object.keys(SAMPLES).map((name) => html("button", { type: "button", class: "sample", "aria-label": `drawn example: ${name}`, "aria-pressed": String(name === text), on: { click: () => { this.showImage(name); this.submit(); } } }, html("img", { alt: "", src: drawSample(name, 64) })));
    this.fields.replaceChildren(drop, html("div", { class: "rg-row", role: "group", "aria-label": "drawn examples" }, samples));
  }

  async take(file) {
    if (!file) return;
    try {
      this.showImage(await shrinkImage(file, this.image_size));
      this.submit();
    } catch {
      this.info.textContent = `${file.name} is no image that this browser reads`;
    }
  }

  values() {
    if (this.kind === "image") return { image: this.image };
    return Object.fromEntries(Array.from(this.fields.querySelectorAll("textarea"), (field) => [field.name, field.value]));
  }

  submit() {
    this.look(this.values());
  }
}
