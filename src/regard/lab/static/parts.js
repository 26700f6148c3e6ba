// Parts of the lab's page that several views use.
import { html } from "/components/dom.js";
import { exportBar } from "/components/export.js";

export function showError(place, failure) {
  if (!failure) {
    place.replaceChildren();
    return;
  }
  const parts = failure.parts || { title: failure.message };
  const rows = ["asked", "found", "because", "instead"].filter((name) => parts[name]);
  place.replaceChildren(html("div", { class: "error", role: "alert" }, html("b", {}, parts.title || failure.message),
    rows.length ? html("dl", { class: "rg-facts" }, rows.flatMap((name) => [html("dt", {}, name), html("dd", {}, parts[name])])) : null));
}

export function progressBar() {
  const bar = html("progress", { max: 1, "aria-label": "progress" }), label = html("span", { class: "rg-faint" });
  const whole = html("div", { class: "progress", role: "status", hidden: true }, bar, label);
  whole.tell = (progress) => {
    whole.hidden = !progress;
    if (!progress) return;
    if (progress.total) bar.value = progress.done / progress.total;
    else bar.removeAttribute("value");
    label.textContent = `${progress.label || "working"}${progress.total > 1 ? ` · ${progress.done} of ${progress.total}` : ""}`;
  };
  return whole;
}

// A figure with a title, a line of controls, its drawing and the buttons that save it.
export function card(title, figure, { controls = [], name = title.toLowerCase(), python = null, saves = true, figureOf = null } = {}) {
  const heading = html("h2", {}, title);
  const saved = { toSVG: () => (figureOf ? figureOf() : figure).toSVG(), ...(python ? { pythonLines: python } : {}) };
  const bar = saves ? exportBar(saved, name) : null;
  const whole = html("section", { class: "card", "aria-label": title }, html("div", { class: "card-top" }, heading, bar),
    controls.length ? html("div", { class: "rg-row" }, controls) : null, figure);
  whole.heading = heading;
  return whole;
}

export function table(columns, rows) {
  return html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table" }, html("table", {},
    html("thead", {}, html("tr", {}, columns.map(([name, kind]) => html("th", { scope: "col", class: kind || null }, name)))),
    html("tbody", {}, rows.map((row) => html("tr", {}, row.map((cell, place) => html(place === 0 ? "th" : "td", { class: columns[place][1] || null, scope: place === 0 ? "row" : null }, cell)))))));
}
