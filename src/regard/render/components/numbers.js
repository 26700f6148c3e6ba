// Arrays as they travel, and numbers as they are read.
const KINDS = { uint8: Uint8Array, float32: Float32Array };

export function decode(array) {
  const raw = Uint8Array.from(atob(array.data), (letter) => letter.charCodeAt(0));
  const values = array.dtype === "uint8" ? raw : new KINDS[array.dtype](raw.buffer);
  return { shape: array.shape, values };
}

export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const number = 100 * share;
  return `${number >= 10 ? number.toFixed(0) : number >= 0.1 || number === 0 ? number.toFixed(1) : number >= 0.01 ? number.toFixed(2) : "< 0.01"} %`;
}

const UNITS = ["", " k", " M", " G", " T", " P"];

export function short(number) {
  if (!Number.isFinite(number)) return String(number);
  let size = Math.abs(number), unit = 0;
  while (size >= 999.5 && unit < UNITS.length - 1) { size /= 1000; unit += 1; }
  const text = unit === 0 && Number.isInteger(number) ? String(size)
    : size >= 99.5 ? size.toFixed(0) : size >= 9.95 ? size.toFixed(1) : size === 0 ? "0" : size >= 0.01 ? size.toFixed(2) : size.toExponential(1);
  return (number < 0 ? "−" : "") + text + UNITS[unit];
}

export function grouped(number) {
  return Number.isFinite(number) ? Math.round(number).toLocaleString("en-US") : String(number);
}

// What a token looks like on paper: line ends and lone spaces are visible, the space before a word only where `exact`.
export function tokenText(token, exact = false) {
  const text = token.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  if (text.trim() === "") return "␣".repeat(Math.max(text.length, 1));
  return text.replace(/^ /, exact ? "␣" : "");
}

export function largest(values) {
  let most = 0;
  for (let place = 0; place < values.length; place++) if (values[place] > most) most = values[place];
  return most;
}

// The places of the `count` largest values, the largest first, without sorting all of them.
export function topPlaces(values, count) {
  const found = [];
  for (let place = 0; place < values.length; place++) {
    if (found.length === count && values[place] <= values[found[count - 1]]) continue;
    let at = found.length;
    while (at > 0 && values[found[at - 1]] < values[place]) at -= 1;
    found.splice(at, 0, place);
    if (found.length > count) found.pop();
  }
  return found;
}
