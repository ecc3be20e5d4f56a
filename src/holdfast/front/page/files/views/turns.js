// The turns of a conversation: messages of the user and answers of the model.

import { html, nothing } from '../vendor/lit.js';
import { textOf } from '../answers.js';
import { chat } from '../chat-state.js';
import { readDraft } from '../conversations.js';
import { count, counted, percent, seconds } from '../format.js';
import '../markdown.js';
import { Component, announce, copyText } from '../view.js';
import './answer-progress.js';
import './answer-remedy.js';
import './message-form.js';

/** A key that changes whenever an answer must be redrawn. */
export function versionOf(turn) {
  const { status, seen, waits } = turn.answer;
  const versions = chat.alternatives(turn).length;
  const isLost = chat.followers.get(turn.id)?.isLost;
  const { shortens } = chat.settings;
  return [status, seen, versions, waits?.for, isLost, shortens, Boolean(chat.running)].join(' ');
}

function branches(turn) {
  const all = chat.alternatives(turn);
  if (all.length < 2) return nothing;
  const place = all.indexOf(turn);
  const choose = (step) => () => chat.choose(all[place + step]);
  return html`<span class="branches">
    <button
      type="button"
      aria-label="Previous version"
      ?disabled=${place === 0}
      @click=${choose(-1)}
    >
      ‹
    </button>
    ${place + 1} of ${all.length}
    <button
      type="button"
      aria-label="Next version"
      ?disabled=${place === all.length - 1}
      @click=${choose(1)}
    >
      ›
    </button>
  </span>`;
}

/** The images of a message. Those that are no longer sent can be removed. */
function sentImages(turn, isBusy) {
  const { images, leftOut = {} } = turn;
  if (!images) return nothing;
  return html`<ul class="images" aria-label="Images">
    ${images.map((image, place) => {
      const name = `image ${place + 1}`;
      if (!(place in leftOut)) return html`<li><img src=${image} alt="Image ${place + 1}" /></li>`;
      return html`<li class="left-out">
        <img src=${image} alt="Image ${place + 1}" />
        <span class="hint">Left out: ${leftOut[place]}</span>
        <button
          type="button"
          aria-label="Remove ${name}"
          ?disabled=${isBusy}
          @click=${() => chat.removeImage(turn, place)}
        >
          ×
        </button>
      </li>`;
    })}
  </ul>`;
}

/** A message of the user. */
class ChatQuestion extends Component {
  static properties = {
    turn: { attribute: false },
    isBusy: { attribute: false },
    isEditing: { state: true },
  };

  constructor() {
    super();
    this.isEditing = false;
  }

  async connectedCallback() {
    super.connectedCallback();
    // resume an edit that was in progress when the page was closed
    if (await readDraft(this.turn.id).catch(() => undefined)) this.isEditing = true;
  }

  render() {
    const { text } = this.turn;
    return html`<div class="turn question" role="group" aria-label="You">
      ${this.isEditing
        ? this.editor()
        : html`${sentImages(this.turn, this.isBusy)}
            <p class="text">${text}</p>`}
      <p class="turn-actions">
        ${branches(this.turn)}
        ${text
          ? html`<button type="button" @click=${() => copyText(text)}>Copy</button>`
          : nothing}
        <button
          type="button"
          ?disabled=${this.isBusy || this.isEditing}
          @click=${() => this.edit()}
        >
          Edit
        </button>
      </p>
    </div>`;
  }

  editor() {
    return html`<message-form
      .draftId=${this.turn.id}
      .edited=${this.turn}
      .answer=${chat.running}
      .version=${`${chat.settings.model} ${chat.models.length}`}
      .send=${(text, images) => this.sendAgain(text, images)}
      @cancel=${() => {
        this.isEditing = false;
      }}
    ></message-form>`;
  }

  async edit() {
    this.isEditing = true;
    await this.updateComplete;
    await this.querySelector('message-form')?.updateComplete;
    this.querySelector('textarea')?.focus();
  }

  async sendAgain(text, images) {
    await chat.edit(this.turn, text, images);
    this.isEditing = false;
  }
}
customElements.define('chat-question', ChatQuestion);

/** An answer of the model. */
class ChatAnswer extends Component {
  static properties = { turn: { attribute: false }, version: { attribute: false } };

  render() {
    const { answer } = this.turn;
    const isRunning = answer.status === 'running';
    return html`<article
      class="turn answer"
      aria-label="Answer of ${answer.model}"
      aria-busy=${isRunning ? 'true' : 'false'}
    >
      ${answer.items.map((item) => itemPart(item, isRunning))} ${this.state(answer)}
      ${isRunning ? nothing : this.facts(answer)}
      <p class="turn-actions">
        ${branches(this.turn)} ${isRunning ? nothing : this.actions(answer)}
      </p>
    </article>`;
  }

