// The prefix cache as a picture: from left to right the tokens of prompts, from top to bottom their
// branches. A part that several prompts share is as high as all that follow it.

import { html, nothing } from '../vendor/lit.js';
import { bytes, count, counted } from '../format.js';
import { Component } from '../view.js';

export const TIERS = [
  ['live', 'live state'],
  ['ram', 'blocks in RAM'],
  ['disk', 'only on disk'],
];
const ROW = 30; // pixels
const GAP = 3;
const LEAST_WIDTH = 12; // of a part, however few tokens it has

/** Lay the parts out in rows; returns boxes in the order of the rows, and the number of rows. */
export function laidOut(parts) {
  const children = new Map();
  parts.forEach((part, place) => {
    if (!children.has(part.parent)) children.set(part.parent, []);
    children.get(part.parent).push(place);
  });
  const boxes = [];
  let row = 0;
  // without recursion, since a chain may fork as often as it has blocks
  const pending = [...(children.get(null) ?? [])].reverse().map((place) => ({ place, level: 1 }));
  while (pending.length) {
    const next = pending.pop();
    if (next.isEnd) {
      if (next.box.part.hidden_parts) row += 1;
      next.box.rows = Math.max(1, row - next.box.row);
      if (row === next.box.row) row += 1;
      continue;
    }
    const box = { place: next.place, part: parts[next.place], level: next.level, row, rows: 1 };
    boxes.push(box);
    pending.push({ isEnd: true, box });
    for (const place of [...(children.get(next.place) ?? [])].reverse()) {
      pending.push({ place, level: next.level + 1 });
    }
  }
  return { boxes, rows: row };
}

class CacheMap extends Component {
  static properties = {
    model: { attribute: false },
    names: { attribute: false },
    chosen: { state: true },
  };

  constructor() {
    super();
    this.model = null;
    /** @type {Map<string, string>} names of sessions by id */
    this.names = new Map();
    /** the place of the chosen box among all; null: the largest one */
    this.chosen = null;
  }

  render() {
    const { model } = this;
    if (!model?.parts.length) {
      return html`<p class="empty">Nothing is cached yet. Each answered prompt appears here.</p>`;
    }
    const layout = laidOut(model.parts);
    this.boxes = layout.boxes;
    const chosen = this.chosenBox();
    const deepest = Math.max(...model.parts.map((part) => part.start + part.tokens));
    const levels = Math.max(...this.boxes.map((box) => box.level));
    const size = `height: ${layout.rows * ROW}px; min-width: calc(18rem + ${levels * LEAST_WIDTH}px)`;
    return html`<div class="map-frame">
        <div
          class="cache-map"
          role="tree"
          aria-label="Cached prompts of ${model.model}"
          .style=${size}
          @keydown=${(event) => this.onKey(event)}
        >
          ${this.boxes.map((box, order) =>
            this.box(box, order, { deepest, levels, isChosen: box === chosen }),
          )}
        </div>
      </div>
      <p class="map-axis hint" aria-hidden="true">
        <span>token 0</span><span>token ${count(deepest)}</span>
      </p>
      ${this.hiddenTrees()} ${this.details(chosen.part)}`;
  }

  /** The chosen box; the largest one if none is chosen, or the cache has become smaller. */
  chosenBox() {
    const larger = (box, other) => (other.part.tokens > box.part.tokens ? other : box);
    return this.boxes[this.chosen] ?? this.boxes.reduce(larger);
  }

  hiddenTrees() {
    const hidden = this.model.trees.reduce(
      (sum, tree) => sum + tree.hidden_parts,
      this.model.hidden_trees,
    );
    const parts = [
      hidden ? `and ${counted(hidden, 'smaller prompt')}` : '',
      this.model.is_complete ? '' : 'the cache has more blocks than are shown here',
    ].filter(Boolean);
    return parts.length ? html`<p class="hint">${parts.join('; ')}</p>` : nothing;
  }

