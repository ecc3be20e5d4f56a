// Chat: conversations with the server's models.

import { html, live, nothing, repeat } from '../vendor/lit.js';
import { textOf } from '../answers.js';
import { get } from '../api.js';
import { chat } from '../chat-state.js';
import { ACCEPTED, dataUrlOf, imagesAmong, takesImages } from '../images.js';
import { count, counted, percent, seconds } from '../format.js';
import '../markdown.js';
import { Component, View, announce, copyText, download } from '../view.js';

const NEAR_END = 120; // pixels
const PHASES = { waiting: 'waiting', reading: 'prefill', writing: 'writing' };

class ChatView extends View {
  static properties = {
    models: { state: true },
    draft: { state: true },
    images: { state: true },
    notice: { state: true },
  };

  constructor() {
    super();
    this.models = [];
    this.draft = '';
    this.images = []; // for the next message, as data URLs
    this.notice = ''; // why images were not attached
    this.onChat = () => this.requestUpdate();
    this.onAddress = () => this.openAddress();
    // beside the composer, too: otherwise the browser would open a dropped file in place of the page
    this.onDrag = (event) => {
      if (event.dataTransfer?.types.includes('Files')) event.preventDefault();
    };
    this.onDrop = (event) => this.take(event, event.dataTransfer);
  }

  connectedCallback() {
    super.connectedCallback();
    chat.addEventListener('change', this.onChat);
    addEventListener('holdfast-address', this.onAddress);
    addEventListener('dragover', this.onDrag);
    addEventListener('drop', this.onDrop);
  }

  disconnectedCallback() {
    chat.removeEventListener('change', this.onChat);
    removeEventListener('holdfast-address', this.onAddress);
    removeEventListener('dragover', this.onDrag);
    removeEventListener('drop', this.onDrop);
    super.disconnectedCallback();
  }

  async load() {
    this.models = (await get('/v1/models')).data;
    const names = this.models.map((model) => model.id);
    if (!names.includes(chat.settings.model)) await chat.set({ model: names[0] ?? '' });
    await this.openAddress();
    await chat.refreshList();
  }

  async openAddress() {
    await chat.open(new URL(location.href).searchParams.get('conversation'));
    const names = this.models.map((model) => model.id);
    if (!names.includes(chat.settings.model)) chat.settings.model = names[0] ?? '';
  }

  willUpdate() {
    this.isAtEnd = innerHeight + scrollY > document.documentElement.scrollHeight - NEAR_END;
  }

  updated() {
    if (this.isAtEnd && chat.running) scrollTo(0, document.documentElement.scrollHeight);
  }

  render() {
    return html`<div class="chat">
      <h1 class="visually-hidden">Chat</h1>
      ${this.conversationList()}
      <section class="conversation" aria-label="Conversation">
        ${this.failureLine()} ${this.head()}
        <div class="turns">
          ${repeat(
            chat.path,
            (turn) => turn.id,
            (turn) =>
              turn.answer
                ? html`<chat-answer .turn=${turn} .version=${versionOf(turn)}></chat-answer>`
                : html`<chat-question .turn=${turn} .isBusy=${Boolean(chat.running)}></chat-question>`,
          )}
        </div>
        ${this.composer()}
      </section>
    </div>`;
  }

  conversationList() {
    return html`<details class="conversations" ?open=${innerWidth > 900}>
      <summary>Conversations</summary>
      <nav aria-label="Conversations">
        <a class="button" href="/">New conversation</a>
        <ul>
          ${repeat(
            chat.conversations,
            (each) => each.id,
            (each) =>
              html`<li>
                <a
                  href="/?conversation=${each.id}"
                  aria-current=${each.id === chat.conversation?.id ? 'true' : nothing}
                  >${each.title}</a
                >
              </li>`,
          )}
        </ul>
      </nav>
    </details>`;
  }

  head() {
    const conversation = chat.conversation;
    return html`<div class="conversation-head">
      <label
        >Model
        <select
          .value=${live(chat.settings.model)}
          @change=${(event) => {
            this.notice = '';
            chat.set({ model: event.target.value });
          }}
        >
          ${this.models.map(
            (model) =>
              html`<option value=${model.id} ?selected=${model.id === chat.settings.model}>
                ${model.id}${model.state === 'ready' ? '' : ` (${model.state})`}
              </option>`,
          )}
        </select></label
      >
      <details class="settings">
        <summary>Settings</summary>
        <div class="panel">${this.settings(conversation)}</div>
      </details>
    </div>`;
  }

