// Elements, and how numbers are written. Text from outside is always set as text, never as markup.

export const get = (id) => document.getElementById(id);

// A new element. about: properties; class is className. inside: elements and texts.
export function make(tag, about = {}, ...inside) {
  const { class: names, ...rest } = about;
  const element = Object.assign(document.createElement(tag), rest);
  if (names) element.className = names;
  element.append(...inside);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

// An icon of index.html's sprite.
export function icon(name) {
  const picture = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  picture.setAttribute("class", "icon");
  picture.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  picture.append(use);
  return picture;
}

// A button with an icon. label: its accessible name and tooltip. text: shown beside the icon.
export function button(name, label, act, text = "") {
  const made = make("button", { type: "button", class: text ? "quiet-button" : "icon-button", title: label }, icon(name), text);
  made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

// A button that copies what `text()` returns.
export function copyButton(text, label) {
  const made = button("copy", label, async () => {
    const done = await copy(text());
    made.replaceChildren(icon(done ? "check" : "cross"));
    announce(done ? "Copied" : "The browser did not allow copying");
    setTimeout(() => made.replaceChildren(icon("copy")), 1500);
  });
  return made;
}

// navigator.clipboard is there on https and localhost only.
async function copy(text) {
  try {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(text);
      return true;
    }
  } catch { /* not allowed: try the older way */ }
  const field = make("textarea", { value: text, class: "hidden" });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}

// Have screen readers read a message.
export function announce(message) {
  const place = get("announcement");
  place.textContent = "";
  setTimeout(() => { place.textContent = message; }, 50);
}

// A button that shows and hides a panel. Esc and a click elsewhere hide it.
export function disclosure(opener, panel) {
  const show = (open) => {
    panel.hidden = !open;
    opener.setAttribute("aria-expanded", String(open));
  };
  opener.addEventListener("click", () => show(panel.hidden));
  document.addEventListener("click", (event) => {
    if (!panel.hidden && !panel.contains(event.target) && !opener.contains(event.target)) show(false);
  });
  panel.parentElement.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || panel.hidden) return;
    event.stopPropagation();
    show(false);
    opener.focus();
  });
}

// Seconds as milliseconds or seconds, in two or three digits.
export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.9995) {
    if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
    return `${Math.round(value * 1000)} ms`;
  }
  return `${value < 99.5 ? value.toPrecision(3) : Math.round(value)} s`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

// A count in short form.
export function count(value) {
  if (value < 10000) return String(Math.round(value));
  return value < 999500 ? `${(value / 1000).toPrecision(3)} k` : `${(value / 1e6).toPrecision(3)} M`;
}

// Bytes in the unit that limits are given in.
export const mebibytes = (bytes) => `${bytes < 1048576 ? (bytes / 1048576).toPrecision(2) : Math.round(bytes / 1048576)} MiB`;

const PLACES = 5;
// The number of a draft position's colour: from the fifth place on they share one.
export const colour = (position) => Math.min(position, PLACES - 1);
