// Shows Markdown that a model writes, while it is written.
//
// The text grows at its end, so finished blocks are rendered once; only the last block is rendered
// again. What a model writes is never trusted: markdown-it escapes HTML, DOMPurify removes whatever
// could act, and the page's Content-Security-Policy allows neither inline scripts nor other hosts.

import DOMPurify from './vendor/dompurify.js';
import MarkdownIt from './vendor/markdown-it.js';
import { copyText } from './view.js';

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

/** An element whose property `text` is shown as Markdown. */
class MarkdownText extends HTMLElement {
  #text = '';
  #fixedLength = 0; // characters whose blocks are rendered for good
  #last = document.createElement('div'); // the last block
  #isDue = false;
  #restMilliseconds = 0;

  connectedCallback() {
    if (!this.#last.isConnected) this.append(this.#last);
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
    const isFirst = this.#text === '';
    this.#text = text;
    if (isFirst) this.#draw();
    else this.#drawSoon();
  }

  #drawSoon() {
    if (this.#isDue) return;
    this.#isDue = true;
    // a long block costs more to render than a frame may take: then it is drawn less often
    setTimeout(() => {
      requestAnimationFrame(() => {
        this.#isDue = false;
        this.#draw();
      });
    }, this.#restMilliseconds);
  }

  #draw() {
    const began = performance.now();
    let rest = this.#text.slice(this.#fixedLength);
    const place = lastBlock(rest);
    if (place > 0) {
      this.#last.before(rendered(rest.slice(0, place)));
      this.#fixedLength += place;
      rest = rest.slice(place);
    }
    this.#last.replaceChildren(rendered(rest));
    this.#restMilliseconds = Math.min(2000, 5 * (performance.now() - began));
  }
}
customElements.define('markdown-text', MarkdownText);