  settings(conversation) {
    const number = (event) => (event.target.value === '' ? null : Number(event.target.value));
    return html`<label
        >Instructions
        <textarea
          rows="3"
          .value=${live(chat.settings.instructions)}
          @change=${(event) => chat.set({ instructions: event.target.value })}
        ></textarea></label
      ><label
        >Temperature
        <input
          type="number"
          min="0"
          max="2"
          step="0.1"
          placeholder="the model's"
          .value=${live(chat.settings.temperature ?? '')}
          @change=${(event) => chat.set({ temperature: number(event) })} /></label
      ><label
        >Maximum answer length (tokens)
        <input
          type="number"
          min="1"
          step="1"
          placeholder="no limit"
          .value=${live(chat.settings.maxTokens ?? '')}
          @change=${(event) => chat.set({ maxTokens: number(event) })}
      /></label>
      ${conversation
        ? html`<label
              >Title
              <input
                maxlength="200"
                .value=${live(conversation.title)}
                @change=${(event) => chat.rename(event.target.value || 'Conversation')}
            /></label>
            <p class="actions">
              <button type="button" @click=${() => exportMarkdown()}>Export as Markdown</button>
              <button type="button" @click=${() => exportJson()}>Export as JSON</button>
              <confirm-button
                label="Delete"
                question="Delete this conversation?"
                @confirm=${() => this.delete()}
              ></confirm-button>
            </p>`
        : nothing}`;
  }

  composer() {
    const running = chat.running;
    if (this.isLoaded && !this.models.length) {
      return html`<p class="hint">
        This server has no model yet. <a href="/page/models">Pull one</a> to begin.
      </p>`;
    }
    const notice = this.unreadableImages || this.notice;
    return html`<form class="composer" @submit=${(event) => this.send(event)}>
      <label for="message">Message</label>
      ${this.attached()}
      <p class=${notice ? 'failure' : 'visually-hidden'} role="status">${notice}</p>
      <textarea
        id="message"
        rows="2"
        .value=${live(this.draft)}
        @input=${(event) => {
          this.draft = event.target.value;
        }}
        @keydown=${(event) => this.onKey(event)}
        @paste=${(event) => this.take(event, event.clipboardData)}
      ></textarea>
      <p class="actions">
        <button
          class="primary"
          ?disabled=${Boolean(running || this.unreadableImages) || !chat.settings.model}
        >
          Send
        </button>
        ${running
          ? html`<button type="button" @click=${() => this.attempt(() => chat.stop(running))}>
              Stop
            </button>`
          : nothing}
        ${this.seesImages
          ? html`<label class="button"
              >Attach images
              <input
                class="visually-hidden"
                type="file"
                multiple
                accept=${ACCEPTED}
                @change=${(event) => this.choose(event.target)}
            /></label>`
          : nothing}
        <span class="hint">Enter to send, Shift+Enter for a new line</span>
      </p>
    </form>`;
  }

