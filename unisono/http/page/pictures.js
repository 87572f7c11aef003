// Pictures that are attached to a question: chosen, pasted or dropped, checked against the server's limits, shown small.

import { announce, button, get, make, mebibytes } from "./dom.js";

const MARGIN = 1 << 20; // bytes of a body beside its pictures

export class Pictures {
  // used: returns the pictures of the conversation so far. changed: called after each change.
  constructor(used, changed) {
    this.used = used;
    this.changed = changed;
    this.limits = null; // what the server takes; null for a model without vision
    this.model = "The model";
    this.items = [];
    this.list = get("attached");
  }

  // limits: of /page/state.
  allow(limits, model) {
    this.limits = limits;
    this.model = model;
    const opener = get("picture");
    opener.hidden = !limits;
    if (!limits) return;
    get("picture-file").accept = limits.types.join(",");
    opener.title = `Attach pictures: ${this.formats()}, up to ${mebibytes(limits.max_bytes)} each, `
      + `${limits.max_count} in a conversation`;
  }

  formats() {
    return this.limits.types.map((type) => type.replace("image/", "").toUpperCase()).join(", ");
  }

  // Attach these files; says which were refused, and why.
  async add(files) {
    const refused = [];
    for (const file of files) {
      const why = this.refusal(file) ?? await this.attach(file);
      if (why) refused.push(why);
    }
    this.tell([...new Set(refused)].join(" "));
    this.show();
  }

  refusal(file) {
    const { limits } = this;
    const name = file.name || "The picture";
    if (!limits) return `${this.model} takes no pictures.`;
    if (!limits.types.includes(file.type)) return `${name} is not a picture that the server reads (${this.formats()}).`;
    if (file.size > limits.max_bytes) return `${name} has ${mebibytes(file.size)}; the limit is ${mebibytes(limits.max_bytes)}.`;
    const all = [...this.used(), ...this.items];
    if (all.length >= limits.max_count) return `A conversation may have ${limits.max_count} pictures.`;
    const bytes = all.reduce((sum, one) => sum + one.url.length, (4 * file.size) / 3);
    if (bytes > limits.max_body_bytes - MARGIN) {
      return `The pictures of a conversation may have ${mebibytes((3 * limits.max_body_bytes) / 4)} together.`;
    }
    return null;
  }

  async attach(file) {
    const shown = URL.createObjectURL(file);
    const item = { name: file.name || "picture", shown, url: "" };
    const [url, size] = await Promise.all([dataUrl(file), pixels(shown)]);
    if (url === null) return `${item.name} cannot be read.`;
    if (size > this.limits.max_pixels) {
      URL.revokeObjectURL(shown);
      return `${item.name} has ${(size / 1e6).toFixed(1)} million pixels; the limit is ${(this.limits.max_pixels / 1e6).toFixed(1)} million.`;
    }
    item.url = url;
    this.items.push(item);
    announce(`${item.name} attached`);
    return null;
  }

  remove(item) {
    this.items = this.items.filter((one) => one !== item);
    this.show();
    get("question").focus();
  }

  // The attached pictures; they are attached no more.
  take() {
    const { items } = this;
    this.set([]);
    return items;
  }

  set(items) {
    this.items = [...items];
    this.show();
  }

  show() {
    this.list.hidden = !this.items.length;
    this.list.replaceChildren(...this.items.map((item) => make("li", {}, thumbnail(item),
      button("cross", `Remove ${item.name}`, () => this.remove(item)))));
    this.changed();
  }

  tell(message) {
    get("problem").textContent = message;
    get("problem").hidden = !message;
  }
}

// A small picture; its name where the browser cannot show it.
export function thumbnail(item) {
  const picture = make("img", { src: item.shown, alt: item.name, title: item.name });
  picture.addEventListener("error", () => picture.replaceWith(make("span", { class: "unshown" }, item.name)));
  return picture;
}

function dataUrl(file) {
  return new Promise((done) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => done(null));
    reader.readAsDataURL(file);
  });
}

// Pixels of a picture; 0 where the browser cannot tell: then the server checks alone.
function pixels(url) {
  return new Promise((done) => {
    const picture = make("img");
    picture.addEventListener("load", () => done(picture.naturalWidth * picture.naturalHeight));
    picture.addEventListener("error", () => done(0));
    picture.src = url;
  });
}

// Files of a paste or drop.
const filesOf = (transfer) => [...(transfer?.files ?? [])];

// Let pictures come by the button, the clipboard and dropping.
export function startPictures(pictures) {
  const chooser = get("picture-file");
  get("picture").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => {
    await pictures.add([...chooser.files]);
    chooser.value = "";
    get("question").focus();
  });
  get("question").addEventListener("paste", (event) => {
    const files = filesOf(event.clipboardData);
    if (!files.length || event.clipboardData.getData("text/plain")) return;
    event.preventDefault();
    pictures.add(files);
  });
  const over = get("drop");
  const carries = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    over.hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) over.hidden = true;
  });
  document.addEventListener("drop", (event) => {
    over.hidden = true;
    if (!carries(event)) return;
    event.preventDefault();
    pictures.add(filesOf(event.dataTransfer));
  });
}
