// The server's numbers, read from /page/state and /requests: every 500 ms while an answer runs, else every 2 s.

import { call } from "./api.js";
import { chart, readingsOf } from "./throughput.js";
import { colour, count, get, make, percent, seconds } from "./dom.js";

const FAST = 500; // milliseconds
const SLOW = 2000;
const REASONS = {
  DISABLED: "graphs are off",
  ABOVE_BUCKETS: "larger than the largest captured graph; an idle server captures it",
  UNPROFITABLE: "the smallest graph that holds it would lose more to padding than it saves",
  NO_MEMORY: "capturing a graph of this size ran out of memory",
  OVER_BUDGET: "a graph of this size would pass the memory budget for graphs",
  NOT_CAPTURED: "no graph was captured for these features yet; an idle server captures it",
};
const LATENCIES = {
  first_token: "first token",
  between_tokens: "between tokens",
  queue: "queue",
  prefill: "prefill",
  decode: "decode",
  total: "whole request",
};
const LEAST = { p50: 2, p90: 10, p99: 100 }; // requests that a percentile needs
const WAITS = ["preparation", "queue", "prefill", "decode"];

let streaming = false; // this page's own answer has begun and not ended
let latest = null; // the last state
let wake = () => {}; // ends the pause between two readings
let due = false; // something has happened since the last reading began
let requestsRead = 0; // when /requests was read
let operator = true; // may read /requests

// The chat's answer streams, or does not any more: read the numbers now.
export function answering(is) {
  if (is === streaming) return;
  streaming = is;
  if (latest) showTiles(latest);
  if (!is) requestsRead = 0;
  readNow();
}

// Read the numbers at once.
export function readNow() {
  due = true;
  wake();
}

const shown = () => get("numbers").offsetParent !== null;

// Requests that run: the server's count, and this page's own answer where that began after the server counted.
const running = (state) => Math.max(state.requests.running, streaming ? 1 : 0);

function showTiles(state) {
  const { kv_cache: cache, prefix_cache: prefix, speculation } = state;
  const drafts = speculation.drafter !== "none";
  const tiles = [
    [count(running(state)), "running"],
    [count(Math.max(0, state.requests.waiting - (running(state) - state.requests.running))), "waiting"],
    [drafts && speculation.accept_length ? speculation.accept_length.toFixed(2) : "–", drafts ? `tokens per round, ${speculation.drafter}` : "no drafter"],
    [percent(cache.usage), cache.pages ? `of ${count(cache.pages)} KV pages in use` : "of the KV cache in use"],
    [cache.cached_pages === null ? "–" : count(cache.cached_pages), "pages kept for prefixes"],
    [prefix.queries ? percent(prefix.hits / prefix.queries) : "–", `prefix hits, ${count(prefix.hits)} tokens`],
  ];
  get("tiles").replaceChildren(...tiles.map(([value, name]) => make("div", { class: "tile" }, make("b", {}, value), make("span", {}, name))));
}

function showLatency(latency) {
  const rows = Object.entries(LATENCIES).map(([name, title]) => {
    const row = latency[name];
    const cells = Object.keys(LEAST).map((share) => {
      const about = row[share] === null ? { class: "none", title: `needs ${LEAST[share]} requests, ${row.count} so far` } : {};
      return make("td", about, seconds(row[share]));
    });
    return make("tr", {}, make("th", { scope: "row" }, title), make("td", {}, seconds(row.last)), ...cells);
  });
  get("latency").tBodies[0].replaceChildren(...rows);
  const { count: done } = latency.total;
  const least = Object.entries(LEAST).map(([share, needed]) => `${share} from ${needed} on`).join(", ");
  get("latency-note").textContent = !done ? "No request has ended yet." : `${done === 1 ? "1 request" : `${count(done)} requests`}, measured values (${least}).`;
}

function showPositions({ acceptance_per_position: shares, accepted_per_position: accepted }) {
  const bars = shares.map((share, place) => {
    const bar = make("i", { class: `f${colour(place)}` });
    bar.style.width = `${100 * share}%`;
    return make("div", { class: "position" }, make("span", {}, String(place + 1)), make("div", { class: "track" }, bar),
      make("span", {}, `${percent(share)} (${count(accepted[place] ?? 0)})`));
  });
  get("positions").replaceChildren(...(bars.length ? bars : [make("p", { class: "quiet note" }, "This server drafts no tokens.")]));
}

