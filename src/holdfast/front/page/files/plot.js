// A plot over time, with a table of the same numbers beside it.

import { html, nothing } from './vendor/lit.js';
import uPlot from './vendor/uplot.js';
import { Component } from './view.js';

const STYLES = '/page/files/vendor/uplot.css';
const HEIGHT = 220;
const MANY_POINTS = 12;
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [1, 5]]; // also told apart without colours

/** The size of points in pixels: larger if there are few, which no line connects. */
function pointSize(values) {
  const points = values.filter((value) => value !== null).length;
  return points > MANY_POINTS ? 4 : 9;
}

/** Load the style sheet of the plots, once. */
function addStyles() {
  if (document.querySelector(`link[href="${STYLES}"]`)) return;
  document.head.append(Object.assign(document.createElement('link'), { rel: 'stylesheet', href: STYLES }));
}

/** The names of the series; with the values at a time while the pointer is there. */
class PlotLegend extends Component {
  static properties = { plot: { attribute: false }, series: { attribute: false }, place: { state: true } };

  constructor() {
    super();
    this.plot = null;
    this.series = [];
    /** the index of the time under the pointer; null: none */
    this.place = null;
  }

  render() {
    const { clock, times, valueText } = this.plot;
    const place = this.place;
    return html`<ul class="plot-legend">
      ${this.series.map(
        (each, index) =>
          html`<li>
            <span class="swatch series-${index + 1}"></span>${each.label}${place === null
              ? nothing
              : html` <b>${valueText.call(this.plot, each.values[place])}</b>`}
          </li>`,
      )}
      ${place === null ? nothing : html`<li class="hint">${clock(times[place])}</li>`}
    </ul>`;
  }
}
customElements.define('plot-legend', PlotLegend);

/**
 * heading: what is plotted. times: seconds since 1970, at equal distances. series: `{label, values}`
 * with a value, or null, for each time. text: turns a value into text. note: what the reader has to
 * know. top: the least upper end of the vertical axis. clock: turns a time into text. tick: the same,
 * for the axis.
 */
class LinePlot extends Component {
  static properties = {
    heading: {},
    note: {},
    times: { attribute: false },
    series: { attribute: false },
    text: { attribute: false },
    clock: { attribute: false },
    tick: { attribute: false },
    top: { attribute: false },
  };

  constructor() {
    super();
    addStyles();
    this.heading = '';
    this.note = '';
    this.times = [];
    this.series = [];
    this.text = String;
    this.clock = String;
    this.tick = String;
    this.top = 0;
    this.plot = null;
    this.dark = matchMedia('(prefers-color-scheme: dark)');
    this.onColours = () => this.draw();
    this.sizes = new ResizeObserver(() => this.fit());
  }

  connectedCallback() {
    super.connectedCallback();
    this.dark.addEventListener('change', this.onColours);
  }

  disconnectedCallback() {
    this.dark.removeEventListener('change', this.onColours);
    this.sizes.disconnect();
    this.plot?.destroy();
    this.plot = null;
    super.disconnectedCallback();
  }

  render() {
    const rows = this.times
      .map((_, place) => place)
      .filter((place) => this.series.some((each) => each.values[place] !== null))
      .reverse();
    return html`<section class="plot card" aria-label=${this.heading}>
      <div>
        <h3>${this.heading}</h3>
        ${this.note ? html`<p class="hint">${this.note}</p>` : nothing}
        <plot-legend .plot=${this} .series=${this.series}></plot-legend>
        <div
          class="plot-area"
          role="img"
          aria-label="Plot of ${this.heading.toLowerCase()}; the table has its numbers"
        ></div>
      </div>
      <div class="table-frame" tabindex="0" role="region" aria-label="Numbers of ${this.heading.toLowerCase()}">
        <table>
          <thead>
            <tr>
              <th scope="col">Time</th>
              ${this.series.map((each) => html`<th scope="col" class="number">${each.label}</th>`)}
            </tr>
          </thead>
          <tbody>
            ${rows.map(
              (place) =>
                html`<tr>
                  <th scope="row">${this.clock(this.times[place])}</th>
                  ${this.series.map(
                    (each) => html`<td class="number">${this.valueText(each.values[place])}</td>`,
                  )}
                </tr>`,
            )}
          </tbody>
        </table>
      </div>
    </section>`;
  }

  valueText(value) {
    return value === null || value === undefined ? '–' : this.text(value);
  }

  updated(changed) {
    if (!['times', 'series', 'top'].some((name) => changed.has(name))) return;
    const sizes = this.series.map((each) => pointSize(each.values));
    const isSame =
      this.plot?.series.length === sizes.length + 1 &&
      sizes.every((size, index) => this.plot.series[index + 1].points.size === size);
    if (isSame) this.plot.setData(this.data());
    else this.draw();
  }

  data() {
    return [this.times, ...this.series.map((each) => each.values)];
  }

  draw() {
    const area = this.querySelector('.plot-area');
    if (!area) return;
    this.plot?.destroy();
    const colours = getComputedStyle(document.documentElement);
    const colour = (name) => colours.getPropertyValue(name).trim();
    const axis = {
      stroke: colour('--muted'),
      grid: { stroke: colour('--line'), width: 1 },
      ticks: { show: false },
      font: '12px system-ui, sans-serif',
    };
    const options = {
      width: Math.max(200, area.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, y: false, points: { size: 7 } },
      scales: { y: { range: (_, __, most) => [0, Math.max(this.top, most * 1.08) || 1] } },
      axes: [
        { ...axis, size: 34, space: 70, values: (_, times) => times.map((time) => this.tick(time)) },
        {
          ...axis,
          size: 66,
          space: 36,
          values: (_, values) => values.map((value) => (value ? this.text(value) : '0')),
        },
      ],
      series: [
        {},
        ...this.series.map((each, index) => ({
          label: each.label,
          stroke: colour(`--series-${index + 1}`),
          width: 2,
          dash: DASHES[index],
          points: { show: true, size: pointSize(each.values), fill: colour(`--series-${index + 1}`) },
        })),
      ],
      hooks: { setCursor: [(plot) => this.point(plot.cursor.idx ?? null)] },
    };
    this.plot = new uPlot(options, this.data(), area);
    this.sizes.disconnect();
    this.sizes.observe(area);
  }

  point(place) {
    const legend = this.querySelector('plot-legend');
    if (legend) legend.place = place;
  }

  fit() {
    const width = this.querySelector('.plot-area')?.clientWidth ?? 0;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }
}
customElements.define('line-plot', LinePlot);
