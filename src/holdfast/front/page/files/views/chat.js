// Chat: conversations with the server's models.

import { html, live, nothing, repeat } from '../vendor/lit.js';
import { textOf } from '../answers.js';
import { chat } from '../chat-state.js';
import { count, counted } from '../format.js';
import { LONGEST_ANSWER } from '../requests.js';
import { View, download } from '../view.js';
import './message-form.js';
import { versionOf } from './turns.js';

const NEAR_END = 120; // pixels

class ChatView extends View {
  static properties = { news: { state: true } };

  constructor() {
    super();
    this.news = ''; // a change made in another tab
    this.onChat = () => this.requestUpdate();
    this.onDeleted = () => {
      this.news = 'This conversation was deleted in another tab.';
      this.querySelector('.composer message-form')?.set({}); // its draft was deleted, too
      history.replaceState(null, '', '/');
    };
    this.onAddress = () => {
      if (location.pathname === '/') this.openAddress(); // otherwise another view is opening
    };
    // beside the composer, too: otherwise the browser would open a dropped file in place of the page
    this.onDrag = (event) => {
      if (event.dataTransfer?.types.includes('Files')) event.preventDefault();
    };
    this.onDrop = (event) =>
      this.querySelector('.composer message-form')?.take(event, event.dataTransfer);
  }

  connectedCallback() {
    super.connectedCallback();
    chat.addEventListener('change', this.onChat);
    chat.addEventListener('deleted', this.onDeleted);
    addEventListener('holdfast-address', this.onAddress);
    addEventListener('dragover', this.onDrag);
    addEventListener('drop', this.onDrop);
  }

  disconnectedCallback() {
    chat.removeEventListener('change', this.onChat);
    chat.removeEventListener('deleted', this.onDeleted);
    removeEventListener('holdfast-address', this.onAddress);
    removeEventListener('dragover', this.onDrag);
    removeEventListener('drop', this.onDrop);
    super.disconnectedCallback();
  }

  async load() {
    // back from another view: reopen the conversation
    const isBack = !this.isLoaded && chat.conversation && !location.search;
    if (isBack) history.replaceState(null, '', `/?conversation=${chat.conversation.id}`);
    await chat.refreshModels();
    await this.openAddress();
    await chat.refreshList();
    await chat.resume();
  }

  async openAddress() {
    this.news = '';
    await chat.open(new URL(location.href).searchParams.get('conversation'));
    if (!chat.modelOf(chat.settings.model)) {
      const first = chat.models.find((model) => model.can_chat) ?? chat.models[0];
      chat.settings.model = first?.id ?? '';
    }
    this.requestUpdate();
  }

  willUpdate() {
    this.isAtEnd = innerHeight + scrollY > document.documentElement.scrollHeight - NEAR_END;
  }

  updated() {
    const isRunning = Boolean(chat.running);
    // once more after an answer has ended, because its footer appears then
    if (this.isAtEnd && (isRunning || this.wasRunning)) {
      scrollTo(0, document.documentElement.scrollHeight);
    }
    this.wasRunning = isRunning;
  }

