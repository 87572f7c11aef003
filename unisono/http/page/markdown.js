// Markdown to a tree, in three kinds of nodes:
//   { text, at, span }         a text; `at` is its offset in the source, `span` the characters of the source that it
//                              stands for as a whole, or 0 where text and source are equal
//   { tag, props, children }   an element; tags and properties are those that this file writes, never the source's
//   { code, language, children }  a code block
// HTML in the source becomes text. The module needs no DOM.

import { Lexer } from "./vendor/marked/marked.esm.js";

const OPTIONS = { gfm: true, breaks: true };
const SAFE = /^(?:https?:|mailto:)/i;
const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", deg: "°",
  hellip: "…", ndash: "–", mdash: "—", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", laquo: "«", raquo: "»",
  bull: "•", middot: "·", times: "×", divide: "÷", plusmn: "±", le: "≤", ge: "≥", ne: "≠", asymp: "≈", infin: "∞",
  larr: "←", rarr: "→", uarr: "↑", darr: "↓", harr: "↔", euro: "€", pound: "£", yen: "¥", cent: "¢", sect: "§",
  frac12: "½", frac14: "¼", frac34: "¾", sup2: "²", sup3: "³", micro: "µ", para: "¶", check: "✓",
};
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(\w{2,8}));/g;

// The address of a link if it may be followed, else null. Browsers ignore control characters and spaces in schemes.
export function safeLink(href) {
  const address = String(href).replace(/[\u0000-\u0020\u007f-\u00a0\u200b-\u200f\u2028-\u202f\ufeff]/g, "");
  return SAFE.test(address) ? address : null;
}

const element = (tag, children = [], props = {}) => ({ tag, props, children });

// Walks the tokens of one source, with a cursor, so that each text knows its place.
class Walker {
  constructor(source, start) {
    this.source = source;
    this.cursor = start;
    this.end = start;
  }

  // The top-level blocks: nodes and the part of the source that each takes.
  *blocks(tokens) {
    for (const token of tokens) {
      const start = this.end;
      this.end = start + token.raw.length;
      this.cursor = start;
      yield { type: token.type, start, end: this.end, nodes: this.block(token) };
    }
  }

  // Texts for `text`, which the source has from the cursor on: whole, or line by line where lines are indented.
  texts(text) {
    const found = this.find(text);
    if (found !== null) return [{ text, at: found, span: 0 }];
    const lines = text.split(/(?<=\n)/);
    if (lines.length === 1) return [{ text, at: null, span: 0 }];
    return lines.map((line) => {
      const at = this.find(line.trimEnd()) ?? null;
      return { text: line, at, span: 0 };
    });
  }

  find(text) {
    if (text === "") return this.cursor;
    const at = this.source.indexOf(text, this.cursor);
    if (at < 0 || at + text.length > this.end) return null;
    this.cursor = at + text.length;
    return at;
  }

  all(tokens, how) {
    return (tokens ?? []).flatMap((token) => how.call(this, token));
  }

  block(token) {
    switch (token.type) {
      case "space": case "def": return [];
      case "heading": return [element(`h${Math.min(6, token.depth + 2)}`, this.all(token.tokens, this.inline))];
      case "paragraph": return [element("p", this.all(token.tokens, this.inline))];
      case "text": return token.tokens ? this.all(token.tokens, this.inline) : this.literal(token.raw);
      case "html": return [element("p", this.literal(token.raw.trimEnd()))];
      case "code": return [this.code(token)];
      case "blockquote": return [element("blockquote", this.all(token.tokens, this.block))];
      case "hr": return [element("hr")];
      case "list": return [this.list(token)];
      case "table": return [this.table(token)];
      default: return this.inline(token);
    }
  }

  code(token) {
    if (token.codeBlockStyle !== "indented") {
      const start = this.source.indexOf("\n", this.cursor); // after the fence
      if (start >= 0 && start < this.end) this.cursor = start + 1;
    }
    const code = token.text.replace(/\n$/, "");
    return { code, language: /^\S*/.exec(token.lang ?? "")[0], children: this.texts(code) };
  }

