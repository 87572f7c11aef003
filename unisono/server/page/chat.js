// The chat: sends the conversation, shows the answer as it comes, and marks each token that an accepted draft brought.

import { stream } from "./api.js";
import { colour, get, make, seconds } from "./dom.js";

const talk = get("talk");
const question = get("question");
let messages = [];
let running = null;

const number = (id) => (get(id).value === "" ? undefined : Number(get(id).value));

function body() {
  const system = get("system").value.trim();
  const tools = get("tools").value.trim();
  const thinking = get("thinking").value;
  const asked = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    return_drafts: true,
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
  };
  if (tools) asked.tools = JSON.parse(tools);
  if (thinking) asked.enable_thinking = thinking === "true";
  if (get("speculative").value) asked.speculative = { enabled: false };
  return asked;
}

// The elements of one answer, and what it says so far.
class Answer {
  constructor() {
    this.element = make("article", { class: "answer running" });
    this.text = null;
    this.thought = null;
    this.message = { role: "assistant", content: "" };
    this.calls = [];
    this.rounds = 0;
    this.tokens = 0;
    this.start = performance.now();
    this.first = null;
    this.drafted = this.accepted = 0;
    talk.append(this.element);
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      if (choice.seed !== undefined) this.seed = choice.seed;
      if (choice.draft) this.count(choice.draft);
      const { reasoning_content: thought, content, tool_calls: calls } = choice.delta;
      if (thought) this.think(thought, choice.draft);
      if (content) this.say(content, choice.draft);
      for (const call of calls ?? []) this.call(call);
      if (choice.finish_reason) this.finish = choice.finish_reason;
    }
  }

  count(draft) {
    this.first ??= performance.now();
    this.last = performance.now();
    this.tokens += 1;
    if (draft.position !== null) this.accepted += 1;
    else {
      this.rounds += 1;
      this.drafted += draft.drafted;
    }
  }

  think(text, draft) {
    if (!this.thought) {
      this.thought = make("div", { class: "thought" });
      this.summary = make("summary", {}, "Thinking …");
      this.element.append(make("details", { class: "thinking" }, this.summary, this.thought));
    }
    this.thought.append(piece(text, draft));
  }

  say(text, draft) {
    if (!this.text) {
      if (this.summary) this.summary.textContent = "Thinking";
      this.text = make("div", { class: "text" });
      this.element.append(this.text);
    }
    this.text.append(piece(text, draft));
    this.message.content += text;
  }

  call(delta) {
    if (!this.calls[delta.index]) {
      const name = make("summary");
      const given = make("pre");
      const element = make("details", { class: "call", open: true }, name, given);
      this.calls[delta.index] = { id: delta.id, name: "", given: "", element, shown: { name, given } };
      this.element.append(element);
      this.text = null; // what is said later stands below
    }
    const call = this.calls[delta.index];
    call.name += delta.function?.name ?? "";
    call.given += delta.function?.arguments ?? "";
    call.shown.name.textContent = `Calls ${call.name}`;
    call.shown.given.textContent = call.given;
  }

  // One line about the answer, when it has ended.
  end(how) {
    this.element.classList.remove("running");
    if (this.summary) this.summary.textContent = "Thinking";
    const facts = [];
    if (this.tokens) {
      const time = (this.last - this.first) / 1000;
      facts.push(`${this.tokens} tokens`);
      if (time > 0 && this.tokens > 1) facts.push(`${((this.tokens - 1) / time).toPrecision(3)} tokens/s`);
      facts.push(`first after ${seconds((this.first - this.start) / 1000)}`);
      if (this.drafted) {
        const length = (this.tokens - 1) / Math.max(1, this.rounds - 1);
        facts.push(`${this.accepted} of ${this.drafted} drafts accepted, ${length.toFixed(2)} tokens a round`);
      } else facts.push("no drafts");
      const cached = this.usage?.prompt_tokens_details.cached_tokens;
      if (this.usage) facts.push(`prompt ${this.usage.prompt_tokens}, ${cached} cached`);
      if (this.seed !== undefined) facts.push(`seed ${this.seed}`);
    }
    if (how !== "stop") facts.push(`ended: ${how}`);
    this.element.append(make("p", { class: "facts" }, facts.join(" · ")));
    if (this.calls.length) {
      this.message.tool_calls = this.calls.map((call) => (
        { id: call.id, type: "function", function: { name: call.name, arguments: call.given } }
      ));
      this.message.content ||= null;
    }
  }
}

// A token's text, marked by where it came from.
function piece(text, draft) {
  if (!draft || (draft.position === null && draft.drafted <= draft.accepted)) return document.createTextNode(text);
  if (draft.position === null) {
    const title = `the model's own, in place of a rejected draft (${draft.accepted} of ${draft.drafted} accepted)`;
    return make("span", { class: "instead", title }, text);
  }
  const title = `accepted draft ${draft.position + 1} of ${draft.drafted} (${draft.accepted} accepted)`;
  return make("span", { class: `draft p${colour(draft.position)}`, title }, text);
}

function follow(work) {
  const near = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
  work();
  if (near) talk.scrollTop = talk.scrollHeight;
}

// Ask for an answer to the conversation, and show it.
async function answer() {
  let asked;
  try { asked = body(); } catch (error) {
    fail(`The tools are no JSON list: ${error.message}`);
    return;
  }
  running = new AbortController();
  busy(true);
  const shown = new Answer();
  follow(() => {});
  let how = "error";
  try {
    for await (const chunk of stream("v1/chat/completions", asked, running.signal)) follow(() => shown.add(chunk));
    how = shown.finish ?? "error";
  } catch (error) {
    if (error.name === "AbortError") how = "stopped";
    else shown.element.append(make("p", { class: "error", role: "alert" }, error.message));
  }
  follow(() => shown.end(how));
  if (shown.tokens) messages.push(shown.message);
  get("said").textContent = shown.message.content || "";
  running = null;
  busy(false);
  if (shown.calls.length && how === "tool_calls") follow(() => askForResults(shown));
  else question.focus();
}

// Fields for what the called functions return, and a button that sends it.
function askForResults(shown) {
  const fields = shown.calls.map((call) => {
    const field = make("textarea", { rows: 2 });
    call.element.append(make("label", {}, `What ${call.name} returns`, field));
    return field;
  });
  const button = make("button", { type: "button" }, "Send results");
  button.addEventListener("click", () => {
    if (running) return;
    shown.calls.forEach((call, at) => {
      messages.push({ role: "tool", tool_call_id: call.id, content: fields[at].value });
      fields[at].disabled = true;
    });
    button.remove();
    answer();
  });
  shown.element.append(button);
  fields[0].focus();
}

function fail(message) {
  talk.append(make("p", { class: "error", role: "alert" }, message));
  talk.scrollTop = talk.scrollHeight;
}

function busy(is) {
  get("send").hidden = is;
  get("stop").hidden = !is;
  talk.setAttribute("aria-busy", String(is));
}

function ask() {
  const text = question.value.trim();
  if (!text || running) return;
  get("empty")?.remove();
  question.value = "";
  messages.push({ role: "user", content: text });
  talk.append(make("p", { class: "asked" }, text));
  talk.scrollTop = talk.scrollHeight;
  answer();
}

export function startChat() {
  get("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  get("stop").addEventListener("click", () => running?.abort());
  get("new").addEventListener("click", () => {
    running?.abort();
    messages = [];
    talk.replaceChildren();
    question.focus();
  });
  const marks = get("marks");
  const mark = () => [talk, get("legend-marks")].forEach((one) => one.classList.toggle("marks", marks.checked));
  marks.addEventListener("change", mark);
  mark();
}
