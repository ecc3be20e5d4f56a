// The form for a message: text and images. Its content is kept as a draft until it is sent, so that
// switching views or reloading does not lose it.

import { html, live, nothing } from '../vendor/lit.js';
import { chat } from '../chat-state.js';
import { deleteDraft, readDraft, saveDraft } from '../conversations.js';
import { titleOf } from '../edits.js';
import { ACCEPTED, dataUrlOf, imagesAmong, takesImages } from '../images.js';
import { counted } from '../format.js';
import { tabs } from '../tabs.js';
import { Component, announce } from '../view.js';

const SAVE_MILLISECONDS = 300; // with images, which are slow to store

/** Events: `cancel`. The property `send` sends the message; it may throw. */
class MessageForm extends Component {
  static properties = {
    draftId: { attribute: false },
    edited: { attribute: false }, // the message that is edited; null: a new one
    answer: { attribute: false }, // the turn of the running answer, if there is one
    version: { attribute: false }, // changes with the model
    text: { state: true },
    images: { state: true },
    notice: { state: true },
  };

  constructor() {
    super();
    this.draftId = '';
    this.edited = null;
    this.answer = null;
    this.send = async () => {};
    this.text = '';
    this.images = []; // as data URLs
    this.notice = ''; // why something was not attached or not sent
    this.timer = 0;
    this.changes = 0; // of the text or the images, by the user
    this.isOwn = false; // whether the content was changed here since it was read
    this.attaching = Promise.resolve();
    this.isSending = false;
    this.onDraft = ({ detail }) => {
      if (detail === this.draftId) this.follow();
    };
    this.onSent = ({ detail: { id, text } }) => {
      if (id !== this.draftId || this.isSending) return;
      if (!this.isOwn || this.text === text) this.reset();
      else if (this.text || this.images.length) this.set({}); // theirs may have been stored over it
    };
    this.onHide = () => this.flush();
  }

  connectedCallback() {
    super.connectedCallback();
    tabs.addEventListener('draft', this.onDraft);
    tabs.addEventListener('sent', this.onSent);
    addEventListener('pagehide', this.onHide);
    document.addEventListener('visibilitychange', this.onHide);
  }

  disconnectedCallback() {
    this.flush();
    tabs.removeEventListener('draft', this.onDraft);
    tabs.removeEventListener('sent', this.onSent);
    removeEventListener('pagehide', this.onHide);
    document.removeEventListener('visibilitychange', this.onHide);
    super.disconnectedCallback();
  }

  willUpdate(changed) {
    if (!changed.has('draftId')) return;
    const before = changed.get('draftId');
    if (before) this.flush(before);
    this.reset();
    this.notice = '';
    if (this.draftId) this.load();
  }

  reset() {
    this.replaceWith(this.edited ?? { text: '' });
  }

  replaceWith({ text, images = [] }) {
    this.isOwn = false;
    this.text = text;
    this.images = images;
  }

  /** Show the stored draft; what was typed before it was read comes after it. */
  async load() {
    const { draftId, changes } = this;
    const draft = await this.stored();
    if (!draft || draftId !== this.draftId) return;
    if (changes === this.changes) this.replaceWith(draft);
    else this.putBefore(draft);
  }

  /** Show what another tab has stored, unless the user is typing or sending here. */
  async follow() {
    const { draftId, changes } = this;
    const draft = await this.stored();
    const isTyped = this.timer || changes !== this.changes;
    const isTyping = isTyped || this.contains(document.activeElement);
    if (draftId !== this.draftId || isTyping || this.isSending) return;
    if (draft) this.replaceWith(draft);
    else if (!this.edited) this.reset();
  }

  stored() {
    return readDraft(this.draftId).catch((error) => {
      this.notice = error.message;
    });
  }

  /** Put text and images before what was typed meanwhile. */
  putBefore({ text, images }) {
    const texts = [text, this.text].filter(Boolean);
    this.set({ text: texts.join('\n\n'), images: [...images, ...this.images] });
  }

  /** Change the text or the images, and save the draft soon. */
  set(change) {
    Object.assign(this, change);
    this.changes += 1;
    this.isOwn = true;
    clearTimeout(this.timer);
    const pause = this.images.length ? SAVE_MILLISECONDS : 0;
    this.timer = setTimeout(() => this.flush(), pause);
  }

  /** Save the draft now, if it has changed. */
  flush(id = this.draftId) {
    if (!this.timer) return;
    clearTimeout(this.timer);
    this.timer = 0;
    const { text, images } = this;
    const draft = { id, text, images, ...(this.edited === null && { title: titleOf(text) }) };
    const save = saveDraft(draft).then(() => chat.noteDraft(id));
    save.catch((error) => {
      this.notice = `This draft could not be saved: ${error.message}`;
    });
  }

  get model() {
    return chat.settings.model;
  }

  get seesImages() {
    return takesImages(chat.modelOf(this.model));
  }

  /** Why the attached images cannot be sent; empty if they can. */
  get unreadableImages() {
    if (!this.images.length || !chat.models.length || this.seesImages) return '';
    return `${this.model} reads text only. Remove the images, or choose a model that takes images.`;
  }

  get canSend() {
    const isPossible = chat.settings.model && !this.unreadableImages;
    return Boolean(isPossible && !this.answer && !this.isSending);
  }

