// One answer: its elements, its message for the conversation, and what is counted while it comes.

import { button, colour, copyButton, make, seconds } from "./dom.js";
import { Markdown } from "./render.js";

const ENDS = {
  length: "ended at the token limit", stopped: "stopped", abort: "ended by the server", error: "not finished",
  content_filter: "filtered",
};

export class Answer {
  // parent: the list of turns. whenShown: called when more is visible.
  constructor(parent, whenShown) {
    this.whenShown = whenShown;
    this.element = make("article", { class: "answer running" });
    this.element.setAttribute("aria-label", "Answer");
    this.pending = make("p", { class: "pending" }, make("i"), make("i"), make("i"));
    this.pending.append(make("span", { class: "hidden" }, "Waiting for the first token"));
    this.element.append(this.pending);
    this.text = this.thought = this.summary = null;
    this.markdowns = [];
    this.message = { role: "assistant", content: "" };
    this.calls = [];
    this.rounds = this.tokens = this.drafted = this.accepted = 0;
    this.start = performance.now();
    this.first = this.last = null;
    parent.append(this.element);
  }

  add(chunk) {
    this.id ??= chunk.id;
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

  // A place for Markdown.
  block(name) {
    this.pending.remove();
    const element = make("div", { class: `${name} markdown` });
    const markdown = new Markdown(element, this.whenShown);
    this.markdowns.push(markdown);
    return markdown;
  }

  think(text, draft) {
    if (!this.thought) {
      this.thought = this.block("thought");
      this.summary = make("summary", {}, "Thinking …");
      this.element.append(make("details", { class: "thinking" }, this.summary, this.thought.element));
    }
    this.thought.append(text, mark(draft));
  }

  say(text, draft) {
    if (!this.text) {
      if (this.summary) this.summary.textContent = "Thinking";
      this.text = this.block("text");
      this.element.append(this.text.element);
    }
    this.text.append(text, mark(draft));
    this.message.content += text;
  }

  call(delta) {
    if (!this.calls[delta.index]) {
      this.pending.remove();
      const name = make("summary");
      const given = make("pre", { tabIndex: 0 });
      const element = make("details", { class: "call", open: true }, name, given);
      this.calls[delta.index] = { id: delta.id, name: "", given: "", element, shown: { name, given } };
      this.element.append(element);
      this.text = null; // later text stands below
    }
    const call = this.calls[delta.index];
    call.name += delta.function?.name ?? "";
    call.given += delta.function?.arguments ?? "";
    call.shown.name.textContent = `Calls ${call.name}`;
    call.shown.given.textContent = call.given;
    this.whenShown();
  }

  // The answer has ended. how: the finish reason, "stopped" or "error".
  end(how) {
    this.how = how;
    this.markdowns.forEach((one) => one.end());
    this.pending.remove();
    this.element.classList.remove("running");
    if (this.summary) this.summary.textContent = "Thinking";
    if (this.calls.length) {
      this.message.tool_calls = this.calls.map((call) => (
        { id: call.id, type: "function", function: { name: call.name, arguments: call.given } }
      ));
      this.message.content ||= null;
    }
  }

  // The line below the answer: buttons and figures. retry: asks again.
  foot(retry) {
    const facts = this.facts();
    const more = make("dl", { class: "more", hidden: true }, ...this.details().map(([name, value]) => (
      make("div", {}, make("dt", {}, name), make("dd", {}, value))
    )));
    const info = button("info", "More about this answer", () => {
      more.hidden = !more.hidden;
      info.setAttribute("aria-expanded", String(!more.hidden));
      this.whenShown();
    });
    info.setAttribute("aria-expanded", "false");
    this.retryButton = button("retry", "Ask again", retry);
    const buttons = [copyButton(() => this.message.content ?? "", "Copy answer"), this.retryButton, info];
    if (!this.message.content) buttons.shift();
    if (!this.tokens) buttons.pop();
    this.element.append(make("div", { class: "foot" }, make("div", { class: "buttons" }, ...buttons),
      make("p", { class: "facts" }, facts.join(" · "))), more);
  }

  facts() {
    const facts = [];
    if (this.tokens) {
      const time = (this.last - this.first) / 1000;
      facts.push(`${this.tokens} tokens`);
      if (time > 0 && this.tokens > 1) facts.push(`${rate((this.tokens - 1) / time)} tokens/s`);
      facts.push(`first token ${seconds((this.first - this.start) / 1000)}`);
      if (this.drafted) facts.push(`${this.accepted} of ${this.drafted} drafts accepted`);
    }
    if (ENDS[this.how]) facts.push(ENDS[this.how]);
    return facts;
  }

  details() {
    const found = [];
    if (this.drafted) found.push(["Tokens per round", ((this.tokens - 1) / Math.max(1, this.rounds - 1)).toFixed(2)]);
    if (this.usage) {
      found.push(["Prompt tokens", String(this.usage.prompt_tokens)]);
      found.push(["of these cached", String(this.usage.prompt_tokens_details?.cached_tokens ?? 0)]);
    }
    if (this.seed !== undefined) found.push(["Seed", String(this.seed)]);
    if (this.last) found.push(["Whole answer", seconds((this.last - this.start) / 1000)]);
    if (this.finish) found.push(["Finish reason", this.finish]);
    if (this.id) found.push(["Request", this.id]);
    return found;
  }

  // Say what went wrong. actions: buttons.
  fail(error, actions) {
    this.pending.remove();
    const title = this.tokens ? "The answer was cut off" : "There is no answer";
    const parts = [make("strong", {}, title), make("p", {}, error.message)];
    const told = [error.status ? `HTTP ${error.status}` : "", error.status >= 500 && error.requestId ? `request ${error.requestId}` : ""];
    if (told.some(Boolean)) parts.push(make("p", { class: "quiet" }, told.filter(Boolean).join(" · ")));
    const card = make("div", { class: "failure error" }, ...parts, make("div", { class: "row" }, ...actions));
    card.setAttribute("role", "alert");
    this.element.append(card);
    this.whenShown();
  }

  // The text as it is shown.
  get plain() {
    return this.markdowns.filter((one) => one !== this.thought).map((one) => one.element.innerText).join("\n");
  }
}

const rate = (value) => (value < 100 ? value.toFixed(1) : String(Math.round(value)));

// How a token is marked: an accepted draft, or the model's own in place of a rejected one.
function mark(draft) {
  if (!draft || (draft.position === null && draft.drafted <= draft.accepted)) return null;
  const round = `${draft.accepted} of ${draft.drafted} accepted in this round`;
  if (draft.position === null) return { name: "instead", title: `the model’s own token, in place of a rejected draft (${round})` };
  return { name: `draft p${colour(draft.position)}`, title: `accepted draft ${draft.position + 1} (${round})` };
}
