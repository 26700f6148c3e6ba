// <regard-player>: heads that move over training: a slider through the epochs, and a button that plays them.
import { button, define, html, readData, svg } from "./dom.js";

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const COLORS = 9;
// Shares of the width of a panel, as in the pages that Python draws.
const DOT = 0.034, LETTER = 0.047, THIN = 0.0035;
const between = (a, b, t) => a + (b - a) * t;
// Angles of an ellipse repeat after half a turn: go the short way.
const turned = (a, b, t) => a + ((((b - a + 90) % 180) + 180) % 180 - 90) * t;
// The long axis lies along the columns before it is turned.
const oval = (long, short) => `M${-long} 0A${long} ${short} 0 1 0 ${long} 0A${long} ${short} 0 1 0 ${-long} 0Z`;

// A layer's panel as Python draws it: the lattice of pixels, a head each, the query.
function drawPanel(frames, [down, across]) {
  const wide = 2 * across, last = frames[frames.length - 1];
  const lines = (most) => Array.from({ length: Math.floor(most) + Math.ceil(most) }, (_, place) => place - Math.floor(most) + 0.5);
  const lattice = lines(down).map((row) => `M${-across} ${row}H${across}`).concat(lines(across).map((column) => `M${column} ${-down}V${down}`)).join("");
  const order = last.map((_, head) => head).sort((a, b) => last[a].fill - last[b].fill);
  return svg("svg", { viewBox: `${-across} ${-down} ${wide} ${2 * down}`, role: "img", "aria-label": `${last.length} heads by position` },
    svg("path", { class: "lattice", "stroke-width": THIN * wide / 2, d: lattice }),
    order.map((head) => svg("g", { class: "head", "data-head": head, style: { color: `var(--h${head % COLORS})` } },
      svg("path", { class: "half" }), svg("path", { class: "most", "stroke-width": THIN * wide }), svg("polyline", { class: "trail", "stroke-width": 2 * THIN * wide }),
      svg("g", { class: "dot" }, svg("circle", { r: DOT * wide, "stroke-width": THIN * wide }), svg("text", { "font-size": LETTER * wide }, String(head))))),
    svg("rect", { class: "query", x: -0.5, y: -0.5, width: 1, height: 1, "stroke-width": 2 * THIN * wide }));
}

class Player extends HTMLElement {
  connectedCallback() {
    const data = readData(this);
    if (data && !this.data) this.setUp(data);
  }

  disconnectedCallback() {
    this.playing = false;
  }

  // {labels, layers: [frame: [head: {at, half, most, fill}]], titles, reach}: panels are drawn where the page has none.
  show(data) {
    this.classList.add("player");
    this.playing = false;
    const panels = data.layers.map((frames, layer) => html("div", {}, html("h3", {}, data.titles[layer]), drawPanel(frames, data.reach)));
    this.replaceChildren(html("div", { class: "panels" }, panels), html("div", { class: "row rg-row" }, button("Play", () => {}), html("input", { type: "range", min: 0, max: data.labels.length - 1, step: 1, "aria-label": "epoch" }), html("output")));
    this.setUp(data);
  }

  setUp(data) {
    this.data = data;
    this.slider = this.querySelector("input");
    this.button = this.querySelector("button");
    this.told = this.querySelector("output");
    this.last = data.labels.length - 1;
    this.heads = Array.from(this.querySelectorAll("svg")).flatMap((drawing, layer) => Array.from(drawing.querySelectorAll(".head"), (group) => ({
      frames: data.layers[layer].map((frame) => frame[Number(group.dataset.head)]), trail: group.querySelector(".trail"),
      half: group.querySelector(".half"), most: group.querySelector(".most"), dot: group.querySelector(".dot"),
    })));
    this.time = this.last;
    this.playing = false;
    this.button.addEventListener("click", () => (this.playing ? this.stop() : this.play()));
    this.slider.addEventListener("input", () => {
      this.stop();
      this.time = Number(this.slider.value);
      this.draw();
    });
    this.draw();
    if (!calm.matches && this.closest("[data-eager]")) this.playInView();
  }

  draw() {
    const frame = Math.min(Math.floor(this.time), this.last), next = Math.min(frame + 1, this.last), part = this.time - frame;
    for (const one of this.heads) {
      const a = one.frames[frame], b = one.frames[next];
      const row = between(a.at[0], b.at[0], part), column = between(a.at[1], b.at[1], part);
      one.dot.setAttribute("transform", `translate(${column} ${row})`);
      const path = one.frames.slice(0, frame + 1).map((each) => `${each.at[1]},${each.at[0]}`);
      one.trail.setAttribute("points", path.concat(`${column},${row}`).join(" "));
      one.half.setAttribute("fill-opacity", between(a.fill, b.fill, part));
      for (const name of ["half", "most"]) this.drawContour(one[name], a[name], b[name], part);
    }
    this.slider.value = String(Math.round(this.time));
    this.told.textContent = this.data.labels[Math.round(this.time)];
    this.slider.setAttribute("aria-valuetext", this.told.textContent);
  }

  // Ellipses turn into one another; the outlines of pixels change halfway.
  drawContour(element, here, there, part) {
    if (typeof here !== "string" && typeof there !== "string") {
      const [r, c, long, short, angle] = here.map((value, k) => (k === 4 ? turned : between)(value, there[k], part));
      element.setAttribute("transform", `translate(${c} ${r}) rotate(${angle})`);
      element.setAttribute("d", oval(long, short));
      return;
    }
    const shape = part < 0.5 ? here : there;
    if (typeof shape === "string") {
      element.removeAttribute("transform");
      element.setAttribute("d", shape);
    } else {
      element.setAttribute("transform", `translate(${shape[1]} ${shape[0]}) rotate(${shape[4]})`);
      element.setAttribute("d", oval(shape[2], shape[3]));
    }
  }

  step(now) {
    if (!this.playing) return;
    if (this.before !== null) this.time = Math.min(this.time + Math.min((now - this.before) / 1000, 0.1) * Math.max(this.last / 7, 2), this.last);
    this.before = now;
    this.draw();
    if (this.time >= this.last) this.stop();
    else requestAnimationFrame((next) => this.step(next));
  }

  leap() { // without motion: epoch by epoch, unhurried
    if (!this.playing) return;
    this.time = Math.min(Math.floor(this.time) + 1, this.last);
    this.draw();
    if (this.time >= this.last) this.stop();
    else setTimeout(() => this.leap(), 600);
  }

  play() {
    if (this.time >= this.last) this.time = 0;
    this.playing = true;
    this.before = null;
    this.button.textContent = "Pause";
    if (calm.matches) this.leap();
    else requestAnimationFrame((now) => this.step(now));
  }

  stop() {
    this.playing = false;
    this.button.textContent = "Play";
  }

  playInView() {
    const watcher = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      if (!this.playing && this.time === this.last) this.play();
    }, { threshold: 0.5 });
    watcher.observe(this);
  }
}

define("regard-player", Player);
