// The open conversation and its running answers. They live as long as the page, whichever view is
// shown. Event: `change`.

import { Follower, forgetOnServer, itemsToSend, newAnswer } from './answers.js';
import * as stored from './conversations.js';

/** @typedef {import('./conversations.js').Turn} Turn */

const SAVE_MILLISECONDS = 400;
const CHANGE_MILLISECONDS = 30;
const LONGEST_TITLE = 60;
const DEFAULTS = { model: '', instructions: '', temperature: null, maxTokens: null };

/** The content of a user's message in a request. @param {Turn} turn */
function contentOf({ text, images }) {
  if (!images) return text;
  const parts = images.map((image) => ({ type: 'input_image', image_url: image }));
  return text ? [...parts, { type: 'input_text', text }] : parts;
}

class ChatState extends EventTarget {
  /** @type {stored.Conversation[]} */
  conversations = [];
  /** @type {stored.Conversation | null} */
  conversation = null;
  /** @type {Map<string, Turn>} */
  turns = new Map();
  /** @type {Map<string, Follower>} by id of the turn */
  followers = new Map();
  settings = { ...DEFAULTS };
  #unsaved = new Set();
  #isChanging = false;
  /** @type {ReturnType<typeof stored.alternatives> | null} null: the turns have changed */
  #alternatives = null;

  get path() {
    return this.conversation ? stored.shownPath(this.conversation, this.turns) : [];
  }

  /** The answer of the open conversation that is being generated, if there is one. */
  get running() {
    return this.path.find((turn) => turn.answer?.status === 'running') ?? null;
  }

  /** The turns that stand for the same place as this one, itself included, the oldest first. */
  alternatives(turn) {
    this.#alternatives ??= stored.alternatives(this.turns);
    return this.#alternatives.get(turn.parent) ?? [];
  }

  async refreshList() {
    this.conversations = await stored.listConversations();
    this.#changed();
  }

  /** Open a conversation, and rejoin its running answers. @param {string | null} id  null: a new one */
  async open(id) {
    if (id !== null && this.conversation?.id === id) return;
    const found = id === null ? undefined : await stored.readConversation(id);
    this.conversation = found ?? null;
    this.settings = { ...DEFAULTS, ...this.settings, ...found?.settings };
    if (!found) this.settings = { ...this.settings, instructions: '' };
    this.turns = found ? await stored.readTurns(found.id) : new Map();
    this.#alternatives = null;
    for (const turn of this.turns.values()) {
      // an answer that this page still takes in is newer in memory than in the browser's base
      const follower = this.followers.get(turn.id);
      if (follower) turn.answer = follower.answer;
      else if (turn.answer?.status === 'running') this.#follower(turn).rejoin();
    }
    this.#changed();
  }

  /**
   * Add a message to the end of the shown path, and have it answered.
   * @param {string} text
   * @param {string[]} images  as data URLs
   */
  async send(text, images = []) {
    if (!this.conversation) this.#create(text || 'Image');
    await this.#ask(text, images, this.path.at(-1) ?? null);
  }

  /** Ask in other words than in this turn; what followed it stays as another branch. */
  async edit(turn, text) {
    await this.#ask(text, turn.images ?? [], this.turns.get(turn.parent) ?? null);
  }

  /** Generate another answer to the same message. @param {Turn} turn */
  async regenerate(turn) {
    await this.#generate(this.turns.get(turn.parent));
  }

  /** Show another alternative of a turn. @param {Turn} turn */
  async choose(turn) {
    const changed = this.#link(this.turns.get(turn.parent) ?? null, turn);
    await stored.save(this.conversation, ...changed);
    this.#changed();
  }

  /** @param {Turn} turn */
  async stop(turn) {
    await this.followers.get(turn.id)?.stop();
  }

  /** @param {Partial<stored.Settings>} change */
  async set(change) {
    this.settings = { ...this.settings, ...change };
    if (this.conversation) {
      this.conversation.settings = this.settings;
      await stored.save(this.conversation);
    }
    this.#changed();
  }