  render() {
    const notice = this.unreadableImages || this.notice;
    const isNew = this.edited === null;
    return html`<form @submit=${(event) => this.submit(event)}>
      <label for=${isNew ? 'message' : `edit-${this.draftId}`}>
        ${isNew ? 'Message' : 'Edited message'}
      </label>
      ${this.attached()}
      <p class=${notice ? 'failure' : 'visually-hidden'} role="status">${notice}</p>
      <textarea
        id=${isNew ? 'message' : `edit-${this.draftId}`}
        rows=${isNew ? 2 : 4}
        .value=${live(this.text)}
        @input=${(event) => this.set({ text: event.target.value })}
        @keydown=${(event) => this.onKey(event)}
        @paste=${(event) => this.take(event, event.clipboardData)}
      ></textarea>
      <p class="actions">
        <button class="primary" ?disabled=${!this.canSend}>${isNew ? 'Send' : 'Send again'}</button>
        ${isNew ? this.stopButton() : this.cancelButton()} ${this.seesImages ? this.chooser() : nothing}
        ${isNew ? html`<span class="hint keys">Enter to send, Shift+Enter for a new line</span>` : nothing}
      </p>
    </form>`;
  }

  stopButton() {
    if (!this.answer) return nothing;
    return html`<button type="button" @click=${() => this.stop()}>Stop</button>`;
  }

  cancelButton() {
    const cancel = async () => {
      const { draftId } = this;
      clearTimeout(this.timer);
      this.timer = 0;
      await deleteDraft(draftId);
      await chat.noteDraft(draftId);
      this.dispatchEvent(new Event('cancel'));
    };
    return html`<button type="button" @click=${cancel}>Cancel</button>`;
  }

  chooser() {
    return html`<label class="button"
      >Attach images
      <input
        class="visually-hidden"
        type="file"
        multiple
        accept=${ACCEPTED}
        @change=${(event) => this.choose(event.target)}
    /></label>`;
  }

  /** The images that the message will have. */
  attached() {
    if (!this.images.length) return nothing;
    return html`<ul class="images" aria-label="Attached images">
      ${this.images.map(
        (image, place) =>
          html`<li>
            <img src=${image} alt="Attached image ${place + 1}" />
            <button
              type="button"
              aria-label="Remove image ${place + 1}"
              @click=${() => this.set({ images: this.images.toSpliced(place, 1) })}
            >
              ×
            </button>
          </li>`,
      )}
    </ul>`;
  }

  /**
   * Attach pasted or dropped images. Pasted text is left to the browser, even if an office program
   * copied a picture of it along with it.
   */
  async take(event, transfer) {
    const files = [...(transfer?.files ?? [])];
    const isText = event.type === 'paste' && transfer?.types.includes('text/plain');
    if (!files.length || isText) return;
    event.preventDefault();
    await this.attach(files);
  }

  async choose(input) {
    await this.attach([...input.files]);
    input.value = ''; // so that the same file can be chosen again
  }

  async attach(given) {
    const files = imagesAmong(given);
    this.notice = '';
    if (!this.seesImages) this.notice = `${this.model} reads text only.`;
    else if (files.length < given.length) this.notice = 'Only images can be attached.';
    if (!this.seesImages || !files.length) return;
    const { draftId, edited } = this;
    const attach = async () => {
      try {
        const images = await Promise.all(files.map(dataUrlOf));
        if (!this.shows(draftId)) {
          await this.keep(draftId, edited, images);
          return;
        }
        this.set({ images: [...this.images, ...images] });
        announce(`${counted(images.length, 'image')} attached`);
      } catch (error) {
        this.notice = error.message;
      }
    };
    this.attaching = this.attaching.then(attach);
    await this.attaching;
  }

  /** Whether the user still sees this draft here. */
  shows(draftId) {
    return this.isConnected && draftId === this.draftId;
  }

  /** Add images to the draft of a conversation that the user has left. */
  async keep(id, edited, images) {
    const isNew = edited === null;
    const empty = { id, text: edited?.text ?? '', images: edited?.images ?? [] };
    const draft = (await readDraft(id)) ?? { ...empty, ...(isNew && { title: titleOf('') }) };
    await saveDraft({ ...draft, images: [...draft.images, ...images] });
    await chat.noteDraft(id);
  }

  onKey(event) {
    const isSend = event.key === 'Enter' && !event.shiftKey && !event.isComposing;
    if (isSend && this.edited === null) this.submit(event);
  }

  /**
   * Send the message, with the images that are being attached. If the user opens another
   * conversation meanwhile, nothing is sent.
   */
  async submit(event) {
    event.preventDefault();
    if (!this.canSend) return;
    const { draftId } = this;
    this.isSending = true;
    try {
      await this.attaching;
      if (!this.shows(draftId)) return;
      if (!this.unreadableImages && (this.text.trim() || this.images.length)) await this.sendNow();
    } finally {
      this.isSending = false;
      this.requestUpdate();
    }
  }

  /** The form is empty at once, for the next message; if sending fails, its content comes back. */
  async sendNow() {
    const { draftId, text, images } = this;
    const isNew = this.edited === null;
    this.notice = '';
    this.flush(); // a draft until it is sent
    if (isNew) {
      this.changes += 1;
      this.reset();
    }
    try {
      await this.send(text, images);
    } catch (error) {
      this.notice = error.message;
      if (!isNew || draftId !== this.draftId) return;
      this.putBefore({ text, images });
    }
  }

  async stop() {
    try {
      await chat.stop(this.answer.id);
    } catch (error) {
      this.notice = `The answer could not be stopped: ${error.message}`;
    }
  }
}
customElements.define('message-form', MessageForm);
