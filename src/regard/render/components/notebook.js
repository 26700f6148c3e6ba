// The front end of the notebook widget: the same figure as in the lab and in saved pages.
import { html } from "./dom.js";
import "./attention.js";

const SHARED = ["layer", "head", "token", "view"];

function render({ model, el }) {
  const figure = html("regard-attention", { class: "rg-notebook" });
  const state = () => Object.fromEntries(SHARED.map((name) => [name, model.get(name)]).filter(([, value]) => value !== undefined && value !== null && value !== ""));
  const show = () => figure.show(model.get("data"), state());
  const follow = () => {
    const next = state();
    if (SHARED.some((name) => next[name] !== undefined && next[name] !== figure.state[name])) figure.show(model.get("data"), next);
  };
  el.append(figure);
  show();
  figure.addEventListener("change", (event) => {
    for (const name of SHARED) model.set(name, event.detail[name]);
    model.save_changes();
  });
  model.on("change:data", show);
  for (const name of SHARED) model.on(`change:${name}`, follow);
  return () => {
    model.off("change:data", show);
    for (const name of SHARED) model.off(`change:${name}`, follow);
  };
}

export default { render };