  box(box, order, { deepest, levels, isChosen }) {
    const { part, level, row, rows } = box;
    // a least width, and the rest of the picture by the tokens
    const place = (tokens, parts) =>
      `calc((100% - ${levels * LEAST_WIDTH}px) * ${tokens / deepest} + ${parts * LEAST_WIDTH}px)`;
    const left = place(part.start, level - 1);
    const end = place(part.start + part.tokens, level);
    // nothing is to the right of a leaf, so that its label may be longer than its box
    const isLeaf =
      !part.hidden_parts && !part.below_tokens && part.start + part.tokens < 0.75 * deepest;
    return html`<div
        class=${isLeaf ? 'part leaf' : 'part'}
        role="treeitem"
        aria-level=${level}
        aria-selected=${isChosen ? 'true' : 'false'}
        aria-label=${this.spoken(part)}
        tabindex=${isChosen ? 0 : -1}
        title=${this.label(part)}
        .style=${`left: ${left}; width: ${place(part.tokens, 1)}; top: ${row * ROW}px; height: ${rows * ROW - GAP}px`}
        @click=${() => this.choose(order)}
        @focus=${() => (this.chosen = order)}
      >
        <span class="part-label">
          ${isLeaf || part.tokens > deepest / 20 ? this.label(part) : nothing}
        </span>
        <span class="strips">
          ${TIERS.map(([tier]) => {
            const share = (100 * part[`${tier}_tokens`]) / part.tokens;
            return share ? html`<i class="tier-${tier}" .style=${`width: ${share}%`}></i>` : nothing;
          })}
        </span>
      </div>
      ${part.hidden_parts
        ? html`<span
            class="hidden-parts"
            aria-hidden="true"
            .style=${`left: ${end}; top: ${(row + rows - 1) * ROW}px`}
            >and ${counted(part.hidden_parts, 'smaller branch', 'smaller branches')}</span
          >`
        : nothing}`;
  }

  users(part) {
    return part.sessions.map((id) => this.names.get(id) ?? id);
  }

  label(part) {
    const users = this.users(part);
    const who = users.length > 1 ? counted(part.session_count, 'session') : users[0];
    return [who, counted(part.tokens, 'token')].filter(Boolean).join(' · ');
  }

  spoken(part) {
    const where = TIERS.filter(([tier]) => part[`${tier}_tokens`])
      .map(([tier, words]) => `${count(part[`${tier}_tokens`])} ${words}`)
      .join(', ');
    const users = this.users(part).join(', ');
    return `Tokens ${count(part.start)} to ${count(part.start + part.tokens)}: ${where}${
      users ? `; used by ${users}` : ''
    }`;
  }

  async choose(order) {
    this.chosen = order;
    await this.updateComplete;
    this.querySelectorAll('[role=treeitem]')[order]?.focus();
  }

  onKey(event) {
    const place = this.boxes.indexOf(this.chosenBox());
    const { level } = this.boxes[place];
    const steps = {
      ArrowDown: () => place + 1,
      ArrowUp: () => place - 1,
      ArrowRight: () => (this.boxes[place + 1]?.level === level + 1 ? place + 1 : place),
      ArrowLeft: () => this.boxes.findLastIndex((box, at) => at < place && box.level < level),
      Home: () => 0,
      End: () => this.boxes.length - 1,
    };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const next = step();
    if (this.boxes[next]) this.choose(next);
  }

  details(part) {
    const users = this.users(part);
    const more = part.session_count - users.length;
    const tree = this.model.trees[part.tree];
    const facts = [
      ['Tokens', `${count(part.start)} to ${count(part.start + part.tokens)}`],
      ...TIERS.map(([tier, words]) => {
        const tokens = part[`${tier}_tokens`];
        const isSaved = tier !== 'disk' && part.saved_tokens > part.disk_tokens;
        return [words.slice(0, 1).toUpperCase() + words.slice(1), tokens ? `${counted(tokens, 'token')}${isSaved ? ', also on disk' : ''}` : ''];
      }),
      ['Size', `${bytes(part.bytes)} in ${counted(part.blocks, 'block')}`],
      ['Below it', part.below_tokens ? counted(part.below_tokens, 'token') : ''],
      ['Sessions', users.length ? `${users.join(', ')}${more > 0 ? ` and ${more} more` : ''}` : 'none'],
      ['Running', part.running ? counted(part.running, 'request') : ''],
      ['KV bits', tree.kv_bits === 'native' ? '' : (tree.kv_bits ?? 'unknown')],
      ['Adapter', tree.adapter],
      ['Tenant', tree.is_own ? '' : 'another one'],
    ].filter(([, value]) => value);
    return html`<dl class="facts-row" aria-live="polite" aria-label="Chosen part">
      ${facts.map(
        ([name, value]) =>
          html`<div>
            <dt>${name}</dt>
            <dd>${value}</dd>
          </div>`,
      )}
    </dl>`;
  }
}
customElements.define('cache-map', CacheMap);
