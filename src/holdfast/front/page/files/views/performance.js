// Performance: what answers took, by model and time range, from the server's history.

import { html, nothing } from '../vendor/lit.js';
import { access, get } from '../api.js';
import { bytes, clockOf, count, percent, seconds } from '../format.js';
import '../plot.js';
import { PolledView } from '../view.js';

const RANGES = {
  '15m': { label: '15 min', step: 60 },
  '1h': { label: '1 h', step: 60 },
  '6h': { label: '6 h', step: 300 },
  '24h': { label: '24 h', step: 900 },
  '7d': { label: '7 d', step: 3600 },
};
/** name in the answer → [title, what it is] */
const PHASES = {
  load: ['Load', 'waiting for the model; only requests that had to wait'],
  queue: ['Queue', 'in the worker, before prefill'],
  lookup: ['Lookup', 'of the prompt in the prefix cache; part of the queue'],
  restore: ['Restore', 'of cached blocks, from disk if they are there; part of the queue'],
  prefill: ['Prefill', 'from admission to the first token'],
  first_token: ['First token', 'from the request to the first text, with all waiting'],
  gap: ['Gap between tokens', 'between two pieces of text of one answer'],
};
const SPREAD = [
  ['p50', 'Median'],
  ['p95', 'p95'],
  ['p99', 'p99'],
];
const LEAST_FOR_P99 = 100; // values; the p99 of fewer is just the largest
const EVERY_MODEL = 'All models';

class PerformanceView extends PolledView {
  static pollMilliseconds = 10_000;
  static properties = {
    report: { state: true },
    cards: { state: true },
    plotsShown: { state: true },
  };

  constructor() {
    super();
    const query = new URLSearchParams(location.search);
    const range = query.get('range') ?? '';
    this.range = range in RANGES ? range : '1h';
    this.model = query.get('model') ?? '';
    this.unknown = ''; // the name of a model that the address has, but not the server
    this.report = null;
    this.plotted = null;
    this.plotsShown = 1;
    /** the models, as /v1/models has them; null: to be read */
    this.cards = null;
  }

  async load() {
    if (!access.isAdmin) return;
    const query = new URLSearchParams({ range: this.range });
    if (this.model) query.set('model', this.model);
    const [report, { data }] = await Promise.all([
      get(`/admin/performance?${query}`).catch((error) => {
        if (error.code !== 'model_not_found' || !this.model) throw error;
        return null;
      }),
      this.cards ? { data: this.cards } : get('/v1/models'),
    ]);
    if (!report) {
      // an old bookmark, for example
      this.unknown = query.get('model');
      this.model = '';
      this.setAddress();
      await this.load();
      return;
    }
    this.cards = data;
    if (report.range !== this.range || (report.model ?? '') !== this.model) return;
    this.report = report;
  }

  choose(change) {
    Object.assign(this, change);
    this.cards = null;
    this.unknown = '';
    this.setAddress();
    this.requestUpdate();
    this.reload();
  }

  setAddress() {
    const query = new URLSearchParams({ range: this.range });
    if (this.model) query.set('model', this.model);
    history.replaceState(null, '', `${location.pathname}?${query}`);
  }

  render() {
    return html`<h1>Performance</h1>
      ${this.failureLine()}
      ${this.unknown
        ? html`<p class="hint" role="status">
            There is no model ${this.unknown} here; all models are shown.
          </p>`
        : nothing}
      ${access.caller && !access.isAdmin
        ? html`<p class="hint">
            These figures cover all users; you need an admin key.
            <code>holdfast keys add NAME --admin</code> creates one.
          </p>`
        : html`${this.controls()} ${this.report ? this.content(this.report) : this.loading()}`}`;
  }

  loading() {
    return this.failure ? nothing : html`<p class="hint">Loading …</p>`;
  }

