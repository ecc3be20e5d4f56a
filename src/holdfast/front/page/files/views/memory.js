// Memory: what is cached, where, and for whom.

import { html, nothing } from '../vendor/lit.js';
import { access, get, patch, post, remove } from '../api.js';
import { ago, bytes, count, counted, percent } from '../format.js';
import { View } from '../view.js';

const NAME = 'name'; // key of a session's metadata under which the page keeps its name

class MemoryView extends View {
  static properties = { health: { state: true }, store: { state: true }, sessions: { state: true } };

  constructor() {
    super();
    this.health = { models: [] };
    this.store = null;
    this.sessions = [];
  }

  async load() {
    this.health = await healthOf();
    this.store = access.isAdmin ? await get('/admin/store') : null;
    const loaded = this.health.models.filter((model) => model.state === 'ready' && model.memory);
    const lists = await Promise.all(
      loaded.map((model) => get(`/v1/sessions?model=${encodeURIComponent(model.id)}`)),
    );
    this.sessions = lists.flatMap((list) => list.data);
  }

  render() {
    const models = this.health.models.filter((model) => model.memory);
    return html`<h1>Memory</h1>
      ${this.failureLine()}
      <p class="actions"><button type="button" @click=${() => this.reload()}>Refresh</button></p>
      <section aria-labelledby="tiers-title">
        <h2 id="tiers-title">Tiers</h2>
        ${models.length
          ? this.tiers(models)
          : html`<p class="hint">
              ${this.isLoaded ? 'No model with a prefix cache is loaded.' : 'Loading …'}
            </p>`}
        ${this.pressure()} ${this.disk()}
      </section>
      <section aria-labelledby="sessions-title">
        <h2 id="sessions-title">Sessions</h2>
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

  tiers(models) {
    return html`<div class="table-frame" tabindex="0" role="region" aria-label="Tiers">
      <table>
        <thead>
          <tr>
            <th scope="col">Model</th>
            <th scope="col" class="number">Cached tokens</th>
            <th scope="col">Live states</th>
            <th scope="col">Blocks in RAM</th>
            <th scope="col">Blocks on disk</th>
            <th scope="col" class="number">Written today</th>
          </tr>
        </thead>
        <tbody>
          ${models.map(
            ({ id, memory }) =>
              html`<tr>
                <th scope="row">${id}</th>
                <td class="number">${count(memory.kept_tokens)}</td>
                <td>
                  ${counted(memory.parked_sequences, 'state')}, ${bytes(memory.parked_bytes)}
                </td>
                <td>${share(memory.ram_bytes, memory.ram_budget_bytes)}</td>
                <td>
                  ${memory.store
                    ? html`${counted(memory.store.blocks, 'block')},
                      ${share(memory.store.stored_bytes, memory.store.allowed_bytes)}${memory.store
                        .mode === 'writing'
                        ? ''
                        : `; ${memory.store.mode}`}`
                    : 'off'}
                </td>
                <td class="number">
                  ${memory.store ? bytes(memory.store.written_today_bytes) : ''}
                </td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>`;
  }

  disk() {
    const store = this.store;
    if (!store?.folder) return nothing;
    return html`<p>
      The store <code>${store.folder}</code> has ${counted(store.blocks, 'block')} with
      ${bytes(store.file_bytes)} of at most ${bytes(store.allowed_bytes)};
      ${counted(store.pinned_blocks, 'block')} pinned, ${bytes(store.written_today_bytes)} written
      today, ${bytes(store.volume_free_bytes)} free on its
      volume${store.quarantined_files
        ? `, ${counted(store.quarantined_files, 'damaged file')} in quarantine`
        : ''}.
    </p>`;
  }

  sessionTable() {
    if (!this.sessions.length) {
      return html`<p class="hint">
        ${this.isLoaded ? 'There are no sessions. A request opens one with the header X-Session-ID.' : 'Loading …'}
      </p>`;
    }
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
          ${this.sessions.map((session) => this.sessionRow(session))}
        </tbody>
      </table>
    </div>`;
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
          label="Forget"
          question="Delete its cached tokens?"
          @confirm=${() => this.forget(session)}
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

  async forget(session) {
    await this.attempt(() => remove(`${addressOf(session)}&forget=true`));
    await this.reload();
  }
}
customElements.define('memory-view', MemoryView);

/** /health answers 503 while a model loads, with the same content. */
async function healthOf() {
  const response = await fetch('/health', {
    headers: access.key ? { authorization: `Bearer ${access.key}` } : {},
    credentials: 'omit',
  });
  return response.json();
}

function addressOf(session, action = '') {
  const id = encodeURIComponent(session.id);
  return `/v1/sessions/${id}${action}?model=${encodeURIComponent(session.model)}`;
}

function share(part, whole) {
  return html`<meter
      min="0"
      max=${whole || 1}
      value=${part}
      aria-label="${bytes(part)} of ${bytes(whole)}"
    ></meter>
    ${bytes(part)} of ${bytes(whole)}`;
}
