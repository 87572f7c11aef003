// Elements. Text from outside is always set as textContent.

// A new element. about: properties; class is className. inside: elements and texts.
export function make(tag, about = {}, ...inside) {
  const { class: names, ...rest } = about;
  const element = Object.assign(document.createElement(tag), rest);
  if (names) element.className = names;
  element.append(...inside);
  return element;
}

export const get = (id) => document.getElementById(id);

// Seconds in three digits and a unit.
export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.9995) return `${(value * 1000).toPrecision(value < 0.0995 ? 2 : 3)} ms`.replace(/\.0+ /, " ");
  return `${value < 99.5 ? value.toPrecision(3) : Math.round(value)} s`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

// A count in short form.
export function count(value) {
  if (value < 10000) return String(Math.round(value));
  return value < 999500 ? `${(value / 1000).toPrecision(3)} k` : `${(value / 1e6).toPrecision(3)} M`;
}

export const PLACES = 5;
// The number of a draft position's colour: from the fifth place on they share one.
export const colour = (position) => Math.min(position, PLACES - 1);
