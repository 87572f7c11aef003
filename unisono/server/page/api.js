// Requests to this server. The key lives in sessionStorage and leaves as a header only.

const STORED = "unisono-key";
const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key-input");
const error = document.getElementById("key-error");
let asking = null;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(STORED) || "";

// Show the dialog; resolves when it is closed. Several requests that fail at once share one dialog.
export function askForKey(message = "") {
  if (asking) return asking;
  error.textContent = message;
  error.hidden = !message;
  input.value = "";
  document.getElementById("key").hidden = false;
  asking = new Promise((done) => {
    dialog.addEventListener("close", () => { asking = null; done(); }, { once: true });
  });
  dialog.showModal();
  return asking;
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (input.value.trim()) sessionStorage.setItem(STORED, input.value.trim());
  dialog.close();
  document.dispatchEvent(new Event("keychange"));
});
document.getElementById("key-forget").addEventListener("click", () => {
  sessionStorage.removeItem(STORED);
  dialog.close();
});
document.getElementById("key").addEventListener("click", () => askForKey());

async function send(path, options) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  return fetch(path, { ...options, headers, credentials: "omit" });
}

// The answer of a route. Asks for a key where the server wants one, unless told not to. Throws ApiError with the server's
// own words.
export async function call(path, options = {}, asks = true) {
  let response = await send(path, options);
  if (response.status === 401) document.getElementById("key").hidden = false;
  if (response.status === 401 && asks) {
    const used = key();
    await askForKey(used ? "The key is wrong." : "");
    if (key() !== used) response = await send(path, options);
  }
  if (!response.ok) {
    const text = await response.text();
    let message = text;
    try { message = JSON.parse(text).error.message; } catch { /* no JSON: the text must do */ }
    throw new ApiError(response.status, message || `HTTP ${response.status}`);
  }
  return response;
}

// Chunks of a stream of server-sent events, as they come. Throws ApiError for an error event.
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      yield chunk;
    }
  }
}
