// Elements, always built from text and attributes: data never becomes markup.
// The name of SVG's elements, as the browser itself knows it.
const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function html(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Each name once, also where a page holds several scripts.
export function define(name, element) {
  if (!customElements.get(name)) customElements.define(name, element);
}

// The JSON inside a component of a saved page.
export function readData(element) {
  const script = element.querySelector(':scope > script[type="application/json"]');
  return script ? JSON.parse(script.textContent) : null;
}

let ids = 0;
export function newId(word) {
  ids += 1;
  return `rg-${word}-${ids}`;
}

// A labelled select; `options` are [value, text].
export function select(label, options, chosen, act) {
  const control = html("select", { on: { change: () => act(control.value) } },
    options.map(([value, text]) => html("option", { value, selected: String(value) === String(chosen) }, text)));
  return html("label", { class: "rg-field" }, html("span", {}, label), control);
}

// A labelled slider with its value beside it.
export function slider(label, { least, most, step, value, show }, act) {
  const told = html("output", {}, show ? show(value) : String(value));
  const control = html("input", { type: "range", min: least, max: most, step, value, "aria-label": label });
  const tell = () => {
    told.textContent = show ? show(Number(control.value)) : control.value;
    control.setAttribute("aria-valuetext", told.textContent);
  };
  control.addEventListener("input", () => { tell(); act(Number(control.value)); });
  tell();
  const field = html("label", { class: "rg-slider" }, html("span", {}, label), control, told);
  field.set = (next) => { control.value = String(next); tell(); };
  return field;
}

export function button(text, act, attributes) {
  return html("button", { type: "button", on: { click: act }, ...attributes }, text);
}

// One of several, as buttons of which one is pressed; arrow keys go along.
export function choice(label, options, chosen, act) {
  const group = html("div", { class: "rg-choice", role: "radiogroup", "aria-label": label });
  const mark = (value) => Array.from(group.children).forEach((one) => {
    const on = one.dataset.value === String(value);
    one.setAttribute("aria-checked", String(on));
    one.tabIndex = on ? 0 : -1;
  });
  const take = (value) => { mark(value); act(value); };
  group.append(...options.map(([value, text]) =>
    html("button", { type: "button", role: "radio", "data-value": value, on: { click: () => take(value) } }, text)));
  group.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = Array.from(group.children), place = all.indexOf(event.target);
    const next = all[(place + step + all.length) % all.length];
    next.focus(); // first: what is chosen may draw this group anew, and looks where the focus is
    take(next.dataset.value);
  });
  mark(chosen);
  group.mark = mark;
  return group;
}
