// The request that the settings make.

import { get, make } from "./dom.js";

const number = (id) => (get(id).value === "" ? undefined : Number(get(id).value));

// A chat body for these messages. Throws an Error that names a setting which is not valid.
export function body(messages) {
  const system = get("system").value.trim();
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
    tools: tools(),
  };
  if (get("served").value) asked.model = get("served").value;
  if (thinking) asked.enable_thinking = thinking === "true";
  if (get("speculative").value) asked.speculative = { enabled: false };
  return asked;
}

function tools() {
  const text = get("tools").value.trim();
  if (!text) return undefined;
  try {
    const list = JSON.parse(text);
    if (Array.isArray(list)) return list;
  } catch (error) {
    throw new Error(`The tools in Settings are not valid JSON: ${error.message}. Correct them or empty the field.`);
  }
  throw new Error("The tools in Settings are not a JSON list. Write [ … ] around them.");
}

// Let the user choose among served names where there are several.
export function offerModels(names) {
  const field = get("served");
  if (field.options.length === names.length) return;
  const chosen = field.value;
  field.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(chosen)) field.value = chosen;
  get("served-field").hidden = names.length < 2;
}
