// Train: a run of `regard train` while it runs, or after.
import { html, select } from "/components/dom.js";
import { decode } from "/components/numbers.js";
import { get, latest, post } from "./api.js";
import { writeAddress } from "./address.js";
import { card, showError } from "./parts.js";
import "/components/chart.js";
import "/components/player.js";
import "/components/timeline.js";

const EVERY = 2000; // milliseconds between two questions
const HIDDEN = new Set(["step", "epoch", "time", "seconds", "cursor", "number", "units"]);
const FIRST = ["loss", "accuracy", "perplexity", "bits per byte", "bleu"];

const plain = (name) => name.replaceAll("_", " ");

export class TrainView {
  constructor(place) {
    this.picker = html("div", { class: "rg-row" });
    this.error = html("div");
    this.status = html("p", { class: "rg-status", role: "status" });
    this.curves = html("div", { class: "grid" });
    this.heads = html("div");
    this.timeline = html("regard-timeline");
    this.samples = html("ol", { class: "samples" });
    this.cards = { heads: card("Heads by position", this.heads, { saves: false }), attention: card("Attention on a fixed input", this.timeline, { name: "attention over training" }), samples: card("Samples", this.samples, { saves: false }) };
    place.append(html("div", { class: "view-top" }, html("h1", {}, "Watch it learn"), this.picker), this.status, this.error, this.curves, html("div", { class: "two" }, html("div", { class: "column" }, this.cards.heads, this.cards.attention), html("div", { class: "column" }, this.cards.samples)));
    this.ask = latest((signal, run, since) => post("/api/run", { run, since }, signal));
    this.charts = new Map();
  }

  async restore(params) {
    const { runs } = await get("/api/runs");
    if (!runs.length) {
      this.hideAll();
      this.status.textContent = "";
      showError(this.error, { parts: { title: "There is no run to watch.", instead: "regard train gpt my_text.txt --folder runs/mine, and beside it regard lab runs/mine" } });
      return;
    }
    showError(this.error, null);
    const run = runs.find((one) => one.id === params.run) || runs[0];
    this.picker.replaceChildren(select("run", runs.map((one) => [one.id, one.name]), run.id, (id) => { writeAddress("train", { run: id }); this.start(id); }));
    writeAddress("train", { run: run.id });
    await this.start(run.id);
  }

  hideAll() {
    for (const one of Object.values(this.cards)) one.hidden = true;
    this.curves.replaceChildren();
  }

  async start(run) {
    this.pause();
    this.run = run;
    this.since = null;
    this.record = { steps: [], evaluations: [], samples: [] };
    this.charts.clear();
    this.hideAll();
    this.samples.replaceChildren();
    await this.poll();
  }

  pause() {
    clearTimeout(this.timer);
    this.ask.stop();
  }

  async poll() {
    const run = this.run;
    try {
      const answer = await this.ask(run, this.since);
      if (!answer || run !== this.run) return;
      showError(this.error, null);
      this.take(answer);
      if (!answer.finished) this.timer = setTimeout(() => this.poll(), EVERY);
    } catch (failure) {
      showError(this.error, failure);
      this.timer = setTimeout(() => this.poll(), 5 * EVERY);
    }
  }

  take(answer) {
    const { record } = this;
    for (const name of ["steps", "evaluations"]) record[name].push(...(answer[name] || []));
    this.since = answer.cursor ?? this.since;
    const last = record.steps[record.steps.length - 1] || record.evaluations[record.evaluations.length - 1];
    this.status.textContent = last ? `${answer.finished ? "finished" : "running"} · step ${last.step}` : "no step yet";
    this.showCurves();
    for (const sample of answer.samples || []) {
      this.samples.prepend(html("li", {}, html("span", { class: "rg-faint" }, `step ${sample.step}`), html("p", { class: "written" }, sample.text)));
    }
    this.cards.samples.hidden = !this.samples.childElementCount;
    if (answer.heads) {
      this.cards.heads.hidden = false;
      const player = html("regard-player");
      this.heads.replaceChildren(player);
      player.show(answer.heads);
    }
    if (answer.attention) {
      this.cards.attention.hidden = false;
      this.timeline.show({ ...answer.attention, maps: decode(answer.attention.maps) });
    }
  }

  // One chart for each number, of the steps and of the evaluations together where both have it.
  showCurves() {
    const { steps, evaluations } = this.record, names = [...new Set([...steps, ...evaluations].flatMap((one) => Object.keys(one)).filter((name) => !HIDDEN.has(name)))];
    const rank = (name) => (FIRST.includes(plain(name)) ? FIRST.indexOf(plain(name)) : FIRST.length);
    names.sort((a, b) => rank(a) - rank(b));
    for (const name of names) {
      const series = [["training", steps], ["held out", evaluations]].map(([label, rows], color) => ({ name: label, color, points: thin(rows.filter((row) => Number.isFinite(row[name])).map((row) => [row.step, row[name]])) })).filter((one) => one.points.length);
      if (!series.length) continue;
      if (!this.charts.has(name)) {
        const chart = html("regard-chart");
        this.charts.set(name, chart);
        this.curves.append(card(plain(name), chart, { name }));
      }
      this.charts.get(name).show(series, { x: "step", y: name, height: 210, zero: false });
    }
  }
}

// At most 600 points of a curve, the first and the last among them.
function thin(points, most = 600) {
  if (points.length <= most) return points;
  const stride = (points.length - 1) / (most - 1);
  return Array.from({ length: most }, (_, place) => points[Math.round(place * stride)]);
}