  /** The images that the next message will have. */
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
              @click=${() => {
                this.images = this.images.toSpliced(place, 1);
              }}
            >
              ×
            </button>
          </li>`,
      )}
    </ul>`;
  }

  get seesImages() {
    return takesImages(this.models.find((model) => model.id === chat.settings.model));
  }

  /** Why the attached images cannot be sent; empty if they can. */
  get unreadableImages() {
    if (!this.images.length || !this.models.length || this.seesImages) return '';
    const { model } = chat.settings;
    return `${model} reads text only. Remove the images, or choose a model that takes images.`;
  }

  /**
   * Attach the images that are pasted or dropped; texts are left to the browser, also those that
   * office programs copy together with a picture of them.
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
    if (!this.seesImages) this.notice = `${chat.settings.model} reads text only.`;
    else if (files.length < given.length) this.notice = 'Only images can be attached.';
    if (!this.seesImages || !files.length) return;
    await this.attempt(async () => {
      const images = await Promise.all(files.map(dataUrlOf));
      this.images = [...this.images, ...images];
      announce(`${counted(images.length, 'image')} attached`);
    });
  }

  onKey(event) {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) this.send(event);
  }

  async send(event) {
    event.preventDefault();
    const { draft: text, images } = this;
    const isEmpty = !text.trim() && !images.length;
    if (isEmpty || chat.running || !chat.settings.model || this.unreadableImages) return;
    this.notice = '';
    this.draft = '';
    this.images = [];
    await this.attempt(() => chat.send(text, images));
    const address = `/?conversation=${chat.conversation?.id}`;
    if (location.search !== address.slice(1)) history.pushState(null, '', address);
    this.requestUpdate();
    await this.updateComplete;
    scrollTo(0, document.documentElement.scrollHeight);
  }

  async delete() {
    await this.attempt(() => chat.delete());
    history.pushState(null, '', '/');
  }
}
customElements.define('chat-view', ChatView);

/** Changes whenever an answer has to be drawn again. */
function versionOf(turn) {
  const { status, seen } = turn.answer;
  const versions = chat.alternatives(turn).length;
  return `${status} ${seen} ${versions} ${chat.followers.get(turn.id)?.isLost} ${Boolean(chat.running)}`;
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

function sentImages({ images }) {
  if (!images) return nothing;
  return html`<ul class="images" aria-label="Images">
    ${images.map(
      (image, place) => html`<li><img src=${image} alt="Image ${place + 1}" /></li>`,
    )}
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

  render() {
    return html`<div class="turn question" role="group" aria-label="You">
      ${sentImages(this.turn)}
      ${this.isEditing ? this.editor() : html`<p class="text">${this.turn.text}</p>`}
      <p class="turn-actions">
        ${branches(this.turn)}
        <button type="button" @click=${() => copyText(this.turn.text)}>Copy</button>
        <button type="button" ?disabled=${this.isBusy} @click=${() => this.edit()}>Edit</button>
      </p>
    </div>`;
  }

  editor() {
    return html`<form @submit=${(event) => this.sendAgain(event)}>
      <label>Edited message <textarea rows="4" .value=${this.turn.text}></textarea></label>
      <p class="actions">
        <button class="primary">Send again</button>
        <button
          type="button"
          @click=${() => {
            this.isEditing = false;
          }}
        >
          Cancel
        </button>
      </p>
    </form>`;
  }

  async edit() {
    this.isEditing = true;
    await this.updateComplete;
    this.querySelector('textarea')?.focus();
  }

  async sendAgain(event) {
    event.preventDefault();
    const text = event.target.querySelector('textarea').value;
    this.isEditing = false;
    if (text.trim() || this.turn.images) await chat.edit(this.turn, text);
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
        ${branches(this.turn)}
        ${isRunning
          ? nothing
          : html`<button type="button" @click=${() => copyText(textOf(answer))}>Copy</button>
              <button
                type="button"
                ?disabled=${Boolean(chat.running)}
                @click=${() => chat.regenerate(this.turn)}
              >
                Regenerate
              </button>`}
      </p>
    </article>`;
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
      return answer.firstAt ? nothing : html`<p class="state"><answer-progress .answer=${answer}></answer-progress></p>`;
    }
    const texts = {
      failed: html`<p class="failure">The answer failed: ${answer.error}</p>`,
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
    return html`<p class="facts">${parts.join(' · ')}</p>
      ${cache ? cacheDetails(cache) : nothing}`;
  }
}
customElements.define('chat-answer', ChatAnswer);

/** What a request waits for, until its first text. */
class AnswerProgress extends Component {
  static properties = { answer: { attribute: false }, text: { state: true } };

  constructor() {
    super();
    this.text = '';
  }

  connectedCallback() {
    super.connectedCallback();
    this.timer = setInterval(() => this.look(), 1000);
  }

  disconnectedCallback() {
    clearInterval(this.timer);
    super.disconnectedCallback();
  }

  async look() {
    try {
      const { requests } = await get('/admin/requests');
      const own = requests.find((request) => request.answer_id === this.answer.responseId);
      if (!own) return;
      const read = own.prefilled_tokens ? `, ${percent(own.prefilled_tokens, own.prompt_tokens)}` : '';
      const why = own.waits_for ? ` for ${own.waits_for}` : '';
      this.text = `${PHASES[own.state] ?? own.state}${why}${read}`;
    } catch {
      this.text = ''; // the phase is only a hint; without the right to see requests there is none
    }
  }

  render() {
    return html`<span class="working">${this.text || 'waiting'} …</span>`;
  }
}
customElements.define('answer-progress', AnswerProgress);

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

function fileName(ending) {
  return `${chat.conversation.title.replaceAll(/[^\w-]+/g, '-').slice(0, 50)}.${ending}`;
}

/** What a user said, with the number of images. */
function wordsOf({ text, images }) {
  return images ? `*${counted(images.length, 'image')}*\n\n${text}` : text;
}

function exportMarkdown() {
  const parts = chat.path.map((turn) =>
    turn.answer ? `## ${turn.answer.model}\n\n${textOf(turn.answer)}` : `## You\n\n${wordsOf(turn)}`,
  );
  const text = `# ${chat.conversation.title}\n\n${parts.join('\n\n')}\n`;
  download(fileName('md'), 'text/markdown', text);
}

function exportJson() {
  const whole = { conversation: chat.conversation, turns: [...chat.turns.values()] };
  download(fileName('json'), 'application/json', JSON.stringify(whole, null, 2));
}
