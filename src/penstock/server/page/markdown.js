// Markdown as it streams: finished blocks are appended once, only the last one is rendered again.

import { copy } from "./dom.js";
import { Marked } from "./vendor/marked.js";
import purify from "./vendor/purify.js";

/** An unfinished block longer than this is shown as plain text until it ends, since it is rendered in each frame. */
const MAX_OPEN = 12_000;

const escape = (text) => text.replace(/[&<>"]/g, (char) => `&#${char.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escape(text), // a model's HTML is text
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`, // not loaded: it may leak
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      const level = Math.min(depth + 1, 6); // the page has its own h1
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: (
    "a blockquote br code del em h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  RETURN_DOM_FRAGMENT: true,
};

/** An element that shows a growing text. */
export class MarkdownView {
  #text = "";
  #finished = 0;
  #open = null;
  #openText = null;
  #openLang;

  /** `onBlock` is called with the text of each block that is finished. */
  constructor(element, onBlock = () => {}) {
    this.element = element;
    this.onBlock = onBlock;
  }

  /** Shows a text. Returns the milliseconds that the next update should wait. */
  update(given, isDone) {
    const began = performance.now();
    const text = given.replace(/\r\n?/g, "\n");
    if (!text.startsWith(this.#text)) this.#clear();
    if (text !== this.#text || isDone) this.#render(text, isDone);
    return 3 * (performance.now() - began);
  }

  #clear() {
    this.element.replaceChildren();
    this.#text = "";
    this.#finished = 0;
    this.#open = this.#openText = null;
  }

  #render(text, isDone) {
    this.#text = text;
    const tokens = marked.lexer(text.slice(this.#finished));
    let last = tokens.length;
    if (!isDone) while (last > 0 && tokens[last - 1].type === "space") last -= 1;
    const finished = isDone ? tokens : tokens.slice(0, Math.max(0, last - 1));
    if (finished.length) this.#finish(finished, tokens.links);
    if (!isDone && last > 0) this.#showOpen(tokens[last - 1], tokens.links);
  }

  #finish(tokens, links) {
    this.#open?.remove();
    this.#open = this.#openText = null;
    for (const token of tokens) {
      this.#finished += token.raw.length;
      if (token.type === "space") continue;
      const block = blockOf(token, links);
      this.onBlock(block.textContent);
      this.element.append(block);
    }
  }

  #showOpen(token, links) {
    const isLong = token.type === "code" || token.raw.length > MAX_OPEN;
    const text = token.type === "code" ? token.text : token.raw;
    if (isLong && this.#openText && this.#openLang === token.lang && text.startsWith(this.#openText.data)) {
      this.#openText.appendData(text.slice(this.#openText.data.length));
      return;
    }
    const block = isLong && token.type !== "code" ? plainBlock(text) : blockOf(token, links);
    if (this.#open) this.#open.replaceWith(block);
    else this.element.append(block);
    this.#open = block;
    this.#openText = isLong ? textNodeOf(block) : null;
    this.#openLang = token.lang;
  }
}

function textNodeOf(block) {
  const element = block.querySelector("code") ?? block;
  if (!element.firstChild) element.append("");
  element.normalize();
  return element.firstChild instanceof Text ? element.firstChild : null;
}

function plainBlock(text) {
  const block = document.createElement("div");
  block.className = "plain";
  block.textContent = text;
  return block;
}

function blockOf(token, links) {
  if (token.type === "code") return codeBlock(token);
  const block = document.createElement("div");
  const tokens = Object.assign([token], { links });
  block.append(purify.sanitize(marked.parser(tokens), ALLOWED));
  for (const link of block.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of block.querySelectorAll("table")) scrollable(table, "Table");
  for (const pre of block.querySelectorAll("pre")) addCodeHead(pre, "");
  return block;
}

function codeBlock({ text, lang }) {
  const block = document.createElement("div");
  const pre = document.createElement("pre");
  const code = document.createElement("code");
  code.textContent = text;
  pre.append(code);
  block.append(pre);
  addCodeHead(pre, (lang ?? "").split(/\s/)[0]);
  return block;
}

function addCodeHead(pre, language) {
  const head = document.createElement("div");
  head.className = "code-head";
  const name = document.createElement("span");
  name.textContent = language || "text";
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.onclick = () => copy(pre.textContent, button);
  head.append(name, button);
  const frame = document.createElement("div");
  frame.className = "code";
  pre.replaceWith(frame);
  pre.tabIndex = 0; // it may scroll
  pre.setAttribute("aria-label", "Code");
  pre.setAttribute("role", "region");
  frame.append(head, pre);
}

function scrollable(element, label) {
  const frame = document.createElement("div");
  frame.className = "scroll";
  frame.tabIndex = 0;
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", label);
  element.replaceWith(frame);
  frame.append(element);
}