  actions(answer) {
    const text = textOf(answer);
    return html`${text
        ? html`<button type="button" @click=${() => copyText(text)}>Copy</button>`
        : nothing}
      ${answer.status === 'failed'
        ? nothing
        : html`<button
            type="button"
            ?disabled=${Boolean(chat.running)}
            @click=${() => chat.regenerate(this.turn)}
          >
            Regenerate
          </button>`}`;
  }

  updated() {
    const { status } = this.turn.answer;
    if (this.announced === 'running' && status !== 'running') announce(`Answer ${status}`);
    this.announced = status;
  }

  state(answer) {
    if (answer.status === 'running') {
      const follower = chat.followers.get(this.turn.id);
      if (follower?.isLost) {
        return html`<p class="state">The connection is lost; trying again.</p>`;
      }
      if (answer.firstAt) return nothing;
      return html`<answer-progress .answer=${answer} .waits=${answer.waits}></answer-progress>`;
    }
    if (answer.status === 'failed') {
      return html`<answer-remedy .turn=${this.turn} .version=${this.version}></answer-remedy>`;
    }
    const texts = {
      cancelled: html`<p class="state">Stopped.</p>`,
      incomplete: html`<p class="state">Stopped at the length limit.</p>`,
    };
    return texts[answer.status] ?? nothing;
  }

  facts(answer) {
    const { usage, cache } = answer;
    if (!usage) return nothing;
    const parts = [counted(usage.output_tokens, 'token')];
    const writing = answer.lastAt && answer.firstAt ? (answer.lastAt - answer.firstAt) / 1000 : 0;
    if (!answer.isRejoined && writing > 0.05 && usage.output_tokens > 1) {
      parts.push(`${((usage.output_tokens - 1) / writing).toFixed(1)} tokens/s`);
    }
    if (cache?.seconds?.first_text) parts.push(`first text after ${seconds(cache.seconds.first_text)}`);
    const cached = usage.input_tokens_details?.cached_tokens ?? 0;
    parts.push(
      `${count(cached)} of ${counted(usage.input_tokens, 'prompt token')} cached ` +
        `(${percent(cached, usage.input_tokens) || '0 %'})`,
    );
    const { truncated_messages: messages, truncated_tokens: tokens } = usage.input_tokens_details ?? {};
    if (messages) parts.push(`${counted(messages, 'message')} left out in the middle`);
    else if (tokens) parts.push(`${counted(tokens, 'token')} left out in the middle`);
    return html`<p class="facts">${parts.join(' · ')}</p>
      ${cache ? cacheDetails(cache) : nothing}`;
  }
}
customElements.define('chat-answer', ChatAnswer);

function itemPart(item, isRunning) {
  if (!item) return nothing;
  if (item.type === 'reasoning') {
    const parts = [...(item.content ?? []), ...(item.summary ?? [])];
    const text = parts.map((part) => part.text).join('\n\n');
    return text
      ? html`<details class="reasoning">
          <summary>Reasoning${isRunning && item.status !== 'completed' ? ' …' : ''}</summary>
          <p class="text">${text}</p>
        </details>`
      : nothing;
  }
  if (item.type === 'message') {
    const text = item.content.map((part) => part?.text ?? part?.refusal ?? '').join('\n\n');
    return html`<markdown-text .text=${text}></markdown-text>`;
  }
  return html`<details class="call" open>
    <summary>Tool call: <code>${item.name ?? item.type}</code></summary>
    <pre tabindex="0">${indented(item.arguments ?? item.input ?? '')}</pre>
  </details>`;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete, or no JSON
  }
}

/** The phases of a request, in order: key in the answer → label */
const TIMES = {
  accept: 'Preparing the prompt',
  queue: 'In the queue',
  lookup: 'Cache lookup',
  waited_for_another: 'Waiting for another request with the same prefix',
  restore: 'Restoring cached blocks',
  prefill: 'Prefill',
  first_text: 'Until the first text',
};

function cacheDetails(cache) {
  const facts = [
    ...[
      ['From memory', cache.ram_tokens],
      ['From disk', cache.disk_tokens],
      ['Prefilled', cache.read_tokens],
    ].map(([name, tokens]) => [name, tokens ? counted(tokens, 'token') : '']),
    ...Object.entries(TIMES).map(([key, name]) => {
      const value = cache.seconds?.[key];
      return [name, value >= 0.00005 ? seconds(value) : ''];
    }),
  ].filter(([, value]) => value);
  return html`<details class="cache">
    <summary>What was cached, and why not more</summary>
    <p>${cache.explanation}</p>
    <dl>
      ${facts.map(
        ([name, value]) =>
          html`<dt>${name}</dt>
            <dd>${value}</dd>`,
      )}
    </dl>
  </details>`;
}

