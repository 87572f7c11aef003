// Shows Markdown that grows, with marks of drafted tokens. Elements are made of the tree in markdown.js, so no text of a
// model is ever parsed as HTML.

import { copyButton, make } from "./dom.js";
import { growing, parse } from "./markdown.js";

const ENDS_LATER = /^ {0,3}\[[^\]\n]+\]:/m; // a link's address that the text gives later

export class Markdown {
  // element: where it is shown. whenShown: called after each change.
  constructor(element, whenShown = () => {}) {
    this.element = element;
    this.whenShown = whenShown;
    this.source = "";
    this.marks = []; // { end, name, title }: of the source up to `end`, from the end of the mark before
    this.stable = 0; // blocks before this offset do not change any more
    this.stableNodes = 0;
    this.starts = []; // of the blocks that are shown
    this.frame = null;
  }

  // More text of one token. mark: { name, title } or null.
  append(text, mark) {
    const clean = text.replaceAll("\r", "");
    if (!clean) return;
    this.source += clean;
    const last = this.marks.at(-1);
    if (last && !last.name && !mark) last.end = this.source.length;
    else this.marks.push({ end: this.source.length, name: mark?.name, title: mark?.title });
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  // Show all that has come.
  show() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const blocks = parse(this.source, this.stable);
    this.starts = [...this.starts.filter((start) => start < this.stable), ...blocks.map((block) => block.start)];
    while (this.element.childNodes.length > this.stableNodes) this.element.lastChild.remove();
    const open = growing(this.source, blocks);
    blocks.forEach((block, at) => {
      if (at === open) {
        this.stable = block.start;
        this.stableNodes = this.element.childNodes.length;
      }
      this.element.append(...this.build(block.nodes));
    });
    this.whenShown();
  }

  // No more text comes: show the same as for the whole text at once.
  end() {
    this.show();
    const starts = parse(this.source).map((block) => block.start);
    if (!ENDS_LATER.test(this.source) && String(starts) === String(this.starts)) return;
    this.stable = this.stableNodes = 0;
    this.show();
  }

  build(nodes) {
    return nodes.flatMap((node) => {
      if (node.text !== undefined) return this.pieces(node);
      if (node.code !== undefined) return [this.codeBlock(node)];
      const made = make(node.tag, node.props, ...this.build(node.children));
      if (node.tag === "a") Object.assign(made, { target: "_blank", rel: "noopener noreferrer nofollow" });
      return node.tag === "table" ? [make("div", { class: "table", tabIndex: 0 }, made)] : [made];
    });
  }

  codeBlock(node) {
    const language = make("span", { class: "language" }, node.language || "text");
    const head = make("div", { class: "code-head" }, language, copyButton(() => node.code, "Copy code"));
    const code = make("pre", { tabIndex: 0 }, make("code", {}, ...this.build(node.children)));
    return make("div", { class: "code" }, head, code);
  }

  // A text cut where its marks change.
  pieces({ text, at, span }) {
    if (at === null) return [text];
    const made = [];
    let place = this.markAt(at);
    if (span) return [marked(text, this.marks[place])];
    for (let done = 0; done < text.length; place += 1) {
      const mark = this.marks[place];
      const end = mark ? Math.min(text.length, mark.end - at) : text.length;
      if (end > done) made.push(marked(text.slice(done, end), mark));
      done = Math.max(done, end);
    }
    return made;
  }

  // The number of the mark at an offset of the source.
  markAt(offset) {
    let [low, high] = [0, this.marks.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.marks[middle].end <= offset) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

const marked = (text, mark) => (mark?.name ? make("span", { class: mark.name, title: mark.title }, text) : text);
