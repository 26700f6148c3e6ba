// One head's attention as the components ask for it: blocks and rows from the server, kept while they are likely needed.
import { decode } from "/components/numbers.js";
import { post } from "./api.js";

const KEPT = 64;

export class HeadSource {
  // `text` has the tokens: {queries, keys, grid, start, causal}.
  constructor(input, attention, text, { layer, head, weighting }) {
    Object.assign(this, text);
    this.start = text.start || 0;
    this.place = { input, attention, layer, head, weighting };
    this.rows = new Map();
  }

  async tile({ rows, columns, size, signal }) {
    const answer = await post("/api/tile", { ...this.place, rows, columns, size }, signal);
    return { ...decode(answer.tile), exact: answer.exact, max: answer.max };
  }

  async row(token, side, signal) {
    const key = `${side}/${token}`;
    if (!this.rows.has(key)) {
      const { weighting, ...place } = this.place;
      const { row } = weighting === "rollout" ? await post("/api/rollout", { input: place.input, attention: place.attention, token }, signal)
        : await post("/api/row", { ...this.place, token, side }, signal);
      this.rows.set(key, decode(row).values);
      if (this.rows.size > KEPT) this.rows.delete(this.rows.keys().next().value);
    }
    return this.rows.get(key);
  }
}
