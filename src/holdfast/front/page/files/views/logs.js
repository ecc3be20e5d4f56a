// Logs: the end of the server's log, as it grows. A line is untrusted, and shown as text only.

import { html, nothing, repeat } from '../vendor/lit.js';
import { access, eventsOf } from '../api.js';
import { clockOf, count, counted } from '../format.js';
import { View } from '../view.js';

const LEVELS = ['debug', 'info', 'warning', 'error', 'critical'];
const TITLES = {
  debug: 'All',
  info: 'Info and above',
  warning: 'Warnings and errors',
  error: 'Errors',
};
const MOST_KEPT = 4000; // lines
const MOST_SHOWN = 200;
const RETRY_MILLISECONDS = 2000;
const NEAR_END = 40; // pixels

class LogsView extends View {
  static properties = { isPaused: { state: true }, isLost: { state: true } };

  constructor() {
    super();
    const query = new URLSearchParams(location.search);
    this.level = LEVELS.includes(query.get('level')) ? query.get('level') : 'debug';
    this.request = query.get('request') ?? '';
    this.text = query.get('text') ?? '';
    this.isPaused = false;
    this.isLost = false;
    this.mostShown = MOST_SHOWN;
    /** all lines, the oldest first */
    this.lines = [];
    /** lines that came since the pause */
    this.waiting = [];
    this.following = null;
    this.isAtEnd = true; // whether the view follows the log
    this.sizes = new ResizeObserver(() => this.scrollToEnd());
  }

  disconnectedCallback() {
    this.following?.abort();
    this.following = null;
    this.sizes.disconnect();
    super.disconnectedCallback();
  }

  async load() {
    this.following?.abort();
    this.following = null;
    if (!access.isAdmin) return;
    const following = new AbortController();
    this.following = following;
    this.follow(following.signal);
  }

  async follow(signal) {
    while (!signal.aborted) {
      let isFirst = true;
      try {
        for await (const { lines } of eventsOf('GET', '/admin/logs/events', { signal })) {
          if (signal.aborted) return;
          this.take(lines, isFirst);
          isFirst = false;
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401 || error.status === 403) {
          this.failure = error.message;
          return;
        }
      }
      this.isLost = true;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
    }
  }

  /** isFirst: the lines are the first of a connection, and include all that came before. */
  take(lines, isFirst) {
    this.isLost = false;
    this.isLoaded = true;
    if (this.isPaused) {
      const latest = (this.waiting.at(-1) ?? this.lines.at(-1))?.time ?? 0;
      this.waiting.push(...(isFirst ? lines.filter((line) => line.time > latest) : lines));
      this.waiting = this.waiting.slice(-MOST_KEPT);
    } else {
      this.lines = (isFirst ? lines : [...this.lines, ...lines]).slice(-MOST_KEPT);
    }
    this.requestUpdate();
  }

  togglePause() {
    this.isPaused = !this.isPaused;
    if (this.isPaused) return;
    this.lines = [...this.lines, ...this.waiting].slice(-MOST_KEPT);
    this.waiting = [];
    this.isAtEnd = true;
  }

  filter(change) {
    Object.assign(this, change);
    this.mostShown = MOST_SHOWN;
    this.isAtEnd = true;
    const query = new URLSearchParams();
    if (this.level !== 'debug') query.set('level', this.level);
    if (this.request) query.set('request', this.request);
    if (this.text) query.set('text', this.text);
    history.replaceState(null, '', `${location.pathname}${query.size ? `?${query}` : ''}`);
    this.requestUpdate();
  }

  get found() {
    const least = LEVELS.indexOf(this.level);
    const request = this.request.trim();
    const text = this.text.toLowerCase();
    return this.lines.filter(
      (line) =>
        LEVELS.indexOf(line.level) >= least &&
        (!request || line.request_id.includes(request) || line.text.includes(request)) &&
        (!text || `${line.logger} ${line.text}`.toLowerCase().includes(text)),
    );
  }

  updated() {
    const list = this.querySelector('.log ol');
    // lines change their height when they are rendered, or when the window becomes narrower
    if (list !== this.observed) {
      this.sizes.disconnect();
      if (list) this.sizes.observe(list);
      this.observed = list;
    }
    this.scrollToEnd();
  }

  scrollToEnd() {
    const place = this.querySelector('.log');
    if (!place || !this.isAtEnd) return;
    place.scrollTop = place.scrollHeight;
    this.lastTop = place.scrollTop;
  }

