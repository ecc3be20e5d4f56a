// Models: which there are, which are loaded, and pulling further ones.

import { html, nothing } from '../vendor/lit.js';
import { access, get, linesOf, post } from '../api.js';
import { bytes, count, percent } from '../format.js';
import { PolledView, announce } from '../view.js';

class ModelsView extends PolledView {
  static pollMilliseconds = 2000;
  static properties = {
    catalog: { state: true },
    cards: { state: true },
    busy: { state: true },
    pull: { state: true },
  };

  constructor() {
    super();
    this.catalog = null;
    this.cards = [];
    this.busy = new Set();
    this.pull = null;
  }

  async load() {
    const [{ data }, catalog] = await Promise.all([
      get('/v1/models'),
      access.isAdmin ? get('/admin/models') : null,
    ]);
    this.cards = data;
    this.catalog = catalog;
  }

  render() {
    return html`<h1>Models</h1>
      ${this.failureLine()}
      ${this.catalog ? this.catalogPart() : this.cardTable()}`;
  }

  /** What ordinary keys may see. */
  cardTable() {
    return html`<div class="table-frame" tabindex="0" role="region" aria-label="Models">
      <table>
        <thead>
          <tr>
            <th scope="col">Model</th>
            <th scope="col">State</th>
            <th scope="col" class="number">Context</th>
          </tr>
        </thead>
        <tbody>
          ${this.cards.map(
            (card) =>
              html`<tr>
                <th scope="row">${card.id} ${baseMark(card)}</th>
                <td>${card.state}</td>
                <td class="number">${card.context_length ? count(card.context_length) : ''}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>`;
  }

  catalogPart() {
    const { models, left_out: leftOut, downloads } = this.catalog;
    return html`${models.map((model) => this.model(model))}
      ${models.length ? nothing : html`<p class="hint">This server has no models yet.</p>`}
      ${leftOut.length
        ? html`<section aria-labelledby="left-out-title">
            <h2 id="left-out-title">Found, but not served</h2>
            <dl class="wide">
              ${leftOut.map(
                (each) =>
                  html`<dt>${each.name}</dt>
                    <dd>${each.reason} <span class="hint">(${each.origin})</span></dd>`,
              )}
            </dl>
          </section>`
        : nothing}
      <section aria-labelledby="pull-title">
        <h2 id="pull-title">Pull a model</h2>
        <form class="row" @submit=${(event) => this.startPull(event)}>
          <label
            >Id on the Hugging Face Hub
            <input name="model" placeholder="owner/name" required pattern="[^\\s\\/]+\\/[^\\s\\/]+"
          /></label>
          <button class="primary" ?disabled=${this.pull !== null}>Pull</button>
          ${this.pull
            ? html`<button type="button" @click=${() => this.pull.abort()}>Stop</button>`
            : nothing}
        </form>
        ${Object.entries(downloads).map(([name, stages]) => download(name, stages))}
      </section>`;
  }

  model(model) {
    const { health } = model;
    const card = this.cards.find((each) => each.id === model.id);
    const facts = [
      ['Context', contextText(health)],
      ['Weights', model.weight_bytes === null ? 'not on this machine' : bytes(model.weight_bytes)],
      ['Fits', fitText(model, this.catalog.limit_bytes)],
      ['Memory', health.footprint_bytes ? bytes(health.footprint_bytes) : ''],
      ['KV bits', kvText(model)],
      ['Layout', health.layout ? `${health.layout}${reason(health)}` : ''],
      ['Adapters', health.adapters.join(', ')],
      ['Aliases', model.aliases.join(', ')],
      ['Tool calls', health.dialect?.family ?? ''],
      ['Quality', qualityText(card?.kv_quality)],
      ['From', model.origin],
    ].filter(([, value]) => value);
    const title = `model-${model.id}`;
    return html`<section class="card" aria-labelledby=${title}>
      <h2 id=${title}>
        ${model.id} <span class="badge">${health.state}</span>
        ${health.pinned ? html`<span class="badge">pinned</span>` : nothing} ${baseMark(card)}
      </h2>
      ${health.failure ? html`<p class="failure">${health.failure}</p>` : nothing}
      <dl>
        ${facts.map(
          ([name, value]) =>
            html`<dt>${name}</dt>
              <dd>${value}</dd>`,
        )}
      </dl>
      <p class="actions">
        ${this.action(model, 'load', 'Load', !['unloaded', 'failed'].includes(health.state))}
        ${this.action(model, 'unload', 'Unload', health.state !== 'ready' || health.pinned)}
        ${this.action(model, 'pin', health.pinned ? 'Unpin' : 'Pin', false, {
          pinned: !health.pinned,
        })}
      </p>
    </section>`;
  }

  action(model, name, label, isOff, body = undefined) {
    return html`<button
      type="button"
      aria-label="${label} ${model.id}"
      ?disabled=${isOff || this.busy.has(model.id)}
      @click=${() => this.act(model, name, label, body)}
    >
      ${label}
    </button>`;
  }

  async act(model, name, label, body) {
    this.busy = new Set([...this.busy, model.id]);
    const path = `/admin/models/${model.id.split('/').map(encodeURIComponent).join('/')}/${name}`;
    const isDone = await this.attempt(() => post(path, body));
    if (isDone) announce(`${label}: done for ${model.id}`);
    this.busy = new Set([...this.busy].filter((id) => id !== model.id));
    const { failure } = this;
    await this.reload();
    if (!isDone) this.failure = failure;
  }

  async startPull(event) {
    event.preventDefault();
    const model = String(new FormData(event.target).get('model')).trim();
    this.pull = new AbortController();
    let failure = '';
    try {
      const options = { body: { model }, signal: this.pull.signal };
      for await (const line of linesOf('POST', '/api/pull', options)) {
        if (line.error) throw new Error(line.error);
      }
      announce(`${model} is pulled`);
    } catch (error) {
      failure = error.name === 'AbortError' ? '' : error.message;
    }
    this.pull = null;
    await this.reload();
    this.failure = failure;
  }
}
customElements.define('models-view', ModelsView);

/** Says of a base model what it cannot do. */
function baseMark(card) {
  if (card?.can_chat !== false) return nothing;
  return html`<span class="badge">base model: completes text, cannot chat</span>`;
}

function download(name, stages) {
  return html`<div>
    <p>${name}</p>
    ${Object.entries(stages).map(
      ([stage, step]) =>
        html`<label
          >${stage}: ${bytes(step.done_bytes)} of ${bytes(step.total_bytes)}
          <progress max=${step.total_bytes || 1} value=${step.done_bytes}></progress
        ></label>`,
    )}
  </div>`;
}

function contextText({ context_length: fits, max_context_length: own }) {
  if (!fits) return '';
  const text = `${count(fits)} tokens`;
  return own && own > fits ? `${text}, of the model's ${count(own)}` : text;
}

function fitText(model, limit) {
  if (model.fits === null) return '';
  const part = `${bytes(model.weight_bytes)} of weights, ${bytes(limit)} usable for models`;
  return model.fits ? `yes: ${part}` : `no: ${part}`;
}

function kvText(model) {
  const { kv } = model.health;
  if (!kv) return model.kv_bits;
  const forms = Object.entries(kv.forms).map(([bits, size]) => `${bits}: ${bytes(size)}`);
  return `${kv.bits}; per token ${forms.join(', ')}`;
}

function reason(health) {
  return health.layout_reason ? ` (${health.layout_reason})` : '';
}

function qualityText(quality) {
  if (!quality) return '';
  return quality.forms
    .filter((form) => form.perplexity !== null)
    .map((form) => `${form.form}: perplexity ${form.perplexity.toFixed(3)}`)
    .join(', ');
}