  list(token) {
    const items = token.items.map((item) => {
      this.find(item.raw.slice(0, 1)); // past the end of the item before
      return element("li", this.all(item.tokens, (inner) => this.item(inner, item.loose)));
    });
    const props = token.ordered && token.start !== "" && token.start !== 1 ? { start: Number(token.start) } : {};
    return element(token.ordered ? "ol" : "ul", items, props);
  }

  item(token, loose) {
    const nodes = this.block(token);
    return token.type === "text" && loose ? [element("p", nodes)] : nodes;
  }

  table(token) {
    const row = (cells, tag) => element("tr", cells.map((cell) => (
      element(tag, this.all(cell.tokens, this.inline), cell.align ? { className: `to-${cell.align}` } : {})
    )));
    const head = element("thead", [row(token.header, "th")]);
    const body = element("tbody", token.rows.map((cells) => row(cells, "td")));
    return element("table", [head, body]);
  }

  inline(token) {
    switch (token.type) {
      case "text": return token.tokens ? this.all(token.tokens, this.inline) : this.decoded(token.raw);
      case "escape": return this.escape(token);
      case "strong": case "em": case "del": return this.wrapped(token, token.type);
      case "codespan": return [element("code", this.texts(token.text))];
      case "br": return [element("br")];
      case "checkbox": return this.checkbox(token);
      case "link": return this.link(token);
      case "image": return this.image(token);
      case "html": return /^<br\s*\/?>$/i.test(token.raw.trim()) ? [element("br")] : this.literal(token.raw);
      default: return this.literal(token.raw);
    }
  }

  literal(raw) {
    return this.texts(raw);
  }

  // Backslashes before brackets stay: models write formulas as \( … \) and \[ … \].
  escape(token) {
    return this.texts("()[]".includes(token.text) ? token.raw : token.text);
  }

  wrapped(token, tag) {
    return [element(tag, this.all(token.tokens, this.inline))];
  }

  checkbox(token) {
    return [{ text: token.checked ? "☑ " : "☐ ", at: this.find(token.raw.trimEnd()), span: token.raw.length }];
  }

  link(token) {
    const href = safeLink(token.href);
    const start = this.source.indexOf(token.raw, this.cursor);
    const inside = this.all(token.tokens, this.inline);
    if (start >= 0 && start + token.raw.length <= this.end) this.cursor = start + token.raw.length; // past the address
    return href === null ? inside : [element("a", inside, { href })];
  }

  // Pictures are not loaded: the page talks to its own server only.
  image(token) {
    const at = this.find(token.raw);
    const text = { text: `🖼 ${token.text || "picture"}`, at, span: token.raw.length };
    const href = safeLink(token.href);
    return href === null ? [text] : [element("a", [text], { href })];
  }

  // Texts of a text with entities.
  decoded(raw) {
    const nodes = [];
    let done = 0;
    for (const found of raw.matchAll(ENTITY)) {
      const character = entity(found);
      if (character === null) continue;
      if (found.index > done) nodes.push(...this.texts(raw.slice(done, found.index)));
      nodes.push({ text: character, at: this.find(found[0]), span: found[0].length });
      done = found.index + found[0].length;
    }
    if (done < raw.length) nodes.push(...this.texts(raw.slice(done)));
    return nodes;
  }
}

function entity([, decimal, hexadecimal, name]) {
  if (name !== undefined) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : null;
  const code = decimal === undefined ? parseInt(hexadecimal, 16) : Number(decimal);
  return code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : null;
}

// The top-level blocks of a source from `start` on, where a block begins: [{ type, start, end, nodes }].
export function parse(source, start = 0) {
  const tokens = new Lexer(OPTIONS).lex(source.slice(start));
  return [...new Walker(source, start).blocks(tokens)];
}

// The first block that more text may change. A block's first line may still become a part of the block before it until
// that line is complete.
export function growing(source, blocks) {
  let at = blocks.length - 1;
  while (at > 0 && !(blocks[at].nodes.length && source.includes("\n", blocks[at].start))) at -= 1;
  return at;
}