  render() {
    return html`<div class="chat">
      <h1 class="visually-hidden">Chat</h1>
      ${this.conversationList()}
      <section class="conversation" aria-label="Conversation">
        ${this.failureLine()}
        ${this.news ? html`<p class="news" role="status">${this.news}</p>` : nothing} ${this.head()}
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
    const isKnown = (id) => chat.conversations.some((each) => each.id === id);
    const drafts = chat.drafts.filter(({ id }) => id !== chat.id && !isKnown(id));
    const answering = chat.conversations.filter(
      ({ id }) => id !== chat.conversation?.id && chat.answersOf(id).length,
    );
    return html`<details class="conversations" ?open=${innerWidth > 900}>
      <summary>
        Conversations
        ${answering.length
          ? html`<span class="badge">${count(answering.length)} answering</span>`
          : nothing}
      </summary>
      <nav aria-label="Conversations">
        <a class="button" href="/" @click=${() => chat.startNew()}>New conversation</a>
        <ul>
          ${drafts.map(
            (each) =>
              html`<li>
                <a href="/?conversation=${each.id}"
                  >${each.title} <span class="badge">not sent</span></a
                >
              </li>`,
          )}
          ${repeat(
            chat.conversations,
            (each) => each.id,
            (each) => this.listed(each),
          )}
        </ul>
      </nav>
    </details>`;
  }

  /**
   * An entry of the list. The running answer of a conversation that is not open can be stopped
   * here.
   */
  listed({ id, title }) {
    const isOpen = id === chat.conversation?.id;
    const answers = chat.answersOf(id);
    const isUnsent = !isOpen && chat.drafts.some((draft) => draft.id === id);
    const stop = () => this.attempt(() => Promise.all(answers.map((each) => chat.stop(each))));
    return html`<li>
      <a href="/?conversation=${id}" aria-current=${isOpen ? 'true' : nothing}
        >${title} ${answers.length ? html`<span class="badge">answering</span>` : nothing}
        ${isUnsent ? html`<span class="badge">not sent</span>` : nothing}</a
      >
      ${answers.length && !isOpen
        ? html`<button type="button" aria-label="Stop the answer of ${title}" @click=${stop}>
            Stop
          </button>`
        : nothing}
    </li>`;
  }

  head() {
    const conversation = chat.conversation;
    return html`<div class="conversation-head">
      <label
        >Model
        <select
          .value=${live(chat.settings.model)}
          @change=${(event) => this.choose(event.target.value)}
        >
          ${chat.models.map(
            (model) =>
              html`<option value=${model.id} ?selected=${model.id === chat.settings.model}>
                ${nameOf(model)}
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
    // not `live`: while an answer is written, all is drawn again and again, also during typing
    return html`<label
        >Instructions
        <textarea
          rows="3"
          .value=${chat.settings.instructions}
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
          .value=${chat.settings.temperature ?? ''}
          @change=${(event) => chat.set({ temperature: number(event) })} /></label
      ><label
        >Maximum answer length (tokens)
        <input
          type="number"
          min="1"
          step="1"
          placeholder=${LONGEST_ANSWER}
          .value=${chat.settings.maxTokens ?? ''}
          @change=${(event) => chat.set({ maxTokens: number(event) })}
      /></label>
      <label class="choice"
        ><input
          type="checkbox"
          .checked=${live(Boolean(chat.settings.shortens))}
          @change=${(event) => chat.set({ shortens: event.target.checked })}
        />
        Leave out the middle of a conversation that is too long</label
      >
      ${conversation
        ? html`<label
              >Title
              <input
                maxlength="200"
                .value=${conversation.title}
                @change=${({ target }) => {
                  target.value ||= 'Conversation';
                  return chat.rename(target.value);
                }}
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
    if (this.isLoaded && !chat.models.length) {
      return html`<p class="hint">
        This server has no model yet. <a href="/page/models">Pull one</a> to begin.
      </p>`;
    }
    if (!chat.id) return nothing; // no form before a conversation is open: a draft needs its id
    return html`<div class="composer">
      <message-form
        .draftId=${chat.id}
        .answer=${chat.running}
        .version=${`${chat.settings.model} ${chat.models.length}`}
        .send=${(text, images) => this.send(text, images)}
      ></message-form>
    </div>`;
  }

  async choose(model) {
    const form = this.querySelector('.composer message-form');
    if (form) form.notice = '';
    await this.attempt(() => chat.set({ model }));
  }

  async send(text, images) {
    await chat.send(text, images);
    this.news = '';
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

/** The name of a model in the chooser, with what the user should know before choosing it. */
function nameOf({ id, state, can_chat: canChat }) {
  const notes = [canChat ? '' : 'base model, cannot chat', state === 'ready' ? '' : state];
  const text = notes.filter(Boolean).join('; ');
  return text ? `${id} (${text})` : id;
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
