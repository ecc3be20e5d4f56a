// Now: the requests under way, and what the workers compute.

import { html, nothing } from '../vendor/lit.js';
import { access, get, post, remove } from '../api.js';
import { ago, bytes, count, counted, percent, seconds } from '../format.js';
import { PolledView } from '../view.js';

const WAITS = {
  place: 'memory for its model',
  load: 'its model, which is being loaded',
  lookup: 'another search of the cache',
  disk: 'cached blocks from disk',
  images: 'its images',
  twin: 'another request that prefills the same prefix',
  memory: 'a free place and KV memory',
  reader: 'a slow client',
};
const SECONDS_SHOWN = 30;
const STALL_SECONDS = 0.5;

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
    this.lookedAt = Date.now();
    this.requests = requests.filter((request) => request.model);
    this.activity = activity;
  }

  note(model) {
    const before = this.activity.models.find((other) => other.model === model.model);
    if (!before || model.steps <= before.steps) return;
    const steps = model.steps - before.steps;
    const entry = {
      at: new Date(),
      seconds: (Date.now() - this.lookedAt) / 1000,
      steps,
      sequences: model.running,
      prompt: (model.prompt_tokens - before.prompt_tokens) / steps,
      generated: (model.generated_tokens - before.generated_tokens) / steps,
      longest: longestStep(before.step_seconds, model.step_seconds),
    };
    const entries = [entry, ...(this.history.get(model.model) ?? [])];
    this.history.set(model.model, entries.slice(0, SECONDS_SHOWN));
  }

  render() {
    return html`<h1>Now</h1>
      ${this.failureLine()}
      <section>
        <h2>Requests</h2>
        ${this.requestTable()}
      </section>
      <section aria-labelledby="workers-title">
        <h2 id="workers-title">Models</h2>
        ${this.activity.models.map((model) => this.worker(model))}
        ${this.isLoaded && !this.activity.models.length
          ? html`<p class="empty">No model is loaded.</p>`
          : nothing}
      </section>`;
  }

  requestTable() {
    if (!this.requests.length) {
      return html`<p class="empty">${this.isLoaded ? 'No request is under way.' : 'Loading …'}</p>`;
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
        ${request.cached_tokens || request.answer_tokens
          ? percent(request.cached_tokens, request.prompt_tokens)
          : ''}
      </td>
      <td class="number">${request.answer_tokens ? count(request.answer_tokens) : ''}</td>
      <td class="number">${request.tokens_per_second?.toFixed(1) ?? ''}</td>
      <td class="number">${seconds(request.age_seconds)}</td>
      <td>
        ${access.isAdmin || isStored(request)
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
    await this.attempt(() =>
      access.isAdmin
        ? remove(`/admin/requests/${encodeURIComponent(request.id)}`)
        : post(`/v1/responses/${request.answer_id}/cancel`),
    );
    await this.reload();
  }

  worker(model) {
    const entries = this.history.get(model.model) ?? [];
    const figures = [
      ['Running', `${count(model.running)} of ${count(model.max_running)}`, 'sequences'],
      ['Queued', count(model.queued), 'sequences'],
      ['KV memory', bytes(model.kv_reserved_bytes), `reserved of ${bytes(model.kv_budget_bytes)}`],
      ['Generated', rate(entries, 'generated'), 'tokens/s'],
      ['Prefilled', rate(entries, 'prompt'), `tokens/s, ${count(model.step_tokens)} per step at most`],
    ];
    return html`<h3>${model.model}</h3>
      <dl class="figures" aria-label="Work of ${model.model}">
        ${figures.map(
          ([name, value, more]) =>
            html`<div>
              <dt>${name}</dt>
              <dd><span class="figure">${value}</span><span class="hint">${more}</span></dd>
            </div>`,
        )}
      </dl>
      ${model.recent_steps.length ? this.steps(model) : nothing}
      ${entries.length ? secondsTable(model.model, entries) : nothing}`;
  }

  /** The last steps, a bar for each: as high as its batch. */
  steps(model) {
    const steps = model.recent_steps;
    const usual = usualSeconds(steps);
    const highest = Math.max(...steps.map((step) => step.sequences), 1);
    const stalls = steps.filter((step) => isStall(step, usual));
    const last = steps.at(-1);
    return html`<figure class="panel steps-figure" role="region" aria-label="Steps of ${model.model}">
      <figcaption class="view-head">
        <span>The last ${count(steps.length)} steps: the size of each batch</span>
        <ul class="legend" aria-label="Colors">
          <li><i class="step-decode"></i>decode</li>
          <li><i class="step-prefill"></i>with prefill</li>
          <li><i class="step-stall"></i>stall</li>
        </ul>
      </figcaption>
      <div
        class="steps"
        role="img"
        aria-label="Batches of ${model.model}: the last of ${counted(last.sequences, 'sequence')}, the
        largest of ${highest}, ${counted(stalls.length, 'stall')}"
      >
        ${steps.map(
          (step) =>
            html`<i
              class=${kindOf(step, usual)}
              title=${stepTitle(step)}
              .style=${`height: ${(100 * step.sequences) / highest}%`}
            ></i>`,
        )}
      </div>
      <p class="hint">
        ${usualText(usual)}; the longest took
        ${seconds(Math.max(...steps.map((step) => step.seconds)))}.
        ${stalls.length
          ? html`<strong>${counted(stalls.length, 'stall')}</strong>, the last one
              ${ago(stalls.at(-1).at)}: ${stepTitle(stalls.at(-1))}.`
          : 'No step has stalled.'}
      </p>
    </figure>`;
  }
}
customElements.define('now-view', NowView);

/** What is usual for steps that prefill, and for those that only decode. */
function usualSeconds(steps) {
  const prefill = steps.filter((step) => step.prompt_tokens);
  const decode = steps.filter((step) => !step.prompt_tokens);
  return {
    prefill: median(prefill.map((step) => step.seconds)),
    promptToken: median(prefill.map((step) => step.seconds / step.prompt_tokens)),
    decode: median(decode.map((step) => step.seconds)),
  };
}

function usualText({ prefill, decode }) {
  const parts = [
    decode === undefined ? '' : `${seconds(decode)} per decode step`,
    prefill === undefined ? '' : `${seconds(prefill)} per step with prefill`,
  ];
  return `Median ${parts.filter(Boolean).join(', ')}`;
}

/**
 * A step that took so long that people notice, and much longer than is usual for its kind. One that
 * prefills may take long if it has many tokens.
 */
function isStall(step, usual) {
  if (step.seconds <= STALL_SECONDS) return false;
  if (!step.prompt_tokens) return step.seconds > 4 * usual.decode;
  const each = step.seconds / step.prompt_tokens;
  return step.seconds > 4 * usual.prefill && each > 4 * usual.promptToken;
}

function kindOf(step, usual) {
  if (isStall(step, usual)) return 'step-stall';
  return step.prompt_tokens ? 'step-prefill' : 'step-decode';
}

function stepTitle(step) {
  const parts = [
    counted(step.sequences, 'sequence'),
    step.prompt_tokens ? counted(step.prompt_tokens, 'prompt token') : '',
    step.generated_tokens ? counted(step.generated_tokens, 'generated token') : '',
    seconds(step.seconds),
  ];
  return parts.filter(Boolean).join(', ');
}

function median(values) {
  return [...values].sort((one, other) => one - other)[Math.floor(values.length / 2)];
}

/** Tokens per second between the last two looks. */
function rate(entries, kind) {
  const [last] = entries;
  if (!last || Date.now() - last.at > 3000) return '0';
  return count((last[kind] * last.steps) / last.seconds);
}

function secondsTable(model, entries) {
  return html`<details class="as-table">
    <summary>As a table, by the second</summary>
    <div class="table-frame" tabindex="0" role="region" aria-label="Steps of ${model} by the second">
      <table>
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
              html`<tr class=${entry.longest > STALL_SECONDS && !entry.prompt ? 'stall' : ''}>
                <th scope="row">${entry.at.toLocaleTimeString()}</th>
                <td class="number">${count(entry.steps)}</td>
                <td class="number">${count(entry.sequences)}</td>
                <td class="number">${entry.prompt.toFixed(1)}</td>
                <td class="number">${entry.generated.toFixed(1)}</td>
                <td class="number">${stepText(entry.longest)}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
  </details>`;
}

/** Whether anyone who sees the request may cancel it: it is an answer of the chat. */
function isStored(request) {
  return request.answer_id.startsWith('resp_');
}

function phase(request) {
  if (request.waits_for) return `waits for ${WAITS[request.waits_for] ?? request.waits_for}`;
  if (request.state === 'reading' && request.prefilled_tokens) {
    const { prefilled_tokens: done, prompt_tokens: all } = request;
    return html`prefill, ${percent(done, all)}
      <progress class="progress" max=${all} value=${done} aria-label="Prefill"></progress>`;
  }
  if (request.state === 'reading') return 'queued or in prefill';
  return request.state === 'abandoned' ? 'client disconnected; kept for a retry' : request.state;
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
