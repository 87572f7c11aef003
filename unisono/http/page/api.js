// Requests to this server. The key lives in sessionStorage and leaves as a header only.

const STORED = "unisono-key";
const LONGEST_MESSAGE = 600;
const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key-input");
const problem = document.getElementById("key-error");
let asking = null;

// An answer other than 2xx, or a stream that failed. status: 0 where no answer came. code: the server's.
export class ApiError extends Error {
  constructor(status, message, code = null, requestId = null) {
    super(message);
    Object.assign(this, { status, code, requestId });
  }
}

const key = () => sessionStorage.getItem(STORED) || "";

// Show the dialog; resolves when it is closed. Several requests that fail at once share one dialog.
export function askForKey(message = "") {
  if (asking) return asking;
  problem.textContent = message;
  problem.hidden = !message;
  input.value = "";
  offerKey();
  asking = new Promise((done) => {
    dialog.addEventListener("close", () => { asking = null; done(); }, { once: true });
  });
  dialog.showModal();
  return asking;
}

function offerKey() {
  document.getElementById("key").hidden = false;
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
document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
document.getElementById("key").addEventListener("click", () => askForKey());

async function send(path, options) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  try {
    return await fetch(path, { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, `The server at ${location.host} does not answer. Check that it runs, then try again.`);
  }
}

// The answer of a route. Asks for a key where the server wants one, unless told not to. Throws ApiError with the server's
// own words.
export async function call(path, options = {}, asks = true) {
  let response = await send(path, options);
  if (response.status === 401) offerKey();
  if (response.status === 401 && asks) {
    const used = key();
    await askForKey(used ? "This key is not valid." : "");
    if (key() !== used) response = await send(path, options);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const text = await response.text().catch(() => "");
  const id = response.headers.get("x-request-id");
  try {
    const { message, code } = JSON.parse(text).error;
    return new ApiError(response.status, message, code, id);
  } catch { // not this server's form: a proxy's page, perhaps
    const words = text.replace(/<[^>]*>/g, " ").replace(/\s+/g, " ").trim().slice(0, LONGEST_MESSAGE);
    return new ApiError(response.status, words || response.statusText || "No message came.", null, id);
  }
}

// Chunks of a stream of server-sent events, as they come. Throws ApiError for an error event and for a stream that ends
// before its last event.
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
  });
  const id = response.headers.get("x-request-id");
  const cut = () => new ApiError(0, "The connection to the server ended before the answer did.", null, id);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => { throw error.name === "AbortError" ? error : cut(); });
    if (done) throw cut();
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error.message, chunk.error.code, id);
      yield chunk;
    }
  }
}
