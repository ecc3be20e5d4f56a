// Answers of the Responses API while they are generated.
//
// Each answer is a background response: the server goes on generating when the page is closed, and
// numbers its events. An answer keeps the number of the last event it has taken in, so after a reload
// or a lost connection it continues with the next event, and none is missing or taken twice. If the
// server was restarted meanwhile and has lost the answer, it is asked for again, from its beginning.
//
// A request that the server cannot accept yet, for example because its model is loading, waits and
// is resent automatically, so that the user never types a message twice.

import { ApiError, access, eventsOf, get, post, remove } from './api.js';

/**
 * @typedef {object} Answer
 * @property {string} model
 * @property {'running' | 'completed' | 'incomplete' | 'cancelled' | 'failed'} status
 * @property {number} attempt  how often the request was sent anew
 * @property {string} responseId  empty until the server has accepted the request
 * @property {number} seen  number of the last event that was taken in; -1: none
 * @property {object[]} items  reasoning, messages and tool calls
 * @property {string} error
 * @property {{code: string, param: string} | null} failure  the error's code and field
 * @property {{for: 'key' | 'server' | 'model' | 'turn', message: string} | null} waits  why the
 *   request was not accepted yet
 * @property {number} began  milliseconds, as are the next two
 * @property {number | null} firstAt  when the first text came
 * @property {number | null} lastAt
 * @property {boolean} wantsStop  whether the user has stopped it, which the server may not know yet
 * @property {number} restarts  how often the server lost the answer and it was requested again
 * @property {boolean} isRejoined  whether a part came after a lost connection, so that it has no speed
 * @property {object | null} usage
 * @property {object | null} cache  how much of the prompt was cached, and why not more
 */

const FIRST_PAUSE = 250; // milliseconds between attempts to reconnect; the next ones too
const LONGEST_PAUSE = 5000;
const LOAD_PAUSE = 1000; // between polls of a model that is being loaded
const LONGEST_WAIT = 30_000; // the longest Retry-After that is obeyed
const MOST_RESTARTS = 3; // of the server, after which an answer is asked for again
const STOPPED = /^the server stopped before the (answer|response) was complete/;
/** Codes of failed responses that are worth retrying later. */
const RETRYABLE_CODES = ['server_is_overloaded', 'rate_limit_exceeded'];

