// Answers of the Responses API while they are generated.
//
// Each answer is a background response: the server goes on generating when the page is closed, and
// numbers its events. An answer keeps the number of the last event it has taken in, so after a reload
// or a lost connection it continues with the next event, and none is missing or taken twice. If the
// server was restarted meanwhile and has lost the answer, it is asked for again, from its beginning.

import { ApiError, eventsOf, post, remove } from './api.js';

/**
 * @typedef {object} Answer
 * @property {string} model
 * @property {'running' | 'completed' | 'incomplete' | 'cancelled' | 'failed'} status
 * @property {string} responseId  empty until the server has accepted the request
 * @property {number} seen  number of the last event that was taken in; -1: none
 * @property {object[]} items  reasoning, messages and tool calls
 * @property {string} error
 * @property {number} began  milliseconds, as are the next two
 * @property {number | null} firstAt  when the first text came
 * @property {number | null} lastAt
 * @property {number} restarts  how often it was asked for again
 * @property {boolean} isRejoined  whether a part came after a lost connection, so that it has no speed
 * @property {object | null} usage
 * @property {object | null} cache  how much of the prompt was cached, and why not more
 */

const LONGEST_PAUSE = 5000; // milliseconds between two attempts to reconnect
const MOST_RESTARTS = 3; // of the server, after which an answer is asked for again
const STOPPED = /^the server stopped before the (answer|response) was complete/;

/** @returns {Answer} */
export function newAnswer(model) {
  return {
    model,
    status: 'running',
    responseId: '',
    seen: -1,
    items: [],
    error: '',
    began: Date.now(),
    firstAt: null,
    lastAt: null,
    restarts: 0,
    isRejoined: false,
    usage: null,
    cache: null,
  };
}

/** The text of an answer, without reasoning and calls. @param {Answer} answer */
export function textOf(answer) {
  return answer.items
    .filter((item) => item.type === 'message')
    .flatMap((item) => item.content.map((part) => part.text ?? part.refusal ?? ''))
    .join('\n\n');
}

/** The items of an answer as a later request has to send them. @param {Answer} answer */
export function itemsToSend(answer) {
  return answer.items.filter(
    (item) =>
      (item.type === 'message' && item.content.some((part) => part.text)) ||
      (item.type === 'reasoning' && item.encrypted_content) ||
      (item.type.endsWith('_call') && item.status === 'completed'),
  );
}

/** The server was stopped before the answer was complete. */
class ServerStopped extends Error {}

/** Takes in the events of one answer until it has ended. */
export class Follower {
  /**
   * @param {Answer} answer
   * @param {{body: object, headers: object}} request  for the answer
   * @param {(isDurable: boolean) => void} onChange  isDurable: the change must be saved at once
   */
  constructor(answer, request, onChange) {
    this.answer = answer;
    this.request = request;
    this.onChange = onChange;
    this.isLost = false; // the connection is lost
    this.leaves = new AbortController();
    this.wantsStop = false;
  }

  /** Send the request and take in its answer. */
  async begin() {
    await this.#follow(() => this.#new());
  }

  /** Continue with an answer of which the page has only the beginning. */
  async rejoin() {
    if (!this.answer.responseId && !this.answer.restarts) {
      this.#end('failed', 'The page was closed before the server had accepted the message.');
      return;
    }
    this.answer.isRejoined = true;
    await this.#follow(() => (this.answer.responseId ? this.#rest() : this.#new()));
  }

  /** End the answer; what has come stays. */
  async stop() {
    this.wantsStop = true;
    if (this.answer.responseId) await post(`/v1/responses/${this.answer.responseId}/cancel`);
    else if (this.isLost) this.#end('cancelled', '');
  }

  /** Stop taking in events; the server goes on. */
  leave() {
    this.leaves.abort();
  }

