// The lab: four views, chosen by the address.
import { setTheme } from "/components/colors.js";
import { html } from "/components/dom.js";
import { get } from "./api.js";
import { readAddress } from "./address.js";
import { showError } from "./parts.js";
import { CheckView } from "./check.js";
import { LookView } from "./look.js";
import { PlayView } from "./play.js";
import { TrainView } from "./train.js";

const KINDS = { look: LookView, play: PlayView, check: CheckView, train: TrainView };
const views = {};
const models = get("/api/models").then((answer) => answer.models);

async function route() {
  const { view, params } = readAddress();
  const name = KINDS[view] ? view : "look";
  document.querySelectorAll("[data-panel]").forEach((panel) => { panel.hidden = panel.dataset.panel !== name; });
  document.querySelectorAll("nav [data-view]").forEach((link) => {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  document.title = `${document.querySelector(`nav [data-view="${name}"]`).textContent} · Regard lab`;
  const panel = document.querySelector(`[data-panel="${name}"]`);
  try {
    if (!views[name]) {
      const loading = html("p", { class: "rg-faint" }, "Loading …");
      panel.replaceChildren(loading);
      views[name] = new KINDS[name](panel, { models: await models });
      loading.remove();
    }
    for (const [other, one] of Object.entries(views)) if (other !== name && one.pause) one.pause();
    await views[name].restore(params);
  } catch (failure) {
    const place = html("div");
    panel.append(place);
    showError(place, failure);
  }
}

const THEMES = ["", "light", "dark"], NAMES = { "": "Auto", light: "Light", dark: "Dark" };
const toggle = document.getElementById("theme");
let theme = "";
try {
  theme = localStorage.getItem("regard-theme") || "";
} catch { /* a browser that keeps nothing: the theme is that of the system */ }

function applyTheme(next) {
  theme = THEMES.includes(next) ? next : "";
  setTheme(theme);
  toggle.textContent = NAMES[theme];
  toggle.setAttribute("aria-label", `color theme: ${NAMES[theme]}`);
  try {
    localStorage.setItem("regard-theme", theme);
  } catch { /* as above */ }
}
toggle.addEventListener("click", () => applyTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]));
applyTheme(theme);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
window.addEventListener("hashchange", route);
route();
