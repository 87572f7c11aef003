// The chat: the turns of a conversation, sending, stopping, asking again and editing.

import { askForKey, stream } from "./api.js";
import { Answer } from "./answer.js";
import { announce, button, copyButton, disclosure, get, make } from "./dom.js";
import { answering, readNow } from "./numbers.js";
import { Pictures, startPictures, thumbnail } from "./pictures.js";
import { body } from "./settings.js";

const DRAFT = "unisono-question"; // in sessionStorage: what is typed and not sent yet
const talk = get("talk");
const question = get("question");
let turns = []; // { role, message, element, …}; a user's turn has text and pictures, an assistant's an answer
let running = null; // an AbortController
let editing = null; // the turn whose question is edited, and what was typed before
let sticks = true; // the end of the conversation stays in sight

const pictures = new Pictures(() => kept().flatMap((turn) => turn.pictures ?? []), refresh);
const kept = () => (editing ? turns.slice(0, turns.indexOf(editing.turn)) : turns);

function follow() {
  if (sticks) talk.scrollTop = talk.scrollHeight;
}

// Messages for the model: questions that were never answered are left out, save the last turn.
const messages = () => turns.filter((turn, at) => !turn.failed || at === turns.length - 1).map((turn) => turn.message);

// Forget the turns from a place on.
function cut(at) {
  for (const turn of turns.splice(at)) turn.element?.remove();
}

function refresh() {
  get("empty").hidden = turns.length > 0;
  get("send").hidden = running !== null;
  get("stop").hidden = running === null;
  get("send").disabled = !question.value.trim() && !pictures.items.length;
  get("editing").hidden = editing === null;
  talk.setAttribute("aria-busy", String(running !== null));
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
  if (editing === null) sessionStorage.setItem(DRAFT, question.value);
  const last = turns.at(-1);
  for (const turn of turns) {
    turn.answer?.retryButton?.toggleAttribute("hidden", turn !== last || running !== null);
    turn.editButton?.toggleAttribute("disabled", running !== null);
  }
}