  #stream(method, path, options = {}) {
    return eventsOf(method, path, { ...options, signal: this.leaves.signal });
  }

  #new() {
    const { body, headers } = this.request;
    const whole = { ...body, background: true, stream: true, store: true };
    return this.#stream('POST', '/v1/responses', { body: whole, headers });
  }

  #rest() {
    const after = this.answer.seen >= 0 ? `&starting_after=${this.answer.seen}` : '';
    return this.#stream('GET', `/v1/responses/${this.answer.responseId}?stream=true${after}`);
  }

  async #follow(open) {
    let pause = 250;
    while (this.answer.status === 'running') {
      try {
        for await (const event of open()) {
          pause = 250;
          this.isLost = false;
          this.#take(event);
        }
      } catch (error) {
        if (this.leaves.signal.aborted) return;
        if (this.#isForgotten(error)) {
          this.#beginAgain();
        } else if (this.#isFinal(error)) {
          this.#end('failed', this.#explained(error));
          return;
        }
      }
      if (this.answer.status !== 'running') return;
      this.isLost = true;
      this.answer.isRejoined = true;
      this.onChange(false);
      open = () => (this.answer.responseId ? this.#rest() : this.#new());
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(LONGEST_PAUSE, 2 * pause);
    }
  }

  /** Whether the server was stopped and has lost the answer, so that it can be asked for again. */
  #isForgotten(error) {
    if (!this.answer.responseId || this.answer.restarts >= MOST_RESTARTS) return false;
    return error instanceof ServerStopped || (error instanceof ApiError && error.status === 404);
  }

  #beginAgain() {
    const { model, restarts } = this.answer;
    Object.assign(this.answer, newAnswer(model), { restarts: restarts + 1 });
    this.onChange(true);
  }

  /** Whether no further attempt can help. */
  #isFinal(error) {
    if (error instanceof ServerStopped) return true;
    if (!this.answer.responseId && !this.answer.restarts) return true;
    return error instanceof ApiError && error.status < 500 && error.status !== 429;
  }

  #explained(error) {
    if (error instanceof ApiError && error.status === 404) {
      return 'The server was restarted and does not have this answer any more.';
    }
    return error instanceof ApiError ? error.message : `The server does not answer: ${error.message}`;
  }

  #take(event) {
    const answer = this.answer;
    if (event.error && event.sequence_number === undefined) {
      if (STOPPED.test(event.error.message)) throw new ServerStopped(event.error.message);
      this.#end('failed', event.error.message);
      return;
    }
    if (event.sequence_number <= answer.seen) return;
    const failure = event.type === 'response.failed' ? event.response.error?.message : '';
    if (STOPPED.test(failure)) throw new ServerStopped(failure);
    answer.seen = event.sequence_number;
    const isFirst = !answer.responseId;
    if (isFirst && event.response) answer.responseId = event.response.id;
    applyEvent(answer, event);
    if (isFirst && this.wantsStop) this.stop().catch(() => {});
    this.onChange(isFirst || answer.status !== 'running');
  }

  #end(status, error) {
    this.answer.status = status;
    this.answer.error = error;
    this.onChange(true);
  }
}

/** Apply one event to an answer. @param {Answer} answer @param {object} event */
export function applyEvent(answer, event) {
  const item = answer.items[event.output_index];
  switch (event.type) {
    case 'response.output_item.added':
      answer.items[event.output_index] = { content: [], ...event.item };
      break;
    case 'response.output_item.done':
      answer.items[event.output_index] = event.item;
      break;
    case 'response.content_part.added':
      item.content[event.content_index] = event.part;
      break;
    case 'response.output_text.delta':
    case 'response.refusal.delta':
      append(answer, partOf(item, 'content', event.content_index, 'output_text'), event.delta);
      break;
    case 'response.reasoning_text.delta':
      append(answer, partOf(item, 'content', event.content_index, 'reasoning_text'), event.delta);
      break;
    case 'response.reasoning_summary_text.delta':
      append(answer, partOf(item, 'summary', event.summary_index, 'summary_text'), event.delta);
      break;
    case 'response.function_call_arguments.delta':
      item.arguments = (item.arguments ?? '') + event.delta;
      break;
    case 'response.completed':
    case 'response.incomplete':
    case 'response.failed':
      finish(answer, event.response);
      break;
    default: // states and ends of parts, which change nothing
  }
}

function partOf(item, list, index, type) {
  item[list] ??= [];
  item[list][index] ??= { type, text: '' };
  return item[list][index];
}

function append(answer, part, text) {
  part.text = (part.text ?? '') + text;
  answer.lastAt = Date.now();
  answer.firstAt ??= answer.lastAt;
}

function finish(answer, response) {
  answer.status = response.status;
  answer.usage = response.usage ?? null;
  answer.cache = response.holdfast ?? null;
  answer.error = response.error?.message ?? '';
  if (response.output?.length) answer.items = response.output;
}

/** Delete answers from the server, which keeps them in case that the page comes back. */
export async function forgetOnServer(answers) {
  for (const answer of answers) {
    if (answer.responseId) await remove(`/v1/responses/${answer.responseId}`).catch(() => {});
  }
}
