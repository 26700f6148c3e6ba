// <regard-explorer>: choose an image, a model, a layer and a pixel, and see where every head attends from there.
import { define, html, readData } from "./dom.js";
import { onPalette } from "./colors.js";

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

function setUp(root) {
  const data = readData(root);
  const [rows, columns] = data.size;
  for (const model of data.models) {
    model.weights = bytes(model.weights);
    model.largest = bytes(model.largest);
  }
  const find = (name) => root.querySelector(`[data-${name}]`);
  const board = find("board"), views = find("views"), status = find("status"), tabs = find("layers"), classToken = find("class-token");
  const state = { image: 0, model: 0, layer: 0, row: Math.floor(rows / 2), column: Math.floor(columns / 2), first: false };

  const model = () => data.models[state.model];
  function token() {
    const { grid, first } = model();
    if (state.first) return 0;
    return first + Math.floor(state.row * grid[0] / rows) * grid[1] + Math.floor(state.column * grid[1] / columns);
  }
  function box(grid) {
    const row = Math.floor(state.row * grid[0] / rows), column = Math.floor(state.column * grid[1] / columns);
    return [row * rows / grid[0], column * columns / grid[1], rows / grid[0], columns / grid[1]];
  }

  function pressed(buttons, chosen, word) {
    buttons.forEach(function (button, index) {
      button.setAttribute(word, String(index === chosen));
      if (word === "aria-selected") button.tabIndex = index === chosen ? 0 : -1;
    });
  }

  function build() { // the views of a model: one for each head
    const one = model();
    state.layer = Math.min(state.layer, one.layers.length - 1);
    tabs.replaceChildren(...one.layers.map(function (name, index) {
      return html("button", { type: "button", role: "tab", "aria-controls": views.id, on: { click: () => { state.layer = index; draw(); } } }, name);
    }));
    views.replaceChildren(...Array.from({ length: one.heads }, function (_, head) {
      const frame = html("div", { style: { "aspect-ratio": `${columns} / ${rows}` } }, html("img", { class: "pixels inked", alt: "" }), html("canvas", { class: "pixels", width: one.grid[1], height: one.grid[0] }), html("i"));
      const view = html("figure", { class: "view" }, frame, html("figcaption"));
      return view;
    }));
    classToken.hidden = one.first === 0;
    if (one.first === 0) state.first = false;
    draw();
  }

  function draw() {
    const one = model(), [down, across] = one.grid, keys = one.first + down * across;
    const colour = getComputedStyle(root).getPropertyValue("--weight").split(",").map(Number);
    const image = data.images[state.image];
    const chosen = token();
    const [top, left, high, wide] = box(one.grid);
    board.querySelector("image").setAttribute("href", image.picture);
    const cursor = board.querySelector("rect");
    cursor.setAttribute("visibility", state.first ? "hidden" : "visible");
    for (const [name, value] of [["x", left], ["y", top], ["width", wide], ["height", high]]) cursor.setAttribute(name, value);
    Array.from(views.children).forEach(function (view, head) {
      const canvas = view.querySelector("canvas"), mark = view.querySelector("i");
      view.querySelector("img").src = image.picture;
      const place = (((one.shared ? 0 : state.image) * one.layers.length + state.layer) * one.heads + head) * keys + chosen;
      const paint = new ImageData(across, down);
      for (let cell = 0; cell < down * across; cell++) {
        paint.data.set(colour, 4 * cell);
        paint.data[4 * cell + 3] = 0.92 * one.weights[place * keys + one.first + cell];
      }
      canvas.getContext("2d", { willReadFrequently: true }).putImageData(paint, 0, 0);
      const most = Math.round(one.largest[place] / 2.55);
      view.querySelector("figcaption").textContent = `head ${head} · ${most} %`;
      mark.hidden = state.first;
      Object.assign(mark.style, { top: `${100 * top / rows}%`, left: `${100 * left / columns}%`,
        height: `${100 * high / rows}%`, width: `${100 * wide / columns}%` });
    });
    pressed(Array.from(tabs.children), state.layer, "aria-selected");
    pressed(Array.from(find("images").children), state.image, "aria-pressed");
    pressed(Array.from(find("models").children), state.model, "aria-pressed");
    classToken.setAttribute("aria-pressed", String(state.first));
    const query = state.first ? "the class token" : `row ${state.row}, column ${state.column}`;
    status.textContent = `Attention of ${query} of ${image.name}. ${one.captions[state.image]}`;
  }

  function point(event) {
    const area = board.getBoundingClientRect();
    const row = Math.floor((event.clientY - area.top) / area.height * rows);
    const column = Math.floor((event.clientX - area.left) / area.width * columns);
    if (row < 0 || column < 0 || row >= rows || column >= columns) return;
    Object.assign(state, { row, column, first: false });
    draw();
  }
  board.addEventListener("pointerdown", point);
  board.addEventListener("pointermove", function (event) {
    if (event.pointerType === "mouse" || event.buttons) point(event);
  });
  board.addEventListener("keydown", function (event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    state.row = Math.min(Math.max(state.row + step[0], 0), rows - 1);
    state.column = Math.min(Math.max(state.column + step[1], 0), columns - 1);
    state.first = false;
    draw();
  });
  tabs.addEventListener("keydown", function (event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    state.layer = (state.layer + step + tabs.children.length) % tabs.children.length;
    draw();
    tabs.children[state.layer].focus();
  });
  Array.from(find("images").children).forEach(function (button, index) {
    button.addEventListener("click", function () { state.image = index; draw(); });
  });
  Array.from(find("models").children).forEach(function (button, index) {
    button.addEventListener("click", function () { state.model = index; build(); });
  });
  classToken.addEventListener("click", function () { state.first = !state.first; draw(); });
  onPalette(root, draw);
  build();
}

class Explorer extends HTMLElement {
  connectedCallback() {
    if (this.ready) return;
    this.ready = true;
    setUp(this);
  }
}

define("regard-explorer", Explorer);