/** @returns {Answer} */
export function newAnswer(model, attempt = 0) {
  return {
    model,
    status: 'running',
    attempt,
    responseId: '',
    seen: -1,
    items: [],
    error: '',
    failure: null,
    waits: null,
    began: Date.now(),
    firstAt: null,
    lastAt: null,
    wantsStop: false,
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

/** Whether one state of an answer is older than another one. @param {Answer} one @param {Answer} other */
export function isOlder(one, other) {
  const attempts = (one.attempt ?? 0) - (other.attempt ?? 0);
  if (attempts) return attempts < 0;
  const isRunning = one.status === 'running';
  if (isRunning !== (other.status === 'running')) return isRunning;
  return one.seen < other.seen;
}

/** The server was stopped before the answer was complete. */
class ServerStopped extends Error {}

/** The server accepted the request, but could not start it. */
class NotBegun extends Error {
  /** @param {{code: string, message: string, advice?: string}} failure */
  constructor(failure) {
    super(failure.message);
    this.code = failure.code;
    this.advice = failure.advice;
  }
}

/** Takes in the events of one answer until it has ended. */
export class Follower {
  /**
   * @param {Answer} answer
   * @param {() => Promise<{body: object, headers: object}>} request  makes the request for it
   * @param {(isDurable: boolean) => void} onChange  isDurable: the change must be saved at once
   */
  constructor(answer, request, onChange) {
    this.answer = answer;
    this.request = request;
    this.onChange = onChange;
    this.isLost = false; // the connection is lost
    this.leaves = new AbortController();
    this.hasResentOnce = false; // resent once to learn the field at fault
    /** Whether an answer that the server lost may be requested again. */
    this.mayRestart = () => true;
  }

  /** Send the request and take in its answer. */
  async begin() {
    await this.#follow(() => this.#new());
  }

  /** Continue with an answer of which the page has only the beginning. */
  async rejoin() {
    this.answer.isRejoined = true;
    if (!this.answer.responseId) this.answer.responseId = await this.#acceptedId();
    if (this.answer.wantsStop) await this.#stopRejoined();
    await this.#follow(() => this.#open());
  }

  /** End the answer; what has come stays. */
  async stop() {
    const { responseId, waits } = this.answer;
    this.answer.wantsStop = true;
    if (responseId) {
      // the request is sent even if the page is closed at once
      await post(`/v1/responses/${responseId}/cancel`, undefined, { keepalive: true });
    } else if (waits || this.isLost) {
      this.leave();
      this.#end('cancelled', '');
    } else {
      this.onChange(true); // the page may be closed before the server tells the id
    }
  }

  /** End an answer that was stopped before the page was closed. */
  async #stopRejoined() {
    if (this.answer.responseId) await this.stop().catch(() => {});
    else this.#end('cancelled', '');
  }

  /** Stop taking in events; the server goes on. */
  leave() {
    this.leaves.abort();
  }

  #stream(method, path, options = {}) {
    return eventsOf(method, path, { ...options, signal: this.leaves.signal });
  }

  #open() {
    return this.answer.responseId ? this.#rest() : this.#new();
  }

  async *#new() {
    const { body, headers } = await this.request();
    const whole = { ...body, background: true, stream: true, store: true };
    yield* this.#stream('POST', '/v1/responses', { body: whole, headers });
  }

  #rest() {
    const after = this.answer.seen >= 0 ? `&starting_after=${this.answer.seen}` : '';
    return this.#stream('GET', `/v1/responses/${this.answer.responseId}?stream=true${after}`);
  }

  /**
   * The id of the answer if the server accepted the request, but the page was closed before it
   * received the id. Empty otherwise, or if the caller may not see requests.
   */
  async #acceptedId() {
    if (!access.seesRequests) return '';
    try {
      const { headers } = await this.request();
      const { requests } = await get('/admin/requests');
      const session = headers['x-session-id'];
      const isOwn = (each) => each.session_id === session && each.answer_id.startsWith('resp_');
      return requests.find(isOwn)?.answer_id ?? '';
    } catch {
      return ''; // sending the request will report the problem
    }
  }

  async #follow(open) {
    let pause = FIRST_PAUSE;
    while (this.answer.status === 'running') {
      let error = null;
      try {
        for await (const event of open()) {
          pause = FIRST_PAUSE;
          this.isLost = false;
          this.#take(event);
        }
      } catch (caught) {
        error = caught;
      }
      if (this.leaves.signal.aborted || this.answer.status !== 'running') return;
      open = () => this.#open();
      if (this.answer.wantsStop && (!this.answer.responseId || this.#isForgotten(error))) {
        this.#end('cancelled', '');
        return;
      }
      if (this.#isForgotten(error)) {
        if (!this.mayRestart()) return;
        this.#beginAgain(this.answer.restarts + 1);
      } else if (error instanceof NotBegun && !RETRYABLE_CODES.includes(error.code)) {
        this.#beginAgain(this.answer.restarts);
        continue;
      } else if (await this.#canWait(error)) {
        await this.#wait(error, pause);
        pause = Math.min(LONGEST_PAUSE, 2 * pause);
        continue;
      } else if (this.#isFinal(error)) {
        this.#fail(error);
        return;
      }
      this.isLost = true;
      this.answer.isRejoined = true;
      this.onChange(false);
      await this.#pause(pause);
      pause = Math.min(LONGEST_PAUSE, 2 * pause);
      if (this.answer.wantsStop) await this.stop().catch(() => {}); // an earlier attempt may have failed
    }
  }

  /** Whether the server was stopped and has lost the answer, so that it can be asked for again. */
  #isForgotten(error) {
    if (!this.answer.responseId || this.answer.restarts >= MOST_RESTARTS) return false;
    return error instanceof ServerStopped || (error instanceof ApiError && error.status === 404);
  }

  #beginAgain(restarts) {
    const { model, attempt, wantsStop } = this.answer;
    Object.assign(this.answer, newAnswer(model, (attempt ?? 0) + 1), { restarts, wantsStop });
    this.onChange(true);
  }

  /** Whether a request that was not accepted is likely to be accepted later. */
  async #canWait(error) {
    if (error instanceof NotBegun) return !(await this.#hasModelFailed());
    if (error instanceof ApiError && error.status === 401) return true;
    if (this.answer.responseId || error === null) return false;
    if (!(error instanceof ApiError)) return !(error instanceof ServerStopped);
    if (error.advice) return error.advice === 'wait' && !(await this.#hasModelFailed());
    const isFromProxy = error.status > 500 && !error.code;
    const isLater = error.status === 429 || error.status === 503;
    return (isFromProxy || isLater) && !(await this.#hasModelFailed());
  }

  async #hasModelFailed() {
    return (await this.#modelState()) === 'failed';
  }

  async #modelState() {
    try {
      const { data } = await get('/v1/models', { signal: this.leaves.signal });
      return data.find((model) => model.id === this.answer.model)?.state ?? '';
    } catch {
      return '';
    }
  }

  /** Wait until the request may be accepted. */
  async #wait(error, pause) {
    if (error instanceof NotBegun) this.#beginAgain(this.answer.restarts);
    const status = error instanceof ApiError ? error.status : 0;
    const isAnswered = status > 0 || error instanceof NotBegun;
    let reason = isAnswered ? 'turn' : 'server';
    if (status === 401) reason = 'key';
    else if (isAnswered && (await this.#modelState()) !== 'ready') reason = 'model';
    this.answer.waits = { for: reason, message: error.message };
    this.onChange(true);
    if (reason === 'key') {
      await access.unlocked(this.leaves.signal);
    } else if (reason === 'model') {
      do await this.#pause(LOAD_PAUSE);
      while (!this.leaves.signal.aborted && (await this.#modelState()) === 'loading');
    } else {
      await this.#pause(Math.max(pause, Math.min(LONGEST_WAIT, error.retryAfter ?? 0)));
    }
  }

  /** @param {number} milliseconds */
  #pause(milliseconds) {
    const { signal } = this.leaves;
    return new Promise((resolve) => {
      if (signal.aborted) resolve();
      const timer = setTimeout(resolve, milliseconds);
      const onAbort = () => {
        clearTimeout(timer);
        resolve();
      };
      signal.addEventListener('abort', onAbort, { once: true });
    });
  }

  /** Whether no further attempt can help. */
  #isFinal(error) {
    if (error instanceof ServerStopped || error instanceof NotBegun) return true;
    if (!this.answer.responseId && error !== null) return true;
    return error instanceof ApiError && error.status < 500 && error.status !== 429;
  }

  #fail(error) {
    let message = error.message;
    if (error instanceof ApiError && error.status === 404 && this.answer.responseId) {
      message = 'The server was restarted and no longer has this answer.';
    }
    this.#end('failed', message, { code: error.code ?? '', param: error.param ?? '' });
  }

  #take(event) {
    const answer = this.answer;
    if (event.error && event.sequence_number === undefined) {
      if (STOPPED.test(event.error.message)) throw new ServerStopped(event.error.message);
      const { code, param, message } = event.error;
      this.#end('failed', message, { code: code ?? '', param: param ?? '' });
      return;
    }
    if (event.sequence_number <= answer.seen) return;
    const failure = event.type === 'response.failed' ? event.response.error : null;
    if (failure && STOPPED.test(failure.message)) throw new ServerStopped(failure.message);
    if (failure && this.answer.wantsStop && RETRYABLE_CODES.includes(failure.code)) {
      this.#end('cancelled', '');
      return;
    }
    if (failure && this.#shouldResend(failure)) throw new NotBegun(failure);
    answer.seen = event.sequence_number;
    answer.waits = null;
    const isFirst = !answer.responseId;
    if (isFirst && event.response) answer.responseId = event.response.id;
    applyEvent(answer, event);
    if (isFirst && answer.wantsStop) this.stop().catch(() => {});
    this.onChange(isFirst || answer.status !== 'running');
  }

  /**
   * Whether a response that failed before its first item is sent again, later or at once. A request
   * that was accepted before its model was loaded fails without the name of the field at fault; the
   * same request sent now is refused with that name.
   */
  #shouldResend({ code }) {
    if (this.answer.items.length || this.answer.wantsStop) return false;
    if (RETRYABLE_CODES.includes(code)) return true;
    const isFirstResend = code === 'invalid_prompt' && !this.hasResentOnce;
    this.hasResentOnce ||= isFirstResend;
    return isFirstResend;
  }

  #end(status, error, failure = null) {
    Object.assign(this.answer, { status, error, failure, waits: null });
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
  answer.failure = response.error ? { code: response.error.code ?? '', param: '' } : null;
  if (response.output?.length) answer.items = response.output;
}

/** Delete answers from the server, which keeps them in case that the page comes back. */
export async function forgetOnServer(answers) {
  for (const answer of answers) {
    if (answer.responseId) await remove(`/v1/responses/${answer.responseId}`).catch(() => {});
  }
}
