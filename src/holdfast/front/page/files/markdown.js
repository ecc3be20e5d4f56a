// Shows Markdown that a model writes, while it is written.
//
// The text grows at its end, so finished blocks are rendered once; only the last block is rendered
// again. What a model writes is never trusted: markdown-it escapes HTML, DOMPurify removes whatever
// could act, and the page's Content-Security-Policy allows neither inline scripts nor other hosts.

import DOMPurify from './vendor/dompurify.js';
import MarkdownIt from './vendor/markdown-it.js';
import { copyText } from './view.js';

const PIECE = 3000; // characters of a long text that are rendered at once
const MOST_PARSED = 100_000; // characters; a longer block is shown as it is
const FRAME_MILLISECONDS = 12; // of a frame, for drawing
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const markdown = new MarkdownIt({ html: false, linkify: true });
const CLEAN = {
  ALLOWED_TAGS: (
    'p br hr h1 h2 h3 h4 h5 h6 strong em s code pre blockquote ul ol li a table thead tbody tr th td'
  ).split(' '),
  ALLOWED_ATTR: ['href', 'title', 'start', 'class'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
// images would tell other hosts that the answer is read, so they become links
markdown.renderer.rules.image = (tokens, index) => {
  const token = tokens[index];
  const label = markdown.utils.escapeHtml(token.content || 'image');
  const source = markdown.utils.escapeHtml(token.attrGet('src') ?? '');
  return `<a href="${source}">${label}</a>`;
};

/** @param {string} source @returns {DocumentFragment} */
export function rendered(source) {
  const fragment = DOMPurify.sanitize(markdown.render(source), CLEAN);
  for (const link of fragment.querySelectorAll('a')) {
    link.target = '_blank';
    link.rel = 'noopener noreferrer';
  }
  for (const block of fragment.querySelectorAll('pre')) addCopyButton(block);
  for (const table of fragment.querySelectorAll('table')) {
    const frame = document.createElement('div');
    frame.className = 'table-frame';
    frame.tabIndex = 0;
    frame.setAttribute('role', 'region');
    frame.setAttribute('aria-label', 'Table');
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function addCopyButton(block) {
  block.tabIndex = 0;
  const code = block.textContent ?? '';
  const frame = document.createElement('div');
  frame.className = 'code-frame';
  const button = document.createElement('button');
  button.type = 'button';
  button.textContent = 'Copy code';
  button.addEventListener('click', () => copyText(code));
  block.replaceWith(frame);
  frame.append(block, button);
}

/** Where the last block of a source begins; 0 if it has only one. @param {string} source */
function lastBlock(source) {
  const blocks = markdown.parse(source, {}).filter((token) => token.level === 0 && token.map);
  const line = blocks.at(-1)?.map[0] ?? 0;
  let place = 0;
  for (let passed = 0; passed < line; passed += 1) place = source.indexOf('\n', place) + 1;
  return place;
}

/**
 * Where a long source can be cut so that its parts render like the whole: after the last blank line
 * within `PIECE` characters, or else after the first one later, that is in no code block and is not
 * followed by an indented line. Without one, the end. @param {string} source
 */
function firstCut(source) {
  let fence = '';
  let place = 0;
  let found = 0;
  let isBlank = false;
  while (place < source.length && !(found && place > PIECE)) {
    const next = source.indexOf('\n', place) + 1 || source.length;
    const line = source.slice(place, next);
    const mark = FENCE.exec(line)?.[1] ?? '';
    if (!fence && isBlank && /^[^\s]/.test(line)) found = place;
    if (!fence) fence = mark;
    else if (mark.startsWith(fence) && line.trim() === mark) fence = '';
    isBlank = !line.trim();
    place = next;
  }
  return found || source.length;
}

// texts that are far from the visible part of the page are drawn when they come nearer
const nearby = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) target.comeNear();
    }
  },
  { rootMargin: '1500px 0px' },
);

const waiting = new Set(); // elements that are to be drawn

/** Draw elements one after the other, and in each frame only as much as it has time for. */
function drawInTurn(element) {
  waiting.add(element);
  if (waiting.size === 1) requestAnimationFrame(drawFrame);
}

function drawFrame() {
  const began = performance.now();
  for (const element of waiting) {
    let isDone = false;
    while (!isDone && performance.now() - began < FRAME_MILLISECONDS) isDone = element.drawPiece();
    if (!isDone) break;
    waiting.delete(element);
  }
  if (waiting.size) requestAnimationFrame(drawFrame);
}

/**
 * An element whose property `text` is shown as Markdown. A text that is not drawn yet is shown as it
 * is, so that the browser finds words in it. The element is `aria-busy` until the text that came last
 * is drawn.
 */
class MarkdownText extends HTMLElement {
  #text = '';
  #fixedLength = 0; // characters whose blocks are rendered for good
  #last = document.createElement('div'); // the last block
  #isNear = false;
  #isDue = false;
  #restMilliseconds = 0;

  connectedCallback() {
    if (!this.#last.isConnected) this.append(this.#last);
    if (!this.#isNear) nearby.observe(this);
  }

  disconnectedCallback() {
    nearby.unobserve(this);
  }

  comeNear() {
    this.#isNear = true;
    nearby.unobserve(this);
    this.#drawSoon();
  }

  get text() {
    return this.#text;
  }

  set text(text) {
    if (text === this.#text) return;
    if (!text.startsWith(this.#text.slice(0, this.#fixedLength))) {
      this.#fixedLength = 0;
      this.replaceChildren(this.#last);
    }
    this.#text = text;
    if (this.#isNear) this.#drawSoon();
    else this.#showRest();
  }

  #showRest() {
    this.#last.className = 'text';
    this.#last.textContent = this.#text.slice(this.#fixedLength);
  }

  #drawSoon() {
    if (this.#isDue) return;
    this.#isDue = true;
    this.setAttribute('aria-busy', 'true');
    // a long block costs more to render than a frame may take: then it is drawn less often
    setTimeout(() => drawInTurn(this), this.#restMilliseconds);
  }

  /** Draw a piece of the text; returns whether it was the last one. */
  drawPiece() {
    const began = performance.now();
    let rest = this.#text.slice(this.#fixedLength);
    const cut = rest.length > PIECE ? firstCut(rest) : rest.length;
    if (cut < rest.length) {
      this.#fix(rest, cut);
      this.#showRest();
      return false;
    }
    const place = rest.length > MOST_PARSED ? 0 : lastBlock(rest);
    if (place > 0) rest = this.#fix(rest, place);
    this.#last.className = '';
    this.#last.replaceChildren(rest.length > MOST_PARSED ? plain(rest) : rendered(rest));
    this.#restMilliseconds = Math.min(2000, 5 * (performance.now() - began));
    this.#isDue = false;
    this.removeAttribute('aria-busy');
    return true;
  }

  /** Render the first characters of the rest for good; returns what is left. */
  #fix(rest, length) {
    const text = rest.slice(0, length);
    this.#last.before(length > MOST_PARSED ? plain(text) : rendered(text));
    this.#fixedLength += length;
    return rest.slice(length);
  }
}
customElements.define('markdown-text', MarkdownText);

/** A block that is too long to be parsed. */
function plain(text) {
  const block = document.createElement('p');
  block.className = 'text';
  block.textContent = text;
  return block;
}