function showPasses(passes) {
  const programs = new Map();
  for (const { program: name, kind, reason, count: number } of passes) {
    const program = programs.get(name) ?? { kinds: new Set(), replayed: 0, eager: 0, reasons: new Map() };
    programs.set(name, program);
    if (kind === "eager") {
      program.eager += number;
      program.reasons.set(reason, (program.reasons.get(reason) ?? 0) + number);
    } else {
      program.replayed += number;
      program.kinds.add(kind);
    }
  }
  const list = [...programs].map(([name, { replayed, eager, reasons, kinds }]) => {
    const share = make("i", { class: "f1" });
    share.style.width = `${(100 * replayed) / (replayed + eager)}%`;
    const why = [...reasons].map(([reason, number]) => make("p", { class: "quiet", title: reason }, `${count(number)} eager: ${REASONS[reason] ?? reason}`));
    const title = kinds.size ? `${name} (${[...kinds].join(", ")})` : name;
    return make("div", { class: "pass" }, make("span", {}, title), make("div", { class: "track" }, share),
      make("span", {}, `${count(replayed)} of ${count(replayed + eager)}`), ...why);
  });
  get("passes").replaceChildren(...list);
  const all = [...programs.values()].reduce((sum, one) => [sum[0] + one.replayed, sum[1] + one.replayed + one.eager], [0, 0]);
  get("coverage").textContent = all[1] ? `${percent(all[0] / all[1])} of ${count(all[1])} passes replayed a graph` : "no passes yet";
}

function showRequests(records) {
  const longest = Math.max(...records.map((one) => one.total), 1e-6);
  const items = records.map((one) => {
    const stack = make("div", { class: "stack", title: WAITS.map((name) => `${name} ${seconds(one[name])}`).join(", ") });
    stack.style.width = `${Math.max(2, (100 * one.total) / longest)}%`;
    WAITS.forEach((name, at) => {
      const part = make("i", { class: `w${at}` });
      part.style.flexGrow = one[name] ?? 0;
      stack.append(part);
    });
    const time = new Date(1000 * one.ended).toLocaleTimeString([], { hour12: false });
    const facts = [`${count(one.prompt_tokens)} prompt`, one.cached_tokens ? `${count(one.cached_tokens)} cached` : "",
      `${count(one.completion_tokens)} generated`, one.accept_length === null ? "" : `${one.accept_length.toFixed(2)} per round`,
      one.key ? `key ${one.key}` : ""].filter(Boolean).join(" · ");
    return make("li", { title: one.id }, make("p", {}, make("span", {}, time), make("span", {}, one.finish_reason), make("b", {}, seconds(one.total))),
      stack, make("p", { class: "quiet" }, facts));
  });
  const none = make("li", { class: "quiet" }, operator ? "No request has ended yet." : "Operators see them: open the page on the server’s machine, or start it with --api-key.");
  get("requests").replaceChildren(...(items.length ? items : [none]));
  get("waits-legend").hidden = !items.length;
}

async function readRequests() {
  if (!operator || !shown() || performance.now() - requestsRead < SLOW) return;
  requestsRead = performance.now();
  try {
    showRequests((await (await call("requests", {}, false)).json()).requests);
  } catch (error) {
    if (error.status !== 403) throw error;
    operator = false;
    showRequests([]);
  }
}

function showState(words, kind, trouble = "") {
  get("state-text").textContent = words;
  get("state").className = `state ${kind}`;
  get("state").title = trouble;
  if (get("trouble").textContent !== trouble) get("trouble").textContent = trouble; // screen readers read it once
  get("trouble").hidden = !trouble;
}

// asks: show the key dialog where a key is needed. Readings after the first do not: who closed it is not asked again.
async function update(offered, asks) {
  try {
    const state = await (await call("page/state", {}, asks)).json();
    latest = state;
    offered(state.model);
    const name = state.model.names[0];
    if (state.refusal) showState(`${name} · not serving`, "bad", state.refusal);
    else showState(name, "good");
    if (state.fresh) readingsOf(state.tokens);
    showTiles(state);
    chart();
    showLatency(state.latency);
    showPositions(state.speculation);
    showPasses(state.passes);
    await readRequests();
  } catch (error) {
    const words = error.status === 401 ? "key needed" : error.status === 0 ? "no connection" : "trouble";
    showState(words, "bad", error.message);
  }
}

// Read on, one reading after the other, while the page is looked at. offered: called with the model of each state.
export async function startNumbers(offered) {
  document.addEventListener("keychange", () => { operator = true; requestsRead = 0; readNow(); });
  document.addEventListener("visibilitychange", readNow);
  for (let first = true; ; first = false) {
    due = false;
    if (!document.hidden) await update(offered, first);
    if (due) continue;
    const fast = streaming || (latest?.requests.running ?? 0) > 0;
    await new Promise((done) => {
      wake = done;
      setTimeout(done, fast ? FAST : SLOW);
    });
  }
}
