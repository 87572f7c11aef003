// The server's numbers, read every two seconds from /metrics, /server_info and /requests.

import { call } from "./api.js";
import { colour, count, get, make, percent, seconds } from "./dom.js";

const EVERY = 2000; // milliseconds
const KEPT = 60; // readings: two minutes
const REASONS = {
  DISABLED: "graphs are off",
  ABOVE_BUCKETS: "larger than the largest captured graph; an idle server captures it",
  UNPROFITABLE: "the smallest graph that holds it would lose more to padding than it saves",
  NO_MEMORY: "capturing a graph of this size ran out of memory",
  OVER_BUDGET: "a graph of this size would pass the memory budget for graphs",
  NOT_CAPTURED: "no graph was captured for these features yet; an idle server captures it",
};
const LATENCIES = {
  time_to_first_token_seconds: "first token",
  inter_token_latency_seconds: "between tokens",
  request_queue_time_seconds: "queue",
  request_prefill_time_seconds: "prefill",
  request_decode_time_seconds: "decode",
  e2e_request_latency_seconds: "whole request",
};
const readings = [];

// Prometheus' text as a list of { name, labels, value }; prefixes are left out.
export function parse(text) {
  const lines = text.split("\n").filter((line) => line && !line.startsWith("#"));
  const own = lines.some((line) => line.startsWith("unisono:"));
  const samples = [];
  for (const line of lines) {
    if (own && line.startsWith("vllm:")) continue; // the same again
    const found = /^(?:unisono:|vllm:)?(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

// The value below which a share of a histogram's observations lie, linear within its bucket. null without any.
export function quantile(samples, name, share) {
  const buckets = samples
    .filter((sample) => sample.name === `${name}_bucket`)
    .map((sample) => ({ end: Number(sample.labels.le.replace("+Inf", "Infinity")), below: sample.value }))
    .sort((a, b) => a.end - b.end);
  const all = buckets.at(-1)?.below ?? 0;
  if (!all) return null;
  let start = 0;
  let before = 0;
  for (const { end, below } of buckets) {
    if (below >= share * all) {
      if (end === Infinity) return start;
      return start + ((end - start) * (share * all - before)) / Math.max(1, below - before);
    }
    start = end;
    before = below;
  }
  return start;
}

const sum = (samples, name) => samples.filter((one) => one.name === name).reduce((all, one) => all + one.value, 0);
const row = (...cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));

function read(samples) {
  const now = {
    time: performance.now(), generated: sum(samples, "generation_tokens_total"), read: sum(samples, "prompt_tokens_total"),
  };
  readings.push(now);
  while (readings.length > KEPT + 1) readings.shift();
}

// Tokens a second between readings; a counter that fell is a new engine's.
function rates(name) {
  return readings.slice(1).map((now, at) => {
    const before = readings[at];
    const grown = now[name] >= before[name] ? now[name] - before[name] : now[name];
    return (1000 * grown) / (now.time - before.time);
  });
}

function showTiles(samples, info) {
  const hits = sum(samples, "prefix_cache_hits_total");
  const queries = sum(samples, "prefix_cache_queries_total");
  const cache = info?.kv_cache;
  const drafter = info?.speculation?.drafter;
  const length = info?.speculation?.avg_spec_accept_length;
  const tiles = [
    [count(sum(samples, "num_requests_running")), "running"],
    [count(sum(samples, "num_requests_waiting")), "waiting"],
    [percent(sum(samples, "kv_cache_usage_perc")), cache?.pages ? `KV cache, of ${count(cache.pages)} pages` : "KV cache"],
    [queries ? percent(hits / queries) : "–", `prefix hits, ${count(hits)} tokens`],
    [cache?.cached_pages === undefined ? "–" : count(cache.cached_pages), "pages kept for prefixes"],
    [drafter && drafter !== "none" ? length.toFixed(2) : "–", drafter && drafter !== "none" ? `tokens a round, ${drafter}` : "no drafter"],
  ];
  get("tiles").replaceChildren(...tiles.map(([value, name]) => make("div", { class: "tile" }, make("b", {}, value), make("span", {}, name))));
}

function showThroughput() {
  const series = { generated: rates("generated"), read: rates("read") };
  const most = Math.max(1, ...series.generated, ...series.read);
  for (const [name, values] of Object.entries(series)) {
    const left = KEPT - values.length;
    const points = values.map((value, at) => {
      const height = 97 - (94 * value) / most;
      return `${left + at},${height} ${left + at + 1},${height}`;
    });
    document.querySelector(`#spark .${name}`).setAttribute("points", points.join(" "));
    get(`${name}-now`).textContent = Math.round(values.at(-1) ?? 0);
  }
  get("most-now").textContent = Math.round(most);
}

function showLatency(samples) {
  get("latency").tBodies[0].replaceChildren(...Object.entries(LATENCIES).map(([name, title]) => row(
    title, ...[0.5, 0.9, 0.99].map((share) => seconds(quantile(samples, name, share))), count(sum(samples, `${name}_count`)),
  )));
}

function showPositions(info) {
  const shares = info?.speculation?.acceptance_per_position ?? [];
  const accepted = info?.counters?.accepted_per_position ?? [];
  const bars = shares.map((share, place) => {
    const bar = make("i", { class: `f${colour(place)}` });
    bar.style.width = `${100 * share}%`;
    return make("div", { class: "position" }, make("span", {}, String(place + 1)), make("div", { class: "track" }, bar),
      make("span", {}, `${percent(share)} (${count(accepted[place] ?? 0)})`));
  });
  get("positions").replaceChildren(...(bars.length ? bars : [make("p", { class: "quiet" }, "This server drafts no tokens.")]));
}

function showPasses(samples) {
  const programs = new Map();
  for (const { labels, value } of samples.filter((one) => one.name === "passes_total" && one.value)) {
    const program = programs.get(labels.program) ?? { kinds: new Map(), replayed: 0, eager: 0, reasons: new Map() };
    programs.set(labels.program, program);
    if (labels.kind === "eager") {
      program.eager += value;
      program.reasons.set(labels.reason, (program.reasons.get(labels.reason) ?? 0) + value);
    } else {
      program.replayed += value;
      program.kinds.set(labels.kind, (program.kinds.get(labels.kind) ?? 0) + value);
    }
  }
  const rows = [...programs].map(([name, { replayed, eager, reasons, kinds }]) => {
    const why = [...reasons].map(([reason, passes]) => make("p", { title: reason }, `${count(passes)}: ${REASONS[reason] ?? reason}`));
    return row(`${name}${kinds.size ? ` (${[...kinds.keys()].join(", ")})` : ""}`, count(replayed), count(eager), make("div", {}, ...(why.length ? why : ["–"])));
  });
  get("passes").tBodies[0].replaceChildren(...rows);
  const all = [...programs.values()].reduce((total, one) => [total[0] + one.replayed, total[1] + one.replayed + one.eager], [0, 0]);
  get("coverage").textContent = all[1] ? `${percent(all[0] / all[1])} of ${count(all[1])} passes replayed a graph` : "no passes yet";
}

const WAITS = ["preparation", "queue", "prefill", "decode"];

function showRequests(records) {
  const longest = Math.max(...records.map((one) => one.total), 1e-6);
  const rows = records.map((one) => {
    const stack = make("div", { class: "stack" });
    stack.title = WAITS.map((name) => `${name} ${seconds(one[name])}`).join(", ");
    stack.style.width = `${Math.max(2, (100 * one.total) / longest)}%`;
    WAITS.forEach((name, at) => {
      const part = make("i", { class: `w${at}` });
      part.style.flexGrow = one[name] ?? 0;
      stack.append(part);
    });
    const time = make("span", { title: one.id }, new Date(1000 * one.ended).toLocaleTimeString([], { hour12: false }));
    return row(time, stack, seconds(one.total), count(one.prompt_tokens), count(one.cached_tokens), count(one.completion_tokens),
      one.accept_length === null ? "–" : one.accept_length.toFixed(2), one.finish_reason, one.key || "–");
  });
  get("requests").classList.toggle("keyless", !records.some((one) => one.key));
  get("requests").tBodies[0].replaceChildren(...rows);
}

function trouble(messages) {
  get("trouble").textContent = messages.join(" ");
  get("trouble").hidden = !messages.length;
}

// Readings ask for no key: who closed the dialog is not to see it again every two seconds.
const fetched = (path) => call(path, {}, false);

async function update() {
  const troubles = [];
  const attempt = async (work) => {
    try { return await work(); } catch (error) {
      troubles.push(error.message);
      return null;
    }
  };
  const samples = await attempt(async () => parse(await (await fetched("metrics")).text()));
  const info = await attempt(async () => (await (await fetched("server_info")).json()).engine);
  const records = await attempt(async () => (await (await fetched("requests")).json()).requests);
  if (samples) {
    read(samples);
    showTiles(samples, info);
    showThroughput();
    showLatency(samples);
    showPasses(samples);
  }
  if (info) showPositions(info);
  if (records) showRequests(records);
  trouble(troubles);
  const state = get("state");
  state.textContent = samples ? "serving" : "no answer";
  state.className = `badge ${samples ? "good" : "bad"}`;
}

// Read on, one reading after the other, while the page is looked at.
export async function startNumbers() {
  for (;;) {
    if (!document.hidden) await update();
    await new Promise((done) => setTimeout(done, EVERY));
  }
}
