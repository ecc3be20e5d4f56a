// What all views have in common.

import { LitElement, html, nothing } from './vendor/lit.js';
import { ApiError, access } from './api.js';

const RETRY_MILLISECONDS = 3000;

/** Say something to people who use a screen reader. @param {string} text */
export function announce(text) {
  const place = document.getElementById('announcement');
  if (place) place.textContent = text;
}

/** A component in the light DOM, where the page's style sheet applies. */
export class Component extends LitElement {
  createRenderRoot() {
    return this;
  }
}

/**
 * A view. It shows a failure above its content, and is drawn again when the caller's rights change.
 * Subclasses implement `load`, which is called when the view appears.
 */
export class View extends Component {
  static properties = { failure: { state: true }, isLoaded: { state: true } };

  constructor() {
    super();
    this.failure = '';
    this.isRefused = false; // whether retrying is pointless
    this.isLoaded = false;
    this.onAccess = () => this.reload();
  }

  connectedCallback() {
    super.connectedCallback();
    access.addEventListener('change', this.onAccess);
    this.reload();
  }

  disconnectedCallback() {
    access.removeEventListener('change', this.onAccess);
    super.disconnectedCallback();
  }

  /** Read what the view shows. */
  async load() {}

  async reload() {
    if (!access.caller) return;
    const isDone = await this.attempt(() => this.load());
    if (isDone || this.isRefused) this.isLoaded = true;
    else this.tryAgain();
    this.requestUpdate();
  }

  /** Load again after a while, for example when the server is back. */
  tryAgain() {
    clearTimeout(this.nextTry);
    this.nextTry = setTimeout(() => {
      if (this.isConnected && !this.isReading) this.reload();
    }, RETRY_MILLISECONDS);
  }

  /** Do something, and show the message if it fails. Returns whether it succeeded. */
  async attempt(work) {
    try {
      await work();
      this.failure = '';
      return true;
    } catch (error) {
      this.failure = error.message;
      this.isRefused = error instanceof ApiError && error.status < 500;
      return false;
    }
  }

  failureLine() {
    return this.failure ? html`<p class="failure" role="alert">${this.failure}</p>` : nothing;
  }
}

/** A view whose data are read again and again while it can be seen. */
export class PolledView extends View {
  static pollMilliseconds = 1000;

  connectedCallback() {
    super.connectedCallback();
    this.timer = setInterval(() => {
      if (!document.hidden && !this.isReading) this.reload();
    }, this.constructor.pollMilliseconds);
  }

  disconnectedCallback() {
    clearInterval(this.timer);
    super.disconnectedCallback();
  }

  async reload() {
    this.isReading = true;
    try {
      await super.reload();
    } finally {
      this.isReading = false;
    }
  }
}

/** A button that asks once more before it acts. */
class ConfirmButton extends Component {
  static properties = { label: {}, question: {}, isAsking: { state: true } };

  constructor() {
    super();
    this.label = '';
    this.question = '';
    this.isAsking = false;
  }

  render() {
    if (!this.isAsking) {
      return html`<button type="button" @click=${() => this.ask()}>${this.label}</button>`;
    }
    return html`<span class="confirmation"
      >${this.question}
      <button type="button" class="danger" @click=${() => this.answer(true)}>${this.label}</button>
      <button type="button" @click=${() => this.answer(false)}>Keep</button></span
    >`;
  }

  async ask() {
    this.isAsking = true;
    await this.updateComplete;
    this.querySelector('button')?.focus();
  }

  async answer(isMeant) {
    this.isAsking = false;
    if (isMeant) this.dispatchEvent(new Event('confirm'));
    await this.updateComplete;
    this.querySelector('button')?.focus();
  }
}
customElements.define('confirm-button', ConfirmButton);

/** A button that copies a text, which may also be a function that makes it. */
class CopyButton extends Component {
  static properties = { text: {}, label: {}, isDone: { state: true } };

  constructor() {
    super();
    this.text = '';
    this.label = 'Copy';
    this.isDone = false;
  }

  render() {
    return html`<button type="button" @click=${() => this.copy()}>
      ${this.isDone ? 'Copied' : this.label}
    </button>`;
  }

  async copy() {
    await copyText(typeof this.text === 'function' ? this.text() : this.text);
    this.isDone = true;
    announce('Copied');
    setTimeout(() => {
      this.isDone = false;
    }, 1500);
  }
}
customElements.define('copy-button', CopyButton);

/** Copy a text, also where the page is not served over HTTPS from another machine. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch {
    // `navigator.clipboard` exists only over HTTPS and on localhost, and may be refused
  }
  const area = document.createElement('textarea');
  area.value = text;
  area.className = 'visually-hidden';
  document.body.append(area);
  area.select();
  document.execCommand('copy');
  area.remove();
}

/** Offer a text as a file. */
export function download(name, type, text) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 0);
}