  /** Only scrolling back ends the following, since lines that grow move the end away, too. */
  onScroll({ currentTarget: place }) {
    const isNear = place.scrollTop + place.clientHeight >= place.scrollHeight - NEAR_END;
    if (isNear) this.isAtEnd = true;
    else if (place.scrollTop < this.lastTop) this.isAtEnd = false;
    this.lastTop = place.scrollTop;
  }

  render() {
    return html`<h1>Logs</h1>
      ${this.failureLine()}
      ${access.caller && !access.isAdmin
        ? html`<p class="hint">
            The log covers all users; you need an admin key.
            <code>holdfast keys add NAME --admin</code> creates one.
          </p>`
        : html`${this.controls()} ${this.content()}`}`;
  }

  controls() {
    const waiting = this.waiting.length;
    return html`<div class="row controls">
      <label
        >Level
        <select @change=${(event) => this.filter({ level: event.target.value })}>
          ${Object.entries(TITLES).map(
            ([level, title]) =>
              html`<option value=${level} ?selected=${level === this.level}>${title}</option>`,
          )}
        </select></label
      >
      <label
        >Request
        <input
          type="search"
          placeholder="req_…"
          autocomplete="off"
          spellcheck="false"
          .value=${this.request}
          @input=${(event) => this.filter({ request: event.target.value })}
      /></label>
      <label
        >Text
        <input
          type="search"
          autocomplete="off"
          .value=${this.text}
          @input=${(event) => this.filter({ text: event.target.value })}
      /></label>
      <button
        type="button"
        aria-pressed=${this.isPaused ? 'true' : 'false'}
        @click=${() => this.togglePause()}
      >
        Pause
      </button>
      <p class="hint" role="status">
        ${this.isLost
          ? 'The connection is lost; trying again …'
          : this.isPaused
            ? `Paused; ${counted(waiting, 'new line')}`
            : nothing}
      </p>
    </div>`;
  }

  content() {
    if (!this.lines.length) {
      return html`<p class="hint">
        ${this.isLoaded && this.following
          ? 'No line yet. A server writes more with holdfast serve --log-level debug.'
          : 'Loading …'}
      </p>`;
    }
    const found = this.found;
    if (!found.length) {
      return html`<div class="card empty">
        <h2>No line matches</h2>
        <p>
          Choose a lower level, or
          <button
            type="button"
            @click=${() => this.filter({ level: 'debug', request: '', text: '' })}
          >
            remove the filter
          </button>
          to see ${counted(this.lines.length, 'line')}.
        </p>
      </div>`;
    }
    const shown = found.slice(-this.mostShown);
    return html`<div class="actions log-head">
        <p class="hint">
          ${counted(found.length, 'line')}${found.length < this.lines.length
            ? ` of ${count(this.lines.length)}`
            : ''}.
          In the terminal: <code>holdfast logs -f</code>
        </p>
        <copy-button .text=${() => plain(found)} label="Copy lines"></copy-button>
      </div>
      <div
        class="log"
        tabindex="0"
        role="region"
        aria-label="Lines of the log"
        @scroll=${(event) => this.onScroll(event)}
      >
        ${shown.length < found.length
          ? html`<button type="button" @click=${() => this.showMore()}>
              Show ${count(found.length - shown.length)} earlier lines
            </button>`
          : nothing}
        <ol>
          ${repeat(
            shown,
            (line) => `${line.number} ${line.time}`,
            (line) => this.line(line),
          )}
        </ol>
      </div>`;
  }

  showMore() {
    this.isAtEnd = false;
    this.mostShown = MOST_KEPT;
    this.requestUpdate();
  }

  line(line) {
    return html`<li class="log-line level-${line.level}">
      <time>${clockOf(new Date(1000 * line.time), true)}</time>
      <span class="level">${line.level}</span>
      <span class="text">${line.text}</span>
      ${line.request_id
        ? html`<button
            type="button"
            class="quiet"
            title="Show only the request ${line.request_id}"
            @click=${() => this.filter({ request: line.request_id })}
          >
            ${shortened(line.request_id)}
          </button>`
        : html`<span class="hint">${line.logger}</span>`}
    </li>`;
  }
}
customElements.define('logs-view', LogsView);

/** The beginning of a request's id, which is enough to tell requests apart. */
function shortened(id) {
  return id.length > 16 ? `${id.slice(0, 12)}…` : id;
}

function plain(lines) {
  return lines
    .map(({ time, level, logger, request_id: request, text }) =>
      [new Date(1000 * time).toISOString(), level.toUpperCase(), `${logger}:`, text, request]
        .filter(Boolean)
        .join(' '),
    )
    .join('\n');
}
