// Memory: what is cached, where, and for whom; what was missed, and why.

import { html, nothing } from '../vendor/lit.js';
import { FROM_PAGE, access, get, patch, post, remove } from '../api.js';
import { ago, bytes, count, counted, percent } from '../format.js';
import { PolledView } from '../view.js';
import { TIERS, laidOut } from './cache-map.js';

const NAME = 'name'; // key of a session's metadata under which the page keeps its name
const MOST_SESSIONS = 200;
const STORE_MILLISECONDS = 60_000; // between two counts of the files on disk
const MISSES_AT_FIRST = 5;
const SESSIONS_AT_FIRST = 20;

class MemoryView extends PolledView {
  static pollMilliseconds = 10_000;
  static properties = {
    health: { state: true },
    store: { state: true },
    sessions: { state: true },
    caches: { state: true },
    misses: { state: true },
    showsAllMisses: { state: true },
    showsAllSessions: { state: true },
  };

  constructor() {
    super();
    this.health = { models: [] };
    this.store = null;
    this.storeReadAt = 0; // milliseconds
    this.sessions = [];
    this.hasMoreSessions = false;
    this.hasSessions = this.hasCaches = this.hasMisses = false; // whether they were ever read
    this.caches = [];
    this.misses = [];
    this.showsAllMisses = false;
    this.showsAllSessions = false;
    this.openTables = new Set(); // names of models
  }

  async load() {
    // what comes late must not delay the rest: the store counts its files on disk
    await Promise.all([
      this.loadHealth(),
      this.loadCaches(),
      this.loadMisses(),
      access.isAdmin ? this.loadStore() : null,
    ]);
  }

  async loadHealth() {
    this.health = await healthOf();
    const loaded = this.health.models.filter((model) => model.state === 'ready' && model.memory);
    const lists = await Promise.all(
      loaded.map((model) =>
        get(`/v1/sessions?limit=${MOST_SESSIONS}&model=${encodeURIComponent(model.id)}`),
      ),
    );
    this.hasMoreSessions = lists.some((list) => list.has_more);
    this.sessions = lists.flatMap((list) => list.data);
    this.hasSessions = true;
  }

  async loadCaches() {
    this.caches = (await get('/admin/cache')).models;
    this.hasCaches = true;
  }

  async loadMisses() {
    this.misses = (await get('/admin/misses')).misses;
    this.hasMisses = true;
  }

  async loadStore() {
    if (Date.now() < this.storeReadAt + STORE_MILLISECONDS) return;
    this.storeReadAt = Date.now();
    this.store = await get('/admin/store');
  }

  refresh() {
    this.storeReadAt = 0;
    this.reload();
  }

  render() {
    const models = this.health.models.filter((model) => model.memory);
    return html`<div class="view-head">
        <h1>Memory</h1>
        <button type="button" @click=${() => this.refresh()}>Refresh</button>
      </div>
      ${this.failureLine()}
      <section aria-labelledby="tiers-title">
        <h2 id="tiers-title">Cache tiers</h2>
        ${models.length
          ? models.map((model) => this.tiers(model))
          : html`<p class="empty">
              ${this.isLoaded ? 'No model with a prefix cache is loaded.' : 'Loading …'}
            </p>`}
        ${this.pressure()} ${this.disk()}
      </section>
      <section aria-labelledby="map-title">
        <div class="view-head">
          <h2 id="map-title">Cached prompts</h2>
          <ul class="legend" aria-label="Colors">
            ${TIERS.map(([tier, words]) => html`<li><i class="tier-${tier}"></i>${words}</li>`)}
          </ul>
        </div>
        ${this.caches.map((model) => this.cache(model))}
        ${this.hasCaches && !this.caches.length
          ? html`<p class="empty">Nothing is cached while no model is loaded.</p>`
          : nothing}
      </section>
      <section aria-labelledby="misses-title">
        <h2 id="misses-title">Recent misses</h2>
        ${this.missList()}
      </section>
      <section>
        <h2>Sessions</h2>
        ${this.sessionTable()}
      </section>`;
  }

  pressure() {
    const pressure = this.health.memory_pressure;
    if (!pressure?.limit_bytes) return nothing;
    return html`<p>
      Memory of all models: ${bytes(pressure.footprint_bytes)} of ${bytes(pressure.limit_bytes)}
      (${percent(pressure.footprint_bytes, pressure.limit_bytes)}), level
      <strong>${pressure.level}</strong>.
    </p>`;
  }

  tiers({ id, memory }) {
    const { store } = memory;
    const figures = [
      ['Cached', `${count(memory.kept_tokens)} tokens`, 'in all tiers together'],
      [
        'Live states',
        bytes(memory.parked_bytes),
        `of ${counted(memory.parked_sequences, 'ended answer')}`,
      ],
      ['Blocks in RAM', bytes(memory.ram_bytes), share(memory.ram_bytes, memory.ram_budget_bytes)],
      [
        'Blocks on disk',
        store ? bytes(store.stored_bytes) : 'off',
        store ? share(store.stored_bytes, store.allowed_bytes) : 'this server has no store',
      ],
      [
        'Written today',
        store ? bytes(store.written_today_bytes) : '',
        store && store.mode !== 'writing' ? store.mode : 'to disk',
      ],
    ].filter(([, value]) => value);
    return html`${this.health.models.length > 1 ? html`<h3>${id}</h3>` : nothing}
      <dl class="figures" aria-label="Cache tiers of ${id}">
        ${figures.map(
          ([name, value, more]) =>
            html`<div>
              <dt>${name}</dt>
              <dd>
                <span class="figure">${value}</span><span class="hint">${more}</span>
              </dd>
            </div>`,
        )}
      </dl>`;
  }

