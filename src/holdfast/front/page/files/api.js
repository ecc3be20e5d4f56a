// Calls the server's HTTP API, with the key that the user has entered, and reads server-sent events.

const KEY_ITEM = 'holdfast.key';
/** Tells the server that the page asks, so that what it polls does not fill the log. */
export const FROM_PAGE = { 'x-holdfast-page': '1' };

/** An error that the server has answered. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {{code?: string, param?: string, advice?: string, message?: string}} error
   * @param {number} retryAfter  milliseconds; 0: the server does not say
   */
  constructor(status, error, retryAfter = 0) {
    super(error.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = error.code ?? '';
    this.param = error.param ?? ''; // the field at fault
    this.advice = error.advice ?? ''; // what the client can do; see docs/reference/errors.md
    this.retryAfter = retryAfter;
  }
}

/**
 * The key of this browser tab, and what the server allows with it. Events: `change`; `locked` when
 * the server needs a key.
 */
class Access extends EventTarget {
  /** @type {{key: string, is_admin: boolean, needs_key: boolean, version: string} | null} */
  caller = null;
  isLocked = false; // the server needs a key, or refused ours
  key = sessionStorage.getItem(KEY_ITEM) ?? '';

  get isAdmin() {
    return this.caller?.is_admin ?? false;
  }

  /** Whether the server tells the caller about its requests. */
  get seesRequests() {
    return Boolean(this.caller && (this.caller.is_admin || this.caller.needs_key));
  }

  /**
   * Use a key from now on; an empty one is forgotten. Only a key that the server accepts is kept.
   * @param {string} key
   */
  async use(key) {
    this.key = key;
    sessionStorage.removeItem(KEY_ITEM);
    await this.refresh();
    if (key && this.caller) sessionStorage.setItem(KEY_ITEM, key);
  }

  /** Ask the server who we are. Dispatches `locked` if it needs another key. */
  async refresh() {
    this.caller = null;
    try {
      this.caller = await get('/admin/caller');
      this.isLocked = false;
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 401)) throw error;
    } finally {
      this.dispatchEvent(new Event('change'));
    }
  }

  /** The server needs a key, or refused ours. */
  lock() {
    const isKept = sessionStorage.getItem(KEY_ITEM) !== null;
    this.key = '';
    this.isLocked = true;
    sessionStorage.removeItem(KEY_ITEM);
    this.dispatchEvent(new CustomEvent('locked', { detail: { wasAccepted: isKept } }));
  }

  /**
   * Resolves when the server accepts our key, or when the signal aborts.
   * @param {AbortSignal} signal
   */
  async unlocked(signal) {
    while (this.isLocked && !signal.aborted) {
      await new Promise((resolve) => {
        this.addEventListener('change', resolve, { once: true });
        signal.addEventListener('abort', resolve, { once: true });
      });
    }
  }
}

export const access = new Access();

/**
 * Send a request; returns the response if it is a success.
 * @param {string} method
 * @param {string} path
 * @param {{body?: unknown, headers?: Record<string, string>, signal?: AbortSignal,
 *   keepalive?: boolean}} [options]
 */
async function send(method, path, { body, headers = {}, signal, keepalive } = {}) {
  const sent = { accept: 'application/json', ...FROM_PAGE, ...headers };
  if (body !== undefined) sent['content-type'] = 'application/json';
  if (access.key) sent.authorization = bearer();
  const response = await fetch(path, {
    method,
    headers: sent,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    keepalive,
    credentials: 'omit',
    cache: 'no-store',
  });
  if (response.ok) return response;
  const failure = await failureOf(response);
  // a request sent with an earlier key says nothing about the current one
  if (failure.status === 401 && sent.authorization === bearer()) access.lock();
  throw failure;
}

function bearer() {
  return access.key ? `Bearer ${access.key}` : undefined;
}

async function failureOf(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // a proxy's error page is no JSON
  }
  // Ollama's API has the message in place of the object
  if (typeof error === 'string') error = { message: error };
  const seconds = Number(response.headers.get('retry-after')) || 0;
  return new ApiError(response.status, error ?? {}, 1000 * seconds);
}

/** The JSON that the server answers. */
export async function get(path, options) {
  return (await send('GET', path, options)).json();
}

export async function post(path, body, options) {
  return (await send('POST', path, { ...options, body })).json();
}

export async function patch(path, body, options) {
  return (await send('PATCH', path, { ...options, body })).json();
}

export async function remove(path, options) {
  return (await send('DELETE', path, options)).json();
}

/**
 * Yield the data of server-sent events, as parsed JSON. Ends when the stream ends; a lost connection
 * raises a TypeError, as `fetch` does.
 */
export async function* eventsOf(method, path, options = {}) {
  const headers = { ...options.headers, accept: 'text/event-stream' };
  const response = await send(method, path, { ...options, headers });
  for await (const block of piecesOf(response, '\n\n')) {
    const lines = block.split('\n').filter((line) => line.startsWith('data:'));
    const data = lines.map((line) => line.slice(5).trimStart()).join('\n');
    if (data && data !== '[DONE]') yield JSON.parse(data);
  }
}

/** Yield the lines of a stream of JSON lines, parsed. */
export async function* linesOf(method, path, options) {
  const response = await send(method, path, options);
  for await (const line of piecesOf(response, '\n')) {
    if (line.trim()) yield JSON.parse(line);
  }
}

async function* piecesOf(response, separator) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const pieces = (rest + value).split(separator);
      rest = pieces.pop() ?? '';
      yield* pieces;
    }
    if (rest.trim()) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}