  controls() {
    const names = new Set((this.report?.models ?? []).map((each) => each.model));
    for (const card of this.cards ?? []) names.add(card.id);
    if (this.model) names.add(this.model);
    return html`<div class="row controls">
      <label
        >Model
        <select @change=${(event) => this.choose({ model: event.target.value })}>
          <option value="" ?selected=${!this.model}>${EVERY_MODEL}</option>
          ${[...names]
            .sort()
            .map(
              (name) =>
                html`<option value=${name} ?selected=${name === this.model}>${name}</option>`,
            )}
        </select></label
      >
      <div class="segments" role="group" aria-label="Time range">
        ${Object.entries(RANGES).map(
          ([name, { label }]) =>
            html`<button
              type="button"
              aria-pressed=${name === this.range ? 'true' : 'false'}
              @click=${() => this.choose({ range: name })}
            >
              ${label}
            </button>`,
        )}
      </div>
    </div>`;
  }

  content(report) {
    if (!report.points.length) {
      return html`<div class="card empty">
          <h2>No answers in this period</h2>
          <p>
            Choose a longer time range, or send a message in <a href="/">Chat</a>. The server keeps
            seven days of history, which survives restarts.
          </p>
        </div>
        ${this.quality()}`;
    }
    return html`${this.tiles(report.total)} ${this.phases(report.total)} ${this.plots(report)}
    ${this.byModel(report)} ${this.quality()}`;
  }

  tiles(total) {
    const tiles = [
      ['Answers', count(total.answers)],
      ['Generated tokens', count(total.generated_tokens)],
      ['First token, median', total.first_token ? seconds(total.first_token.p50) : '–'],
      ['Tokens per second, median', total.speed ? speed(total.speed.p50) : '–'],
      ['Prompt from the cache', percent(total.cached_tokens, total.prompt_tokens) || '–'],
      ['Drafts accepted', percent(total.accepted_tokens, total.drafted_tokens) || '–'],
    ];
    return html`<dl class="tiles">
      ${tiles.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>`;
  }

  phases(total) {
    const rows = Object.entries(PHASES);
    return html`<section>
      <h2>Phases</h2>
      <div class="table-frame" tabindex="0" role="region" aria-label="Phases">
        <table>
          <thead>
            <tr>
              <th scope="col">Phase</th>
              ${SPREAD.map(([, title]) => html`<th scope="col" class="number">${title}</th>`)}
              <th scope="col" class="number">Mean</th>
              <th scope="col" class="number">Count</th>
            </tr>
          </thead>
          <tbody>
            ${rows.map(([name, [title]]) => {
              const found = total[name];
              return html`<tr>
                <th scope="row">${title}</th>
                ${SPREAD.map(([key]) => spreadCell(found, key))}
                <td class="number">${found ? seconds(found.mean) : '–'}</td>
                <td class="number">${count(found?.count ?? 0)}</td>
              </tr>`;
            })}
          </tbody>
        </table>
      </div>
      ${total.speed
        ? html`<p>
            Speed of answers: median ${speed(total.speed.p50)} tokens per second, p5 (slowest 5 %)
            ${speed(total.speed.p5)}${total.speed.count < LEAST_FOR_P99
              ? ''
              : `, p1 (slowest 1 %) ${speed(total.speed.p1)}`}.
          </p>`
        : nothing}
      ${total.drafted_tokens
        ? html`<p>
            Speculation: ${count(total.drafted_tokens)} tokens drafted,
            ${count(total.accepted_tokens)} accepted
            (${percent(total.accepted_tokens, total.drafted_tokens)}).
          </p>`
        : nothing}
      <details class="hint">
        <summary>What the phases are</summary>
        <dl>
          ${rows.map(([, [title, what]]) => html`<dt>${title}</dt><dd>${what}</dd>`)}
        </dl>
        <p>Percentiles may be up to 19 % off; means are exact.</p>
      </details>
    </section>`;
  }

  plots(report) {
    if (this.plotted?.report !== report) this.plotted = { report, plots: plotsOf(report) };
    const { times, clock, tick, plots } = this.plotted.plots;
    return html`<section aria-labelledby="plots-title">
      <h2 id="plots-title">Over time</h2>
      ${plots.slice(0, this.plotsShown).map(
        (plot) =>
          html`<line-plot
            .heading=${plot.heading}
            .note=${plot.note ?? ''}
            .times=${times}
            .series=${plot.series}
            .text=${plot.text}
            .clock=${clock}
            .tick=${tick}
            .top=${plot.top ?? 0}
          ></line-plot>`,
      )}
    </section>`;
  }

