// Tokens a second over the last minute, of counters that are read now and then.

import { get } from "./dom.js";

const SPAN = 60; // seconds
const LEAST = 0.9; // seconds that a rate is taken over at least: steps of an engine bring several tokens at once
const SERIES = ["generated", "prompt"];
const SHOWN = { generated: "generated", prompt: "read" };
let readings = []; // { time, generated, prompt }

// Add a reading of the counters.
export function readingsOf(counters) {
  const time = performance.now() / 1000;
  const last = readings.at(-1);
  if (last && SERIES.some((name) => counters[name] < last[name])) readings = []; // another engine counts from 0
  readings.push({ time, ...counters });
  while (readings.length > 2 && readings[1].time < time - SPAN) readings.shift();
}

// Rates between readings: [{ from, to, generated, prompt }].
function rates() {
  const found = [];
  let before = readings[0];
  for (const now of readings.slice(1)) {
    const seconds = now.time - before.time;
    if (seconds < LEAST) continue;
    const rate = Object.fromEntries(SERIES.map((name) => [name, (now[name] - before[name]) / seconds]));
    found.push({ from: before.time, to: now.time, ...rate });
    before = now;
  }
  return found;
}

export function chart() {
  const all = rates();
  const now = readings.at(-1)?.time ?? 0;
  const most = Math.max(1, ...all.flatMap((one) => SERIES.map((name) => one[name])));
  for (const name of SERIES) {
    const points = all.map((one) => {
      const height = (97 - (94 * one[name]) / most).toFixed(1);
      return [one.from, one.to].map((time) => `${(SPAN - Math.min(SPAN, now - time)).toFixed(2)},${height}`).join(" ");
    });
    document.querySelector(`#spark .${SHOWN[name]}`).setAttribute("points", points.join(" "));
    get(`${SHOWN[name]}-now`).textContent = Math.round(all.at(-1)?.[name] ?? 0);
  }
  get("most-now").textContent = all.length ? Math.round(Math.max(...all.flatMap((one) => SERIES.map((name) => one[name])))) : 0;
}
