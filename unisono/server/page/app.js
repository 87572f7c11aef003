// The page's start: colours, views, the model's name, the chat and the numbers.

import { call } from "./api.js";
import { startChat } from "./chat.js";
import { get } from "./dom.js";
import { startNumbers } from "./numbers.js";

const THEMES = { "": "Auto", light: "Light", dark: "Dark" };

function theme() {
  const button = get("theme");
  const use = (name) => {
    if (name) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("unisono-theme", name);
    button.textContent = THEMES[name];
    button.setAttribute("aria-label", `Colours: ${THEMES[name]}`);
    button.dataset.name = name;
  };
  const names = Object.keys(THEMES);
  const stored = localStorage.getItem("unisono-theme") ?? "";
  use(names.includes(stored) ? stored : "");
  button.addEventListener("click", () => use(names[(names.indexOf(button.dataset.name) + 1) % names.length]));
}

function views() {
  const buttons = [...document.querySelectorAll("[data-show]")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.show;
      buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    });
  }
}

async function model() {
  try {
    const { data } = await (await call("v1/models")).json();
    get("model").textContent = data.map((one) => one.id).join(", ");
  } catch (error) {
    get("state").textContent = error.message;
  }
}

theme();
views();
startChat();
document.addEventListener("keychange", model);
await model();
startNumbers();
