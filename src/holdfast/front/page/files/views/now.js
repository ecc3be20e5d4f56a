// Now: the requests under way, and what the workers compute.

import { html, nothing } from '../vendor/lit.js';
import { access, get, remove } from '../api.js';
import { bytes, count, percent, seconds } from '../format.js';
import { PolledView } from '../view.js';

const WAITS = {
  place: 'memory for its model',
  load: 'its model, which is being loaded',
  disk: 'cached blocks from disk',
  twin: 'another request that prefills the same prefix',
  memory: 'a free place and KV memory',
  reader: 'its client, which does not read',
};
const STEPS_SHOWN = 30;

class NowView extends PolledView {
  static properties = { requests: { state: true }, activity: { state: true } };

  constructor() {
    super();
    this.requests = [];
    this.activity = { models: [] };
    /** @type {Map<string, object[]>} what each model did between two looks, the latest first */
    this.history = new Map();
  }

  async load() {
    const [{ requests }, activity] = await Promise.all([
      get('/admin/requests'),
      get('/admin/activity'),
    ]);
    for (const model of activity.models) this.note(model);
    this.requests = requests.filter((request) => request.model);
    this.activity = activity;
  }

  note(model) {
    const before = this.activity.models.find((other) => other.model === model.model);
    if (!before || model.steps <= before.steps) return;
    const steps = model.steps - before.steps;
    const entry = {
      at: new Date(),
      steps,
      sequences: model.running,
      prompt: (model.prompt_tokens - before.prompt_tokens) / steps,
      generated: (model.generated_tokens - before.generated_tokens) / steps,
      longest: longestStep(before.step_seconds, model.step_seconds),
    };
    const entries = [entry, ...(this.history.get(model.model) ?? [])];
    this.history.set(model.model, entries.slice(0, STEPS_SHOWN));
  }

  render() {
    return html`<h1>Now</h1>
      ${this.failureLine()}
      <section aria-labelledby="requests-title">
        <h2 id="requests-title">Requests</h2>
        ${this.requestTable()}
      </section>
      <section aria-labelledby="workers-title">
        <h2 id="workers-title">Models at work</h2>
        ${this.activity.models.map((model) => this.worker(model))}
        ${this.isLoaded && !this.activity.models.length
          ? html`<p class="hint">No model is loaded.</p>`
          : nothing}
      </section>`;
  }

  requestTable() {
    if (!this.requests.length) {
      return html`<p class="hint">${this.isLoaded ? 'No request is under way.' : 'Loading …'}</p>`;
    }
    return html`<div class="table-frame" tabindex="0" role="region" aria-label="Requests">
      <table>
        <thead>
          <tr>
            <th scope="col">Request</th>
            <th scope="col">Model</th>
            <th scope="col">Phase</th>
            <th scope="col" class="number">Prompt</th>
            <th scope="col" class="number">Cached</th>
            <th scope="col" class="number">Answer</th>
            <th scope="col" class="number">Tokens/s</th>
            <th scope="col" class="number">Age</th>
            <th scope="col"><span class="visually-hidden">Actions</span></th>
          </tr>
        </thead>
        <tbody>
          ${this.requests.map((request) => this.row(request))}
        </tbody>
      </table>
    </div>`;
  }

  row(request) {
    const who = [request.key, request.session_id, request.client].filter(Boolean).join(' · ');
    return html`<tr>
      <th scope="row"><code>${request.path}</code><br /><span class="hint">${who}</span></th>
      <td>${request.model}</td>
      <td>${phase(request)}</td>
      <td class="number">${request.prompt_tokens ? count(request.prompt_tokens) : ''}</td>
      <td class="number">
        ${request.cached_tokens ? percent(request.cached_tokens, request.prompt_tokens) : ''}
      </td>
      <td class="number">${request.answer_tokens ? count(request.answer_tokens) : ''}</td>
      <td class="number">${request.tokens_per_second?.toFixed(1) ?? ''}</td>
      <td class="number">${seconds(request.age_seconds)}</td>
      <td>
        ${access.isAdmin
          ? html`<button
              type="button"
              aria-label="Cancel the request ${request.id}"
              @click=${() => this.cancel(request)}
            >
              Cancel
            </button>`
          : nothing}
      </td>
    </tr>`;
  }

  async cancel(request) {
    await this.attempt(() => remove(`/admin/requests/${encodeURIComponent(request.id)}`));
    await this.reload();
  }

  worker(model) {
    const entries = this.history.get(model.model) ?? [];
    return html`<h3>${model.model}</h3>
      <p>
        ${count(model.running)} of at most ${count(model.max_running)} sequences running,
        ${count(model.queued)} queued; KV ${bytes(model.kv_reserved_bytes)} of
        ${bytes(model.kv_budget_bytes)} reserved; ${count(model.steps)} steps since its start;
        at most ${count(model.step_tokens)} prompt tokens per step.
      </p>
      ${entries.length
        ? html`<div class="table-frame" tabindex="0" role="region" aria-label="Steps of ${model.model}">
            <table>
              <caption>
                The batch of its steps, in each second
              </caption>
              <thead>
                <tr>
                  <th scope="col">Time</th>
                  <th scope="col" class="number">Steps</th>
                  <th scope="col" class="number">Sequences</th>
                  <th scope="col" class="number">Prompt tokens per step</th>
                  <th scope="col" class="number">Generated tokens per step</th>
                  <th scope="col" class="number">Longest step</th>
                </tr>
              </thead>
              <tbody>
                ${entries.map(
                  (entry) =>
                    html`<tr class=${entry.longest > 0.5 ? 'stall' : ''}>
                      <th scope="row">${entry.at.toLocaleTimeString()}</th>
                      <td class="number">${count(entry.steps)}</td>
                      <td class="number">${count(entry.sequences)}</td>
                      <td class="number">${entry.prompt.toFixed(1)}</td>
                      <td class="number">${entry.generated.toFixed(1)}</td>
                      <td class="number">
                        ${entry.longest > 0.5 ? 'stall: ' : ''}${stepText(entry.longest)}
                      </td>
                    </tr>`,
                )}
              </tbody>
            </table>
          </div>`
        : nothing}`;
  }
}
customElements.define('now-view', NowView);

function phase(request) {
  if (request.waits_for) return `waits for ${WAITS[request.waits_for] ?? request.waits_for}`;
  if (request.state === 'reading' && request.prefilled_tokens) {
    return `prefill, ${percent(request.prefilled_tokens, request.prompt_tokens)}`;
  }
  if (request.state === 'reading') return 'queued or in prefill';
  return request.state === 'abandoned' ? 'without a client, for a retry' : request.state;
}

/** The upper bound of the longest step between two states of a histogram, in seconds. */
function longestStep(before, now) {
  if (!before || !now) return 0;
  let longest = 0;
  now.counts.forEach((number, place) => {
    if (number > before.counts[place]) longest = now.bounds[place] ?? Infinity;
  });
  return longest;
}

function stepText(longest) {
  if (!longest) return '';
  return Number.isFinite(longest) ? `≤ ${seconds(longest)}` : 'longer than all bounds';
}