function content(text, items) {
  if (!items.length) return text;
  const parts = items.map((item) => ({ type: "image_url", image_url: { url: item.url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// Show a question and add it to the conversation.
function addQuestion(text, items) {
  const turn = { role: "user", text, pictures: items, message: { role: "user", content: content(text, items) } };
  const shown = items.length ? [make("div", { class: "pictures" }, ...items.map(thumbnail))] : [];
  if (text) shown.push(make("p", { class: "asked" }, text));
  turn.editButton = button("edit", "Edit question", () => edit(turn));
  const buttons = make("div", { class: "buttons" }, copyButton(() => text, "Copy question"), turn.editButton);
  turn.element = make("article", { class: "question" }, ...shown, buttons);
  turn.element.setAttribute("aria-label", "Question");
  get("turns").append(turn.element);
  turns.push(turn);
}

function ask() {
  const text = question.value.trim();
  if (running || (!text && !pictures.items.length)) return;
  let settings;
  try { settings = body([]); } catch (error) {
    pictures.tell(error.message);
    return;
  }
  if (editing) cut(turns.indexOf(editing.turn));
  const after = editing?.before ?? { text: "", pictures: [] };
  editing = null;
  const items = pictures.take();
  pictures.tell("");
  addQuestion(text, items);
  question.value = after.text;
  pictures.set(after.pictures);
  sticks = true;
  answer(settings);
}

// Ask for an answer to the conversation, and show it.
async function answer(settings = body([])) {
  const system = settings.messages;
  running = new AbortController();
  const shown = new Answer(get("turns"), follow);
  const last = turns.at(-1);
  if (last) last.failed = false;
  const asked = { ...settings, messages: [...system, ...messages()] };
  refresh();
  follow();
  let failure = null;
  try {
    for await (const chunk of stream("v1/chat/completions", asked, running.signal)) {
      shown.add(chunk);
      answering(shown.first !== null);
    }
  } catch (error) {
    if (error.name !== "AbortError") failure = error;
    shown.finish = error.name === "AbortError" ? "stopped" : "error";
  }
  running = null;
  shown.end(shown.finish ?? "error");
  answering(false);
  if (shown.tokens) turns.push({ role: "assistant", message: shown.message, answer: shown, element: shown.element });
  else if (last) last.failed = true;
  if (failure) readNow();
  if (failure) failed(shown, failure);
  else if (shown.tokens) shown.foot(() => retry(shown));
  else if (shown.finish === "stopped") failed(shown, new Error("You stopped it before the first token."));
  else shown.foot(() => retry(shown));
  announce(failure ? "" : `${shown.how === "stopped" ? "Stopped. " : ""}${shown.plain}`);
  refresh();
  follow();
  if (shown.calls.length && shown.how === "tool_calls") askForResults(shown);
}

function failed(shown, error) {
  const actions = [button("retry", "Try again", () => retry(shown), "Try again")];
  if (error.status === 401) {
    actions.unshift(button("key", "Enter a key", async () => {
      await askForKey();
      retry(shown);
    }, "Enter a key"));
  }
  shown.fail(error, actions);
}

// Ask again in place of an answer, or of one that failed.
function retry(shown) {
  if (running) return;
  const at = turns.findIndex((turn) => turn.answer === shown);
  if (at >= 0) cut(at);
  else shown.element.remove();
  sticks = true;
  answer();
  question.focus();
}

// Fields for what the called functions return, and a button that sends it.
function askForResults(shown) {
  const fields = shown.calls.map((call) => {
    const field = make("textarea", { rows: 2 });
    call.element.append(make("label", {}, `Result of ${call.name}`, field));
    return field;
  });
  const send = make("button", { type: "button", class: "strong" }, "Send results");
  send.addEventListener("click", () => {
    if (running) return;
    shown.calls.forEach((call, at) => {
      turns.push({ role: "tool", message: { role: "tool", tool_call_id: call.id, content: fields[at].value } });
      fields[at].disabled = true;
    });
    send.remove();
    answer();
  });
  shown.element.append(send);
  fields[0].focus();
  follow();
}

// Put an earlier question back into the field. Sending it replaces what follows it.
function edit(turn) {
  if (running) return;
  const before = editing?.before ?? { text: question.value, pictures: pictures.items };
  editing = { turn, before };
  question.value = turn.text;
  pictures.set(turn.pictures);
  question.focus();
}

function cancelEdit() {
  const { before } = editing;
  editing = null;
  question.value = before.text;
  pictures.set(before.pictures);
  question.focus();
}

function restart() {
  running?.abort();
  editing = null;
  cut(0);
  get("turns").replaceChildren();
  refresh();
  question.focus();
}

// Take what the model offers: pictures, and questions to try. model: of /page/state.
export function offer(model) {
  pictures.allow(model.pictures, model.names[0]);
  const list = get("questions");
  get("empty-title").textContent = model.pictures ? "Ask about a picture" : "Ask something";
  get("empty-text").textContent = `${model.names[0]} answers, with up to ${model.max_model_len} tokens of context.`;
  if (list.children.length) return;
  list.replaceChildren(...model.questions.map((text) => {
    const picture = model.pictures ? [make("img", { src: "page/scene.png", alt: "" })] : [];
    const suggestion = make("button", { type: "button", class: "suggestion" }, ...picture, make("span", {}, text));
    suggestion.addEventListener("click", () => tryQuestion(text, model.pictures));
    return make("li", {}, suggestion);
  }));
}

async function tryQuestion(text, seeing) {
  if (running) return;
  if (seeing && !pictures.items.length) {
    const data = await (await fetch("page/scene.png")).blob();
    await pictures.add([new File([data], "scene.png", { type: "image/png" })]);
  }
  question.value = text;
  ask();
}

function startKeys() {
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented) return;
    if (running) running.abort();
    else if (editing) cancelEdit();
  });
}

export function startChat() {
  get("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  question.value = sessionStorage.getItem(DRAFT) ?? "";
  question.addEventListener("input", refresh);
  talk.addEventListener("scroll", () => { sticks = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60; });
  get("stop").addEventListener("click", () => {
    running?.abort();
    question.focus();
  });
  get("new").addEventListener("click", restart);
  get("edit-cancel").addEventListener("click", cancelEdit);
  disclosure(get("settings"), get("settings-panel"));
  disclosure(get("drafts"), get("drafts-panel"));
  const marks = get("marks");
  const mark = () => talk.classList.toggle("marks", marks.checked);
  marks.addEventListener("change", mark);
  mark();
  startPictures(pictures);
  startKeys();
  refresh();
}