  disk() {
    const store = this.store;
    if (!store?.folder) return nothing;
    return html`<p class="hint">
      The store <code>${store.folder}</code> has ${counted(store.blocks, 'block')} with
      ${bytes(store.file_bytes)} of at most ${bytes(store.allowed_bytes)};
      ${counted(store.pinned_blocks, 'block')} pinned, ${bytes(store.volume_free_bytes)} free on its
      volume${store.quarantined_files
        ? `, ${counted(store.quarantined_files, 'damaged file')} in quarantine`
        : ''}.
    </p>`;
  }

  cache(model) {
    const names = new Map(
      this.sessions
        .filter((session) => session.metadata[NAME])
        .map((session) => [session.id, session.metadata[NAME]]),
    );
    return html`${this.caches.length > 1 ? html`<h3>${model.model}</h3>` : nothing}
      <div class="panel">
        <cache-map .model=${model} .names=${names}></cache-map>
        ${model.parts.length ? this.cacheTable(model) : nothing}
      </div>`;
  }

  /** The same as the picture, for who prefers to read. */
  cacheTable(model) {
    const isOpen = this.openTables.has(model.model);
    const note = ({ target }) => {
      if (target.open) this.openTables.add(model.model);
      else this.openTables.delete(model.model);
      this.requestUpdate();
    };
    return html`<details class="as-table" @toggle=${note}>
      <summary>As a table</summary>
      ${isOpen ? this.openTable(model) : nothing}
    </details>`;
  }

  openTable(model) {
    return html`<div
        class="table-frame"
        tabindex="0"
        role="region"
        aria-label="Cached parts of ${model.model}"
      >
        <table>
          <thead>
            <tr>
              <th scope="col">Tokens</th>
              ${TIERS.map(([, words]) => html`<th scope="col" class="number">${words}</th>`)}
              <th scope="col" class="number">Size</th>
              <th scope="col">Sessions</th>
            </tr>
          </thead>
          <tbody>
            ${laidOut(model.parts).boxes.map(
              ({ part, level }) =>
                html`<tr>
                  <th scope="row">
                    ${'– '.repeat(Math.min(level - 1, 12))}${count(part.start)} to
                    ${count(part.start + part.tokens)}
                  </th>
                  ${TIERS.map(
                    ([tier]) =>
                      html`<td class="number">${count(part[`${tier}_tokens`])}</td>`,
                  )}
                  <td class="number">${bytes(part.bytes)}</td>
                  <td>${part.sessions.join(', ')}</td>
                </tr>`,
            )}
          </tbody>
        </table>
      </div>`;
  }

  missList() {
    if (!this.misses.length) {
      return html`<p class="empty">
        ${this.hasMisses
          ? 'No misses since the server started.'
          : 'Loading …'}
      </p>`;
    }
    const shown = this.showsAllMisses ? this.misses : this.misses.slice(0, MISSES_AT_FIRST);
    const more = this.misses.length - shown.length;
    return html`<ol class="misses">
        ${shown.map((miss) => missItem(miss))}
      </ol>
      ${more
        ? html`<button type="button" @click=${() => (this.showsAllMisses = true)}>
            Show ${count(more)} more
          </button>`
        : nothing}`;
  }

  sessionTable() {
    if (!this.sessions.length) {
      return html`<p class="empty">
        ${this.hasSessions
          ? html`There are no sessions. A request opens a session with the
              header <code>X-Session-ID</code>; each conversation of Chat is one.`
          : 'Loading …'}
      </p>`;
    }
    const shown = this.showsAllSessions ? this.sessions : this.sessions.slice(0, SESSIONS_AT_FIRST);
    const more = this.sessions.length - shown.length;
    return html`<div class="table-frame" tabindex="0" role="region" aria-label="Sessions">
      <table>
        <thead>
          <tr>
            <th scope="col">Session</th>
            <th scope="col">Model</th>
            <th scope="col" class="number">Tokens</th>
            <th scope="col">Cached</th>
            <th scope="col" class="number">Bytes</th>
            <th scope="col">Last use</th>
            <th scope="col">Actions</th>
          </tr>
        </thead>
        <tbody>
          ${shown.map((session) => this.sessionRow(session))}
        </tbody>
      </table>
    </div>
    ${more
      ? html`<button type="button" @click=${() => (this.showsAllSessions = true)}>
          Show ${count(more)} more
        </button>`
      : nothing}
    ${this.hasMoreSessions
      ? html`<p class="hint">These are the ${count(MOST_SESSIONS)} sessions that were used last.</p>`
      : nothing}`;
  }

