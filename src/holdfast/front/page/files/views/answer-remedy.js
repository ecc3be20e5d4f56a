// Shows why an answer failed, and offers what helps.

import { html, nothing } from '../vendor/lit.js';
import { chat } from '../chat-state.js';
import { counted } from '../format.js';
import { refusedImage, turnsWithImages } from '../requests.js';
import { Component } from '../view.js';

class AnswerRemedy extends Component {
  static properties = {
    turn: { attribute: false },
    version: { attribute: false },
    trouble: { state: true },
  };

  constructor() {
    super();
    this.trouble = ''; // why the chosen remedy failed
  }

  render() {
    const { text, actions } = this.remedy(this.turn.answer);
    return html`<div class="remedy">
      ${text}
      <p class="actions">
        ${actions.map(
          ([name, act], place) =>
            html`<button
              type="button"
              class=${place ? '' : 'primary'}
              ?disabled=${Boolean(chat.running)}
              @click=${() => this.act(act)}
            >
              ${name}
            </button>`,
        )}
      </p>
      ${this.trouble ? html`<p class="failure" role="alert">${this.trouble}</p>` : nothing}
    </div>`;
  }

  async act(work) {
    this.trouble = '';
    try {
      await work();
    } catch (error) {
      this.trouble = error.message;
    }
  }

  /** @returns {{text: unknown, actions: [string, () => unknown][]}} */
  remedy(answer) {
    const { turn } = this;
    const code = answer.failure?.code;
    const refused = refusedImage(chat.turns, turn);
    const again = ['Try again', () => chat.retry(turn)];
    if (code === 'context_length_exceeded') return this.tooLong(answer);
    // the image may have been removed from its message meanwhile
    if (refused?.turn.leftOut?.[refused.place] === answer.error) {
      const whose = refused.turn.id === turn.parent ? 'your message' : 'an earlier message';
      return {
        text: html`<p class="failure">
            Image ${refused.place + 1} of ${whose} cannot be used: ${answer.error}.
          </p>
          <p>It is left out from now on, so you can continue the conversation.</p>`,
        actions: [['Try again without this image', again[1]]],
      };
    }
    if (code === 'body_too_large') return this.tooLarge(answer, again);
    return {
      text: html`<p class="failure">The answer failed: ${answer.error}</p>`,
      actions: [again],
    };
  }

  tooLarge({ error }, again) {
    const { turn } = this;
    const question = chat.turns.get(turn.parent) ?? turn;
    if (turnsWithImages(chat.turns, question).length) {
      return {
        text: html`<p class="failure">
          The images of this conversation are too large for one request.
        </p>`,
        actions: [['Try again without the earlier images', () => chat.retryWithoutImages(turn)]],
      };
    }
    const { images = [] } = question;
    const sizes = images.map((image) => image.length);
    const largest = sizes.indexOf(Math.max(...sizes)) + 1;
    if (!images.length) {
      return {
        text: html`<p class="failure">The conversation is too large for one request: ${error}.</p>
          <p>Shorten the message with Edit, or continue in a new conversation.</p>`,
        actions: [again],
      };
    }
    return {
      text: html`<p class="failure">The images of your message are too large for one request: ${error}.</p>
        <p>The largest one is image ${largest}. Choose Edit to remove it or to attach a smaller one.</p>`,
      actions: [again],
    };
  }

  tooLong({ model }) {
    const { turn } = this;
    const tokens = chat.modelOf(model)?.context_length;
    const most = tokens ? ` (${counted(tokens, 'token')})` : '';
    const startNew = [
      'Start a new conversation',
      async () => {
        await chat.startNew(chat.turns.get(turn.parent));
        this.dispatchEvent(new CustomEvent('holdfast-go', { bubbles: true, detail: '/' }));
      },
    ];
    if (chat.settings.shortens) {
      return {
        text: html`<p class="failure">
            Even without its middle, this conversation is longer than ${model} can read at once${most}.
          </p>
          <p>Shorten the message with Edit, or continue in a new conversation.</p>`,
        actions: [startNew, ['Try again', () => chat.retry(turn)]],
      };
    }
    return {
      text: html`<p class="failure">
          This conversation has become longer than ${model} can read at once${most}.
        </p>
        <p>
          If you leave out the middle, the model reads the beginning and the latest messages; nothing
          is deleted. A new conversation starts with your last message alone.
        </p>`,
      actions: [
        ['Leave out the middle', () => chat.retry(turn, { shortens: true })],
        startNew,
      ],
    };
  }
}
customElements.define('answer-remedy', AnswerRemedy);