  updated() {
    // one plot after the other, so that the page never stands still
    if (this.plotsShown >= (this.plotted?.plots.plots.length ?? 0)) return;
    setTimeout(() => {
      this.plotsShown += 1;
    });
  }

  byModel({ models, model }) {
    if (model !== null || models.length < 2) return nothing;
    return html`<section>
      <h2>By model</h2>
      <div class="table-frame" tabindex="0" role="region" aria-label="By model">
        <table>
          <thead>
            <tr>
              <th scope="col">Model</th>
              <th scope="col" class="number">Answers</th>
              <th scope="col" class="number">Generated tokens</th>
              <th scope="col" class="number">First token, median</th>
              <th scope="col" class="number">First token, p95</th>
              <th scope="col" class="number">Tokens/s, median</th>
              <th scope="col" class="number">From the cache</th>
            </tr>
          </thead>
          <tbody>
            ${models.map(
              ({ model: name, figures }) =>
                html`<tr>
                  <th scope="row">${name}</th>
                  <td class="number">${count(figures.answers)}</td>
                  <td class="number">${count(figures.generated_tokens)}</td>
                  <td class="number">
                    ${figures.first_token ? seconds(figures.first_token.p50) : '–'}
                  </td>
                  <td class="number">
                    ${figures.first_token ? seconds(figures.first_token.p95) : '–'}
                  </td>
                  <td class="number">${figures.speed ? speed(figures.speed.p50) : '–'}</td>
                  <td class="number">
                    ${percent(figures.cached_tokens, figures.prompt_tokens) || '–'}
                  </td>
                </tr>`,
            )}
          </tbody>
        </table>
      </div>
    </section>`;
  }

  quality() {
    const measured = (this.cards ?? []).filter(
      (card) => card.kv_quality && (!this.model || card.id === this.model),
    );
    return html`<section aria-labelledby="quality-title">
      <h2 id="quality-title">Quality loss from KV quantization</h2>
      ${measured.length
        ? measured.map((card) => qualityTable(card.id, card.kv_quality))
        : html`<p class="hint">
            How much quantized keys and values degrade a model has not been measured.
            <code>holdfast quality MODEL</code> does it, and the result appears here while the model
            is loaded.
          </p>`}
    </section>`;
  }
}
customElements.define('performance-view', PerformanceView);

/** A percentile; null if there are too few values for it. */
function shownValue(found, key) {
  return !found || (key === 'p99' && found.count < LEAST_FOR_P99) ? null : found[key];
}

/** A percentile in a table. */
function spreadCell(found, key) {
  const value = shownValue(found, key);
  if (value !== null) return html`<td class="number">${seconds(value)}</td>`;
  const why = `With fewer than ${LEAST_FOR_P99} values, the p99 would be the largest one.`;
  return html`<td class="number" title=${found ? why : nothing}>–</td>`;
}

