// The turns of a conversation: messages of the user and answers of the model.

import { html, nothing } from '../vendor/lit.js';
import { textOf } from '../answers.js';
import { access, get } from '../api.js';
import { chat } from '../chat-state.js';
import { deleteDraft, readDraft } from '../conversations.js';
import { count, counted, percent, seconds } from '../format.js';
import '../markdown.js';
import { refusedImage, turnsWithImages } from '../requests.js';
import { Component, announce, copyText } from '../view.js';
import './message-form.js';

const PHASES = { waiting: 'waiting', reading: 'prefill', writing: 'writing' };

/** Changes whenever an answer has to be drawn again. */
export function versionOf(turn) {
  const { status, seen, waits } = turn.answer;
  const versions = chat.alternatives(turn).length;
  return `${status} ${seen} ${versions} ${waits?.for} ${chat.settings.shortens} ${chat.followers.get(turn.id)?.isLost} ${Boolean(chat.running)}`;
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

/** The images of a message; those that are not sent any more can be removed. */
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
    // what was being edited when the page was left
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
    await deleteDraft(this.turn.id);
    this.isEditing = false;
  }
}
customElements.define('chat-question', ChatQuestion);

/** An answer of the model. */
class ChatAnswer extends Component {
  static properties = {
    turn: { attribute: false },
    version: { attribute: false },
    trouble: { state: true },
  };

  constructor() {
    super();
    this.trouble = ''; // why what was tried did not help
  }

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
    if (answer.status === 'failed') return this.failed(answer);
    const texts = {
      cancelled: html`<p class="state">Stopped.</p>`,
      incomplete: html`<p class="state">Stopped at the length limit.</p>`,
    };
    return texts[answer.status] ?? nothing;
  }

  /** What has failed, and what helps. */
  failed(answer) {
    const { text, actions } = this.remedy(answer);
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
    if (refused) {
      const whose = refused.turn.id === turn.parent ? 'your message' : 'an earlier message';
      return {
        text: html`<p class="failure">
            Image ${refused.place + 1} of ${whose} cannot be used: ${answer.error}.
          </p>
          <p>It is left out from now on, so that the conversation can go on.</p>`,
        actions: [['Try again without this image', again[1]]],
      };
    }
    const hasImages = turnsWithImages(chat.turns, chat.turns.get(turn.parent) ?? turn).length > 0;
    if (code === 'body_too_large' && hasImages) {
      return {
        text: html`<p class="failure">
          The images of this conversation have become too many for one request.
        </p>`,
        actions: [['Try again without the earlier images', () => chat.retryWithoutImages(turn)]],
      };
    }
    return {
      text: html`<p class="failure">The answer failed: ${answer.error}</p>`,
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
          <p>Edit the message to make it shorter, or go on in a new conversation.</p>`,
        actions: [startNew, ['Try again', () => chat.retry(turn)]],
      };
    }
    return {
      text: html`<p class="failure">
          This conversation has become longer than ${model} can read at once${most}.
        </p>
        <p>
          Without the middle, the model reads the beginning and the latest messages. Nothing is deleted
          here. A new conversation begins with your last message alone.
        </p>`,
      actions: [
        ['Leave out the middle', () => chat.retry(turn, { shortens: true })],
        startNew,
      ],
    };
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

/** What a request waits for, until its first text. */
class AnswerProgress extends Component {
  static properties = {
    answer: { attribute: false },
    waits: { attribute: false },
    request: { state: true },
  };

  constructor() {
    super();
    this.waits = null;
    this.request = null; // as the server describes it; null: it does not tell, or has not begun
  }

  connectedCallback() {
    super.connectedCallback();
    this.look();
    this.timer = setInterval(() => this.look(), 1000);
  }

  disconnectedCallback() {
    clearInterval(this.timer);
    chat.refreshModels().catch(() => {}); // the model may be loaded now
    super.disconnectedCallback();
  }

  async look() {
    if (this.waits?.for === 'key' || this.isLooking) return;
    this.isLooking = true;
    try {
      const [{ requests }] = await Promise.all([
        access.seesRequests ? get('/admin/requests') : { requests: [] },
        chat.refreshModels(),
      ]);
      const { responseId } = this.answer;
      this.request = requests.find((each) => responseId && each.answer_id === responseId) ?? null;
    } catch {
      this.request = null; // that the server does not answer shows itself elsewhere
    } finally {
      this.isLooking = false;
    }
    this.requestUpdate();
  }

  render() {
    const read = chat.modelOf(this.answer.model)?.weights_read;
    return html`<p class="state" role="status">
      <span class="working">${this.text()}</span>
      ${read
        ? html`<progress max="1" value=${read} aria-label="Loading of the model"></progress>
            ${percent(read, 1)}`
        : nothing}
    </p>`;
  }

  text() {
    const { model } = this.answer;
    const byItself = this.answer.responseId
      ? 'The answer begins as soon as'
      : 'Your message is kept and sent as soon as';
    if (this.waits?.for === 'key') return `${byItself} the server gets its key.`;
    if (this.waits?.for === 'server') return `The server does not answer. ${byItself} it does.`;
    const state = chat.modelOf(model)?.state ?? 'ready';
    if (state === 'loading') return `${model} is being loaded. ${byItself} it is ready.`;
    if (state !== 'ready') {
      const needsRoom = this.waits?.for === 'model' || this.request?.waits_for === 'place';
      const why = needsRoom ? ', since other models are in use' : '';
      return `${model} is not loaded yet${why}. ${byItself} it is ready.`;
    }
    if (this.waits) return `The server cannot answer yet: ${this.waits.message}. Trying again …`;
    return `${this.request ? phaseOf(this.request) : 'waiting'} …`;
  }
}
customElements.define('answer-progress', AnswerProgress);

function phaseOf(request) {
  const { prefilled_tokens: done, prompt_tokens: all } = request;
  const why = request.waits_for ? ` for ${request.waits_for}` : '';
  return `${PHASES[request.state] ?? request.state}${why}${done ? `, ${percent(done, all)}` : ''}`;
}

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

/** What a request took, in the order of time: key in the answer → words */
const TIMES = {
  accept: 'Preparing the prompt',
  queue: 'In the queue',
  lookup: 'Cache lookup',
  waited_for_another: 'Waiting for another request with the same beginning',
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