  sessionRow(session) {
    const name = session.metadata[NAME];
    const where = [
      ['live', session.live_tokens],
      ['RAM', session.ram_tokens - session.live_tokens],
      ['disk', session.disk_tokens],
    ]
      .filter(([, tokens]) => tokens > 0)
      .map(([tier, tokens]) => `${count(tokens)} ${tier}`);
    return html`<tr>
      <th scope="row">
        ${name ? html`${name}<br />` : nothing}<code>${session.id}</code>
        ${session.forked_from
          ? html`<br /><span class="hint">forked from ${session.forked_from}</span>`
          : nothing}
      </th>
      <td>${session.model}</td>
      <td class="number">${count(session.tokens)}</td>
      <td>
        ${percent(session.kept_tokens, session.tokens) || '0 %'}${where.length
          ? ` (${where.join(', ')})`
          : ''}
      </td>
      <td class="number">${bytes(session.kept_bytes)}</td>
      <td>${ago(session.last_used_at)}</td>
      <td class="actions">
        <button
          type="button"
          aria-pressed=${session.pinned}
          aria-label="${session.pinned ? 'Unpin' : 'Pin'} ${name ?? session.id}"
          @click=${() => this.change(session, { pinned: !session.pinned })}
        >
          ${session.pinned ? 'Unpin' : 'Pin'}
        </button>
        <button type="button" @click=${() => this.fork(session)}>Fork</button>
        <button type="button" @click=${() => this.rename(session)}>Rename</button>
        <confirm-button
          label="Close"
          question="Close it and delete its cached tokens?"
          @confirm=${() => this.close(session)}
        ></confirm-button>
        ${this.renamed === session.id ? this.renameForm(session) : nothing}
      </td>
    </tr>`;
  }

  renameForm(session) {
    return html`<form @submit=${(event) => this.nameGiven(event, session)}>
      <label>Name <input maxlength="200" .value=${session.metadata[NAME] ?? ''} /></label>
      <button class="primary">Save</button>
    </form>`;
  }

  async rename(session) {
    this.renamed = this.renamed === session.id ? '' : session.id;
    this.requestUpdate();
    await this.updateComplete;
    this.querySelector('td form input')?.focus();
  }

  async nameGiven(event, session) {
    event.preventDefault();
    const { [NAME]: before, ...others } = session.metadata;
    const name = event.target.querySelector('input').value.trim();
    this.renamed = '';
    await this.change(session, { metadata: name ? { ...others, [NAME]: name } : others });
  }

  async change(session, change) {
    await this.attempt(() => patch(addressOf(session), change));
    await this.reload();
  }

  async fork(session) {
    await this.attempt(() => post(addressOf(session, '/fork'), {}));
    await this.reload();
  }

  async close(session) {
    await this.attempt(() => remove(`${addressOf(session)}&forget=true`));
    await this.reload();
  }
}
customElements.define('memory-view', MemoryView);

/** /health answers 503 while a model loads, with the same content. */
async function healthOf() {
  const response = await fetch('/health', {
    headers: { ...FROM_PAGE, ...(access.key && { authorization: `Bearer ${access.key}` }) },
    credentials: 'omit',
  });
  return response.json();
}

function addressOf(session, action = '') {
  const id = encodeURIComponent(session.id);
  return `/v1/sessions/${id}${action}?model=${encodeURIComponent(session.model)}`;
}

function share(part, whole) {
  const words = `of ${bytes(whole)}`;
  return html`<meter min="0" max=${whole || 1} value=${part} aria-label="${bytes(part)} ${words}"></meter>
    ${words}`;
}

function missItem(miss) {
  const who = [miss.session_id, miss.key, miss.client].filter(Boolean).join(' · ');
  const { change } = miss;
  return html`<li class="card miss">
    <p class="miss-head">
      <strong>${change?.summary ?? miss.explanation}</strong>
      <span class="hint">
        ${count(miss.cached_tokens)} of ${counted(miss.prompt_tokens, 'token')} cached ·
        ${ago(miss.at)}
      </span>
    </p>
    <p class="hint">${who} · ${miss.model}</p>
    ${change ? changeShown(change) : nothing}
    ${change && miss.explanation
      ? html`<details>
          <summary>Token details</summary>
          <p>${miss.explanation}</p>
        </details>`
      : nothing}
    ${miss.shows_texts
      ? nothing
      : html`<p class="hint">The texts belong to another tenant and are not shown.</p>`}
  </li>`;
}

function changeShown({ kind, before, cached, now }) {
  const gone = kind === 'added' ? nothing : html`<del>${cached || '(empty line)'}</del>`;
  const here = kind === 'left_out' ? nothing : html`<ins>${now || '(empty line)'}</ins>`;
  const lineEnd = kind === 'changed' ? '\n' : nothing;
  return html`<pre class="change" tabindex="0" aria-label="What changed" role="region">${before
      ? html`<span class="context">${before}\n</span>`
      : nothing}${gone}${lineEnd}${here}</pre>`;
}