function qualityTable(model, quality) {
  return html`<div class="table-frame" tabindex="0" role="region" aria-label="Quality of ${model}">
    <table>
      <caption>
        ${model}, measured with ${count(quality.text_tokens)} tokens of text and
        ${count(quality.questions)} questions
      </caption>
      <thead>
        <tr>
          <th scope="col">KV bits</th>
          <th scope="col" class="number">Perplexity</th>
          <th scope="col" class="number">Divergence</th>
          <th scope="col" class="number">Same prediction</th>
          <th scope="col" class="number">Right answers</th>
          <th scope="col" class="number">KV size per token</th>
        </tr>
      </thead>
      <tbody>
        ${quality.forms.map(
          (form) =>
            html`<tr>
              <th scope="row">
                ${form.form}${form.refused
                  ? html`<br /><span class="hint">${form.refused}</span>`
                  : nothing}
              </th>
              <td class="number">${form.perplexity?.toFixed(3) ?? '–'}</td>
              <td class="number">${form.kl_divergence?.toFixed(4) ?? '–'}</td>
              <td class="number">
                ${form.agreement === null ? '–' : `${(100 * form.agreement).toFixed(1)} %`}
              </td>
              <td class="number">
                ${form.right === null ? '–' : `${count(form.right)} of ${count(quality.questions)}`}
              </td>
              <td class="number">
                ${form.bytes_per_token === null ? '–' : bytes(form.bytes_per_token)}
              </td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** All times of a report at equal distances, and its point at each of them; null: no answer. */
function spread(report, step) {
  const byTime = new Map(report.points.map((point) => [point.at, point]));
  const times = [];
  for (let time = report.since; time <= report.until; time += step) times.push(time);
  return { times, points: times.map((time) => byTime.get(time) ?? null) };
}

/** The plots of a report, as the properties of `line-plot`. */
function plotsOf(report) {
  const { times, points } = spread(report, RANGES[report.range].step);
  const { clock, tick } = clocksFor(times, report.range);
  const valuesOf = (value) => points.map((point) => (point ? value(point) : null));
  const percentiles = (name, kinds) =>
    kinds
      .map(([key, label]) => ({
        label,
        values: valuesOf(({ figures }) => shownValue(figures[name], key)),
      }))
      .filter(({ label, values }) => label !== 'p99' || values.some((value) => value !== null));
  const rate = (label, tokens) => ({
    label,
    values: valuesOf(({ figures, seconds: length }) => tokens(figures) / Math.max(1, length)),
  });
  const share = (part, whole) => [
    {
      label: 'Share',
      values: valuesOf(({ figures }) =>
        figures[whole] ? (100 * figures[part]) / figures[whole] : null,
      ),
    },
  ];
  const plots = [
    {
      heading: 'Time to first token',
      series: percentiles('first_token', SPREAD),
      text: seconds,
    },
    { heading: 'Gaps between tokens', series: percentiles('gap', SPREAD), text: seconds },
    {
      heading: 'Speed of an answer',
      note: 'Tokens per second, after the first.',
      series: percentiles('speed', [
        ['p50', 'Median'],
        ['p5', 'p5 (slowest 5 %)'],
      ]),
      text: speed,
    },
    {
      heading: 'Tokens of all answers',
      note: 'Tokens per second, counted when an answer ends.',
      series: [
        rate('Generated', (figures) => figures.generated_tokens),
        rate('Prefilled', (figures) => figures.prompt_tokens - figures.cached_tokens),
        rate('From the cache', (figures) => figures.cached_tokens),
      ],
      text: speed,
    },
    {
      heading: 'Before the first token',
      note: 'The p95 of each phase.',
      series: ['load', 'queue', 'restore', 'prefill'].flatMap((name) =>
        percentiles(name, [['p95', PHASES[name][0]]]),
      ),
      text: seconds,
    },
    {
      heading: 'Prompt tokens from the cache',
      series: share('cached_tokens', 'prompt_tokens'),
      text: share100,
      top: 100,
    },
  ];
  if (report.total.drafted_tokens) {
    plots.push({
      heading: 'Drafted tokens accepted',
      series: share('accepted_tokens', 'drafted_tokens'),
      text: share100,
      top: 100,
    });
  }
  return { times, clock, tick, plots };
}

/**
 * Two functions that turn a time into text: for tables, where the texts of `times` are made only once,
 * and for the axis of a plot, where there is no room for the day at each hour.
 */
function clocksFor(times, range) {
  const days = new Intl.DateTimeFormat('en-GB', { weekday: 'short', day: 'numeric' });
  const text = (at) => (range === '7d' ? `${days.format(at)} ${clockOf(at)}` : clockOf(at));
  const known = new Map(times.map((time) => [time, text(new Date(1000 * time))]));
  const clock = (time) => known.get(time) ?? text(new Date(1000 * time));
  const tick = (time) => {
    const at = new Date(1000 * time);
    const isMidnight = at.getHours() === 0 && at.getMinutes() === 0;
    return range === '7d' && isMidnight ? days.format(at) : clockOf(at);
  };
  return { clock, tick };
}

function speed(value) {
  return value < 99.95 ? value.toFixed(1) : count(value);
}

function share100(value) {
  return `${Math.round(value)} %`;
}
