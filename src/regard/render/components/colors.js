// Colors come from the page's style sheet, so that light, dark and print are one palette.
import { html } from "./dom.js";

const watchers = new Set();

export function variable(name, element) {
  return getComputedStyle(element || document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function rgb(text) {
  const probe = html("span", { style: { color: text } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return found;
}

// 256 colors from paper to the color of weights, four bytes each; steeper where weights are small.
let ramp = null;
export function weightRamp() {
  if (ramp) return ramp;
  const from = rgb("var(--card)"), to = rgb("rgb(var(--weight))");
  ramp = new Uint8ClampedArray(1024);
  for (let step = 0; step < 256; step++) {
    const share = Math.pow(step / 255, 0.7);
    for (let part = 0; part < 3; part++) ramp[4 * step + part] = from[part] + (to[part] - from[part]) * share;
    ramp[4 * step + 3] = 255;
  }
  return ramp;
}

export function rampColor(share) {
  const colors = weightRamp(), step = 4 * Math.round(255 * Math.min(Math.max(share, 0), 1));
  return `rgb(${colors[step]}, ${colors[step + 1]}, ${colors[step + 2]})`;
}

// Ink that is legible on the color of a weight.
export function inkOn(share) {
  const colors = weightRamp(), step = 4 * Math.round(255 * Math.min(Math.max(share, 0), 1));
  const light = 0.299 * colors[step] + 0.587 * colors[step + 1] + 0.114 * colors[step + 2];
  return light > 140 ? "#14161a" : "#ffffff";
}

// A picture of values from 0 to `most`, one pixel each.
export function paint(canvas, values, rows, columns, most) {
  canvas.width = columns;
  canvas.height = rows;
  const picture = new ImageData(columns, rows), colors = weightRamp(), scale = most > 0 ? 255 / most : 0;
  for (let place = 0; place < rows * columns; place++) {
    const step = 4 * Math.min(255, Math.max(0, Math.round(values[place] * scale)));
    picture.data.set(colors.subarray(step, step + 4), 4 * place);
  }
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

// Call `act` when the palette changes, until the element leaves the page.
export function onPalette(element, act) {
  watchers.add({ element, act });
}

export function paletteChanged() {
  ramp = null;
  for (const watcher of watchers) {
    if (watcher.element.isConnected) watcher.act();
    else watchers.delete(watcher);
  }
}

export function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  paletteChanged();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paletteChanged);
