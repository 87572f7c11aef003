// The page's start: colours, views, the chat and the numbers.

import { startChat, offer } from "./chat.js";
import { get, icon } from "./dom.js";
import { startNumbers } from "./numbers.js";
import { offerModels } from "./settings.js";

const THEMES = { "": "as the system", light: "light", dark: "dark" };
const stored = (name) => localStorage.getItem(`unisono-${name}`) ?? "";

function theme() {
  const button = get("theme");
  const names = Object.keys(THEMES);
  const use = (name) => {
    if (name) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("unisono-theme", name);
    button.replaceChildren(icon(name || "auto"));
    button.title = `Colours: ${THEMES[name]}`;
    button.setAttribute("aria-label", button.title);
    button.dataset.name = name;
  };
  use(names.includes(stored("theme")) ? stored("theme") : "");
  button.addEventListener("click", () => use(names[(names.indexOf(button.dataset.name) + 1) % names.length]));
}

// On a narrow screen one of chat and numbers; on a wide one the numbers may be hidden.
function views() {
  const buttons = [...document.querySelectorAll("[data-show]")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.show;
      buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    });
  }
  const panel = get("panel");
  const use = (shown) => {
    document.body.classList.toggle("without-numbers", !shown);
    panel.setAttribute("aria-pressed", String(shown));
    localStorage.setItem("unisono-panel", shown ? "" : "hidden");
  };
  use(stored("panel") !== "hidden");
  panel.addEventListener("click", () => use(document.body.classList.contains("without-numbers")));
}

function offered(model) {
  offer(model);
  offerModels(model.names);
}

theme();
views();
startChat();
startNumbers(offered);
