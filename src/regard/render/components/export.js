// Figures as files: an SVG of its own without style sheets, and a PNG of it.
import { button, html, svg } from "./dom.js";

const COPIED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "letter-spacing"];

// A drawing of the page with the styles that it has there written into it.
export function standaloneSVG(drawing) {
  const copy = drawing.cloneNode(true);
  const [from, to] = [drawing, copy].map((root) => [root, ...root.querySelectorAll("*")]);
  from.forEach((node, place) => {
    const style = getComputedStyle(node);
    for (const name of COPIED) {
      const value = style.getPropertyValue(name);
      if (value && value !== "none" || name === "fill" || name === "stroke") to[place].setAttribute(name, value);
    }
    to[place].removeAttribute("class");
    to[place].removeAttribute("style");
    to[place].removeAttribute("tabindex");
  });
  copy.querySelectorAll("[data-screen]").forEach((node) => node.remove());
  const box = drawing.viewBox.baseVal, area = drawing.getBoundingClientRect();
  const width = box && box.width || area.width, height = box && box.height || area.height;
  return wrapSVG(copy.childNodes, box && box.width ? [box.x, box.y, width, height] : [0, 0, width, height]);
}

// Nodes as a whole file, on the paper of the page.
export function wrapSVG(nodes, [left, top, width, height]) {
  const root = svg("svg", { viewBox: `${left} ${top} ${width} ${height}`, width, height, "font-family": "system-ui, 'DejaVu Sans', sans-serif" });
  const paper = svg("rect", { x: left, y: top, width, height, fill: getComputedStyle(document.documentElement).getPropertyValue("--card").trim() || "#fff" });
  root.append(paper, ...nodes);
  return new XMLSerializer().serializeToString(root);
}

export async function toPNG(text, scale = 2) {
  const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  try {
    const picture = new Image();
    picture.src = address;
    await picture.decode();
    const canvas = html("canvas", { width: Math.ceil(picture.width * scale), height: Math.ceil(picture.height * scale) });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    return await new Promise((done) => canvas.toBlob(done, "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

export function download(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = html("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// Copies where the browser allows it; otherwise shows the text, selected, to be copied by hand.
export async function copyText(text, near) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = html("textarea", { class: "rg-copy", readonly: true, rows: Math.min(text.split("\n").length, 12), "aria-label": "lines to copy" }, text);
    near.after(box);
    box.focus();
    box.select();
    box.addEventListener("blur", () => box.remove());
    return false;
  }
}

// The buttons of a figure. `figure.toSVG()` is its drawing, `figure.pythonLines()` what makes it, or empty.
export function exportBar(figure, name) {
  const told = html("span", { class: "rg-told", role: "status" });
  const tell = (text) => {
    told.textContent = text;
    setTimeout(() => { if (told.textContent === text) told.textContent = ""; }, 2500);
  };
  const bar = html("div", { class: "rg-export", role: "group", "aria-label": `save ${name}` });
  bar.append(
    button("SVG", () => download(new Blob([figure.toSVG()], { type: "image/svg+xml" }), `${name}.svg`), { title: "Save as a vector drawing" }),
    button("PNG", async () => download(await toPNG(figure.toSVG()), `${name}.png`), { title: "Save as a picture" }));
  if (figure.pythonLines) {
    bar.append(button("Copy as Python", async () => {
      tell(await copyText(figure.pythonLines(), bar) ? "copied" : "press Ctrl+C");
    }, { title: "The lines that reproduce this view" }));
  }
  bar.append(told);
  return bar;
}
