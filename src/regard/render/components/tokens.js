// <regard-tokens>: a text as tokens, shaded by weight; one is pinned. Lines of tokens exist only while they are in view.
import { define, html, newId } from "./dom.js";
import { inkOn, onPalette, rampColor } from "./colors.js";
import { largest, percent, tokenText } from "./numbers.js";

const LINE = 32, GAP = 4, PADDING = 8;

class Tokens extends HTMLElement {
  constructor() {
    super();
    this.tokens = [];
    this.weights = null;
    this.pinned = null;
    this.places = [];
    this.lines = [];
    this.drawn = new Map();
  }

  connectedCallback() {
    if (this.stage) return;
    this.stage = html("div", { class: "rg-stage" });
    this.tabIndex = 0;
    this.setAttribute("role", "listbox");
    if (!this.hasAttribute("aria-label")) this.setAttribute("aria-label", "tokens");
    this.ids = newId("token");
    this.append(this.stage);
    this.addEventListener("scroll", () => this.drawLines());
    this.addEventListener("keydown", (event) => this.onKey(event));
    this.stage.addEventListener("click", (event) => {
      const token = event.target.closest("[data-token]");
      if (token) this.choose(Number(token.dataset.token));
    });
    new ResizeObserver(() => this.layOut()).observe(this);
    onPalette(this, () => this.redraw());
  }

  show(tokens, { weights = null, pinned = null } = {}) {
    const same = tokens === this.tokens;
    this.tokens = tokens;
    this.weights = weights;
    this.pinned = pinned;
    if (same) this.redraw();
    else this.layOut();
  }

  // The pinned token at once; its weights come with the next `show`.
  mark(place) {
    this.pinned = place;
    for (const node of this.stage.querySelectorAll("[data-token]")) node.setAttribute("aria-selected", String(Number(node.dataset.token) === place));
    this.describeActive();
  }

  describeActive() {
    if (this.pinned !== null) this.setAttribute("aria-activedescendant", `${this.ids}-${this.pinned}`);
    else this.removeAttribute("aria-activedescendant");
  }

  // Where each token is: the widths of all are measured, and nothing is drawn yet.
  layOut() {
    const width = this.clientWidth - 2 * GAP;
    if (width <= 0) return;
    const pen = html("canvas").getContext("2d"), known = new Map();
    pen.font = `14px ${getComputedStyle(this).fontFamily}`;
    this.places = [];
    this.lines = [[]];
    let across = 0;
    this.tokens.forEach((token, place) => {
      const text = tokenText(token);
      if (!known.has(text)) known.set(text, Math.ceil(pen.measureText(text).width) + 2 * PADDING);
      const size = Math.min(known.get(text), width);
      if (across > 0 && across + size > width) {
        this.lines.push([]);
        across = 0;
      }
      this.places.push({ line: this.lines.length - 1, left: across, size, text });
      this.lines[this.lines.length - 1].push(place);
      across += size + GAP;
    });
    this.stage.style.height = `${this.lines.length * LINE}px`;
    this.redraw();
    if (this.pinned !== null) this.reveal(this.pinned);
  }

  redraw() {
    this.most = this.weights ? largest(this.weights) : 0;
    this.stage.replaceChildren();
    this.drawn.clear();
    this.drawLines();
  }

  drawLines() {
    const first = Math.max(0, Math.floor(this.scrollTop / LINE) - 2);
    const last = Math.min(this.lines.length - 1, Math.ceil((this.scrollTop + this.clientHeight) / LINE) + 2);
    for (const [line, node] of this.drawn) {
      if (line >= first && line <= last) continue;
      node.remove();
      this.drawn.delete(line);
    }
    for (let line = first; line <= last; line++) {
      if (this.drawn.has(line)) continue;
      const node = html("div", { class: "rg-line", role: "presentation", style: { top: `${line * LINE}px` } },
        this.lines[line].map((place) => this.draw(place)));
      this.drawn.set(line, node);
      this.stage.append(node);
    }
    this.describeActive();
  }

  draw(place) {
    const { left, size, text } = this.places[place];
    const node = html("span", { id: `${this.ids}-${place}`, class: "rg-token", role: "option", "data-token": place, "aria-selected": String(place === this.pinned),
      "aria-setsize": this.tokens.length, "aria-posinset": place + 1, style: { left: `${left}px`, width: `${size}px` } }, text);
    if (this.weights && this.weights[place] !== undefined) {
      const share = this.most ? this.weights[place] / this.most : 0;
      node.style.background = rampColor(share);
      node.style.color = inkOn(share);
      node.title = `${text}  ·  ${percent(this.weights[place])}`;
      node.setAttribute("aria-label", `${text}, ${percent(this.weights[place])}`);
    }
    return node;
  }

  choose(place) {
    this.dispatchEvent(new CustomEvent("pin", { detail: place === this.pinned && !this.hasAttribute("always") ? null : place, bubbles: true }));
  }

  reveal(place) {
    const top = this.places[place] ? this.places[place].line * LINE : 0;
    if (top < this.scrollTop) this.scrollTop = top;
    else if (top + LINE > this.scrollTop + this.clientHeight) this.scrollTop = top + LINE - this.clientHeight;
  }

  onKey(event) {
    if (!this.tokens.length) return;
    const here = this.pinned === null ? -1 : this.pinned, last = this.tokens.length - 1;
    const line = here < 0 ? 0 : this.places[here].line;
    const near = (target) => {
      const row = this.lines[Math.min(Math.max(target, 0), this.lines.length - 1)], left = here < 0 ? 0 : this.places[here].left;
      return row.reduce((best, place) => (Math.abs(this.places[place].left - left) < Math.abs(this.places[best].left - left) ? place : best), row[0]);
    };
    const page = Math.max(1, Math.floor(this.clientHeight / LINE) - 1);
    const moves = { ArrowLeft: () => here - 1, ArrowRight: () => here + 1, Home: () => 0, End: () => last, ArrowUp: () => near(line - 1),
      ArrowDown: () => near(line + 1), PageUp: () => near(line - page), PageDown: () => near(line + page), Escape: () => null };
    if (!moves[event.key]) return;
    event.preventDefault();
    const next = moves[event.key]();
    const place = next === null ? null : Math.min(Math.max(next, 0), last);
    this.dispatchEvent(new CustomEvent("pin", { detail: place, bubbles: true }));
    if (place !== null) this.reveal(place);
  }
}

define("regard-tokens", Tokens);
