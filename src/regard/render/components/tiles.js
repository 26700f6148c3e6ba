// The tiles of a matrix that are in view: asked for once, nearest first, and dropped when the view has moved on.
import { html } from "./dom.js";
import { paint } from "./colors.js";
import { largest } from "./numbers.js";

export const TILE = 128;
const AT_ONCE = 3, KEPT = 400;

export class Tiles {
  constructor(source, changed) {
    this.source = source;
    this.changed = changed;
    this.kept = new Map();
    this.most = new Map(); // of each level
    this.waiting = [];
    this.running = 0;
    this.gain = 1;
    this.stopper = new AbortController();
    this.wholeLevel = Math.max(0, Math.ceil(Math.log2(Math.max(source.queries.length, source.keys.length) / TILE)));
    this.ask(this.wholeLevel, 0, 0);
  }

  close() {
    this.stopper.abort();
    this.waiting = [];
  }

  // What is known of the block at (i, j) of a level; asks for it if it is missing.
  find(level, i, j) {
    const key = `${level}/${i}/${j}`, tile = this.kept.get(key);
    if (!tile) this.waiting.push([level, i, j]);
    return tile && tile.values ? tile : null;
  }

  // The blocks that were not there when the picture was drawn; earlier wishes are forgotten.
  beginFrame() {
    this.waiting = [];
  }

  endFrame() {
    while (this.running < AT_ONCE && this.waiting.length) this.ask(...this.waiting.shift());
  }

  async ask(level, i, j) {
    const key = `${level}/${i}/${j}`;
    if (this.kept.has(key)) return;
    this.kept.set(key, {});
    const span = TILE * 2 ** level, { queries, keys } = this.source;
    const rows = [i * span, Math.min((i + 1) * span, queries.length)], columns = [j * span, Math.min((j + 1) * span, keys.length)];
    this.running += 1;
    try {
      const tile = await this.source.tile({ rows, columns, size: TILE, signal: this.stopper.signal });
      const most = largest(tile.values);
      Object.assign(tile, { rows, columns, level, most, canvas: html("canvas") });
      this.kept.set(key, tile);
      if (most > (this.most.get(level) || 0)) this.most.set(level, most);
      if (this.kept.size > KEPT) this.drop();
    } catch (failure) {
      this.kept.delete(key);
      if (failure.name !== "AbortError") this.failure = failure;
    } finally {
      this.running -= 1;
    }
    if (!this.stopper.signal.aborted) this.changed();
  }

  drop() {
    for (const [key, tile] of this.kept) {
      if (this.kept.size <= KEPT / 2) return;
      if (tile.values && tile.level !== this.wholeLevel) this.kept.delete(key);
    }
  }

  // The largest color of a level: pooled blocks are paler than their largest weight, so each level has its own.
  scale(level) {
    return (this.most.get(level) || 0) / this.gain;
  }

  picture(tile) {
    const scale = this.scale(tile.level);
    if (tile.painted !== scale) {
      paint(tile.canvas, tile.values, tile.shape[0], tile.shape[1], scale);
      tile.painted = scale;
    }
    return tile.canvas;
  }

  repaint() {
    for (const tile of this.kept.values()) tile.painted = null;
    this.changed();
  }

  // A weight as exactly as it is known: of the finest block that holds it.
  value(row, column) {
    for (let level = 0; level <= this.wholeLevel; level++) {
      const span = TILE * 2 ** level;
      const tile = this.kept.get(`${level}/${Math.floor(row / span)}/${Math.floor(column / span)}`);
      if (!tile || !tile.values) continue;
      const [height, width] = tile.shape;
      const y = Math.floor((row - tile.rows[0]) * height / (tile.rows[1] - tile.rows[0]));
      const x = Math.floor((column - tile.columns[0]) * width / (tile.columns[1] - tile.columns[0]));
      return { value: tile.values[y * width + x], exact: height === tile.rows[1] - tile.rows[0] && width === tile.columns[1] - tile.columns[0] };
    }
    return null;
  }
}