  async rename(title) {
    this.conversation.title = title;
    await stored.save(this.conversation);
    await this.refreshList();
  }

  /** Delete the open conversation, here and on the server. */
  async delete() {
    const { id } = this.conversation;
    const answers = [...this.turns.values()].flatMap((turn) => turn.answer ?? []);
    for (const turn of this.turns.values()) this.followers.get(turn.id)?.leave();
    await stored.deleteConversation(id);
    await this.open(null);
    await this.refreshList();
    await forgetOnServer(answers);
  }

  #create(text) {
    const title = text.trim().split('\n')[0].slice(0, LONGEST_TITLE) || 'Conversation';
    this.conversation = {
      id: crypto.randomUUID(),
      title,
      changed: Date.now(),
      chosen: null,
      settings: this.settings,
    };
    this.turns = new Map();
    this.#alternatives = null;
  }

  async #ask(text, images, parent) {
    const turn = this.#newTurn('user', parent);
    turn.text = text;
    if (images.length) turn.images = images;
    const changed = this.#link(parent, turn);
    await stored.save(this.conversation, turn, ...changed);
    await this.#generate(turn);
    await this.refreshList();
  }

  /** @param {Turn} question */
  async #generate(question) {
    const turn = this.#newTurn('assistant', question);
    turn.answer = newAnswer(this.settings.model);
    this.#link(question, turn);
    this.conversation.changed = Date.now();
    await stored.save(this.conversation, turn, question);
    const following = this.#follower(turn).begin();
    following.finally(() => this.refreshList());
    this.#changed();
  }

  /** The request for the answer of a turn. */
  #request(answered) {
    const path = [];
    const { turns, settings } = this;
    for (let turn = turns.get(answered.parent); turn; turn = turns.get(turn.parent)) {
      path.unshift(turn);
    }
    const { instructions, temperature, maxTokens } = settings;
    const body = {
      model: answered.answer.model,
      input: path.flatMap((turn) =>
        turn.answer ? itemsToSend(turn.answer) : [{ role: 'user', content: contentOf(turn) }],
      ),
      include: ['reasoning.encrypted_content'],
      holdfast: { explain: true },
      ...(instructions && { instructions }),
      ...(temperature !== null && { temperature }),
      ...(maxTokens !== null && { max_output_tokens: maxTokens }),
    };
    return { body, headers: { 'x-session-id': `chat-${answered.conversation}` } };
  }

  #newTurn(role, parent) {
    const turn = {
      id: crypto.randomUUID(),
      conversation: this.conversation.id,
      parent: parent?.id ?? null,
      role,
      chosen: null,
      created: Date.now(),
    };
    this.turns.set(turn.id, turn);
    this.#alternatives = null;
    return turn;
  }

  /** Make a turn the shown child of its parent; returns the turns that changed. */
  #link(parent, turn) {
    if (parent) {
      parent.chosen = turn.id;
      return [parent];
    }
    this.conversation.chosen = turn.id;
    return [];
  }

  #follower(turn) {
    const follower = new Follower(turn.answer, this.#request(turn), (isDurable) => {
      this.#saveSoon(turn, isDurable);
      if (turn.answer.status !== 'running') this.followers.delete(turn.id);
      if (isDurable) this.#changed();
      else this.#changedSoon();
    });
    this.followers.set(turn.id, follower);
    return follower;
  }

  #saveSoon(turn, isDurable) {
    if (isDurable) {
      stored.saveTurn(turn);
    } else if (!this.#unsaved.has(turn)) {
      this.#unsaved.add(turn);
      setTimeout(() => {
        this.#unsaved.delete(turn);
        stored.saveTurn(turn);
      }, SAVE_MILLISECONDS);
    }
  }

  #changed() {
    this.#isChanging = false;
    this.dispatchEvent(new Event('change'));
  }

  /** Tokens come faster than they can be seen. */
  #changedSoon() {
    if (this.#isChanging) return;
    this.#isChanging = true;
    setTimeout(() => this.#changed(), CHANGE_MILLISECONDS);
  }
}

export const chat = new ChatState();
