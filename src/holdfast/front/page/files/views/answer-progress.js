// Shows what an answer is waiting for until its first text arrives.

import { html, nothing } from '../vendor/lit.js';
import { access, get } from '../api.js';
import { chat } from '../chat-state.js';
import { percent } from '../format.js';
import { Component } from '../view.js';

const PHASES = { waiting: 'waiting', reading: 'prefill', writing: 'writing' };

class AnswerProgress extends Component {
  static properties = {
    answer: { attribute: false },
    waits: { attribute: false },
    request: { state: true },
  };

  constructor() {
    super();
    this.waits = null;
    this.request = null; // as the server describes it; null: not started, or not visible to us
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
      this.request = null; // another part of the page reports that the server does not answer
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
      ? 'The answer will start as soon as'
      : 'Your message is saved and will be sent as soon as';
    if (this.waits?.for === 'key') return `${byItself} you enter a key.`;
    if (this.waits?.for === 'server') return `The server does not answer. ${byItself} it is back.`;
    const state = chat.modelOf(model)?.state ?? 'ready';
    if (state === 'loading') return `${model} is being loaded. ${byItself} it is ready.`;
    if (state !== 'ready') {
      const needsRoom = this.waits?.for === 'model' || this.request?.waits_for === 'place';
      const why = needsRoom ? ', because other models are in use' : '';
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
