// The open conversation and the answers that are being generated. They live as long as the page,
// whichever view is shown. Event: `change`.
//
// Tabs of the same browser notify each other of changes, and read them from the browser's database.

import { Follower, forgetOnServer, newAnswer } from './answers.js';
import { get } from './api.js';
import * as stored from './conversations.js';
import {
  choose,
  newConversation,
  newId,
  removeImage,
  titleOf,
  withAnswer,
  withMessage,
} from './edits.js';
import { requestFor, refusedImage, turnsWithImages } from './requests.js';
import { tabs } from './tabs.js';

/** @typedef {import('./conversations.js').Turn} Turn */

const SAVE_MILLISECONDS = 400;
const CHANGE_MILLISECONDS = 30;
const ASK_AGAIN_MILLISECONDS = 3000; // after another tab claimed the sending of a message
const DEFAULTS = {
  model: '',
  instructions: '',
  temperature: null,
  maxTokens: null,
  shortens: false,
};
const SETTINGS_ITEM = 'holdfast.settings'; // the last ones, for new conversations
const NEW_ITEM = 'holdfast.new-conversation'; // id that the next new conversation of this tab gets
const NOT_SENT = 'It is no longer sent, because the conversation became too large.';
const BUSY = 'This conversation is still being answered. Send the message when the answer has ended.';

function lastSettings() {
  const { model, temperature, maxTokens } = JSON.parse(localStorage.getItem(SETTINGS_ITEM) ?? '{}');
  return { ...DEFAULTS, ...(model && { model, temperature, maxTokens }) };
}

class ChatState extends EventTarget {
  /** @type {object[]} as /v1/models describes them */
  models = [];
  /** @type {stored.Conversation[]} */
  conversations = [];
  /** @type {{id: string, title: string}[]} of messages that have not been sent */
  drafts = [];
  /** @type {stored.Conversation | null} */
  conversation = null;
  /** @type {Map<string, Turn>} */
  turns = new Map();
  /** @type {Map<string, Follower>} by id of the turn */
  followers = new Map();
  /** @type {Map<string, string>} id of each turn that has a follower → id of its conversation */
  #followed = new Map();
  settings = lastSettings();
  #newId = '';
  #unsaved = new Set();
  #isChanging = false;
  /** @type {ReturnType<typeof stored.alternatives> | null} null: the turns have changed */
  #alternatives = null;
  #resuming = new Set(); // turns

  constructor() {
    super();
    tabs.sends = (turn) => this.followers.has(turn);
    tabs.addEventListener('stop', ({ detail }) => {
      this.followers.get(detail)?.stop().catch(() => {});
    });
    tabs.addEventListener('changed', ({ detail }) => this.#reread(detail));
    tabs.addEventListener('deleted', ({ detail }) => this.#close(detail));
    for (const what of ['draft', 'sent']) tabs.addEventListener(what, () => this.refreshList());
  }

  /** The id of the open conversation, even if it has no turns yet. */
  get id() {
    return this.conversation?.id ?? this.#newId;
  }

  get path() {
    return this.conversation ? stored.shownPath(this.conversation, this.turns) : [];
  }

  /** The answer of the open conversation that is being generated, if there is one. */
  get running() {
    return this.path.find((turn) => turn.answer?.status === 'running') ?? null;
  }

  /** The model with this name, as /v1/models describes it. */
  modelOf(name) {
    return this.models.find((model) => model.id === name);
  }

  /** The turns of a conversation whose answers this page is receiving. @returns {string[]} ids */
  answersOf(conversation) {
    return [...this.#followed].filter(([, owner]) => owner === conversation).map(([id]) => id);
  }

  /** The turns that stand for the same place as this one, itself included, the oldest first. */
  alternatives(turn) {
    this.#alternatives ??= stored.alternatives(this.turns);
    return this.#alternatives.get(turn.parent) ?? [];
  }

  async refreshModels() {
    this.models = (await get('/v1/models')).data;
    this.#changed();
  }

  async refreshList() {
    [this.conversations, this.drafts] = await Promise.all([
      stored.listConversations(),
      stored.listDrafts(),
    ]);
    this.#changed();
  }

  /**
   * Resume receiving the answers that were incomplete when the page was closed. Sends nothing for
   * conversations that are not open, because the key may have changed.
   */
  async resume() {
    for (const turn of await stored.runningTurns()) {
      if (turn.answer.responseId) this.#resume(turn);
    }
  }

  /**
   * Open a conversation.
   * @param {string | null} id  null: a new one
   */
  async open(id) {
    if (id !== null && this.conversation?.id === id) return;
    await stored.database(); // no form before it is open: what is typed is saved there
    const found = id === null ? undefined : await stored.readConversation(id);
    if (!found) {
      const hasDraft = id !== null && (await stored.readDraft(id)) !== undefined;
      this.#takeNewId(hasDraft ? id : await this.#unusedId());
    }
    this.settings = { ...DEFAULTS, ...(found?.settings ?? lastSettings()) };
    this.#show(found ?? null, found ? await stored.readTurns(found.id) : new Map());
    this.#changed();
  }

  /**
   * Start a new conversation that is separate from an earlier draft.
   * @param {{text: string, images?: string[]} | null} message  its first message, not sent yet
   */
  async startNew(message = null) {
    if (this.drafts.some((draft) => draft.id === this.#newId)) this.#takeNewId(newId());
    if (!message) return;
    const { text, images = [] } = message;
    await stored.saveDraft({ id: this.#newId, text, images, title: titleOf(text) });
    await this.refreshList();
  }

  /**
   * Add a message to the end of the shown path, and request an answer. Raises an error, and changes
   * nothing, if that is impossible.
   * @param {string} text
   * @param {string[]} images  as data URLs
   */
  async send(text, images = []) {
    const { id } = this;
    await this.#generate(id, (conversation, turns) => {
      const whole = conversation ?? newConversation(id, text, this.settings);
      const last = stored.shownPath(whole, turns).at(-1) ?? null;
      if (last?.answer?.status === 'running') throw new Error(BUSY);
      const { model } = this.settings;
      const message = { text, images };
      return { ...withMessage(whole, turns, last, message, model), draft: { id, ...message } };
    });
    if (this.#newId === id) this.#takeNewId(newId());
  }

  /** Ask in other words than in this turn; what followed it stays as another branch. */
  async edit({ id, conversation }, text, images) {
    await this.#generate(conversation, (whole, turns) => {
      const parent = turns.get(turns.get(id).parent) ?? null;
      const { model } = this.settings;
      const message = { text, images };
      return { ...withMessage(whole, turns, parent, message, model), draft: { id, ...message } };
    });
  }

  /** Generate another answer to the same message. @param {Turn} turn */
  async regenerate({ conversation, parent }) {
    await this.#generate(conversation, (whole, turns) =>
      withAnswer(whole, turns, turns.get(parent), this.settings.model),
    );
  }

  /**
   * Request a failed answer again, in its place.
   * @param {Turn} turn
   * @param {Partial<stored.Settings>} settings  changes for the whole conversation
   * @param {(turns: Map<string, Turn>, turn: Turn) => Turn[]} further  the other turns that change
   */
  async retry({ id, conversation }, settings = {}, further = () => []) {
    await this.#generate(conversation, (whole, turns) => {
      const turn = turns.get(id);
      const { model } = this.settings;
      whole.settings = { ...whole.settings, ...settings };
      turn.answer = newAnswer(model || turn.answer.model, (turn.answer.attempt ?? 0) + 1);
      return { conversation: whole, changed: [...further(turns, turn), turn], answer: turn };
    });
    this.settings = this.conversation?.settings ?? this.settings;
  }

  /** Request a failed answer again, without the images of the messages before it. */
  async retryWithoutImages(turn) {
    await this.retry(turn, {}, (turns, { parent }) => {
      const earlier = turnsWithImages(turns, turns.get(parent));
      for (const each of earlier) {
        each.leftOut = Object.fromEntries(each.images.map((_, place) => [place, NOT_SENT]));
      }
      return earlier;
    });
  }

  /** Remove an image from a message. @param {Turn} turn @param {number} place */
  async removeImage({ id, conversation }, place) {
    await this.#change(conversation, (whole, turns) => {
      const turn = turns.get(id);
      removeImage(turn, place);
      return { conversation: whole, changed: [turn] };
    });
  }

  /** Show another alternative of a turn. @param {Turn} turn */
  async choose({ id, conversation }) {
    await this.#change(conversation, (whole, turns) => {
      const turn = turns.get(id);
      return choose(whole, turns.get(turn.parent) ?? null, turn);
    });
  }

  /** Stop the answer of a turn, in whichever conversation it is. @param {string} id */
  async stop(id) {
    if (!this.followers.has(id)) {
      tabs.tell('stop', id);
      // no tab may have resumed the answer yet
      const stopped = await stored.readTurn(id);
      if (!stopped) return; // another tab has deleted it
      await this.#change(stopped.conversation, (whole, turns) => {
        const turn = turns.get(id);
        if (!turn) return null;
        turn.answer.wantsStop = true;
        return { conversation: whole, changed: [turn] };
      });
    }
    await this.followers.get(id)?.stop();
  }

  /** @param {Partial<stored.Settings>} change */
  async set(change) {
    this.settings = { ...this.settings, ...change };
    localStorage.setItem(SETTINGS_ITEM, JSON.stringify(this.settings));
    if (this.conversation) {
      await this.#change(this.conversation.id, (whole) => {
        whole.settings = { ...whole.settings, ...change };
        return { conversation: whole };
      });
    }
    this.#changed();
  }

  async rename(title) {
    await this.#change(this.conversation.id, (whole) => ({ conversation: { ...whole, title } }));
    await this.refreshList();
  }

  /** Delete the open conversation, here and on the server. */
  async delete() {
    const { id } = this.conversation;
    const answers = [...this.turns.values()].flatMap((turn) => turn.answer ?? []);
    this.#leave();
    await stored.deleteConversation(id);
    tabs.tell('deleted', id);
    this.conversation = null;
    await this.open(null);
    await this.refreshList();
    await forgetOnServer(answers);
  }

  /** Tell the other tabs that a draft has changed. */
  async noteDraft(id) {
    tabs.tell('draft', id);
    this.drafts = await stored.listDrafts();
    this.#changed();
  }

  /** The id kept for the next new conversation, unless a duplicate of this tab has used it. */
  async #unusedId() {
    const kept = sessionStorage.getItem(NEW_ITEM);
    const isUnused = kept !== null && !(await stored.readConversation(kept));
    return isUnused ? kept : newId();
  }

  #takeNewId(id) {
    this.#newId = id;
    sessionStorage.setItem(NEW_ITEM, id);
  }

  /** Change a stored conversation, show it if it is open, and tell the other tabs. */
  async #change(id, work) {
    const made = await stored.change(id, work);
    if (made) this.#take(id, made);
  }

  /** Add a turn for another answer to a conversation, and generate the answer. */
  async #generate(id, work) {
    const made = await stored.change(id, (...given) => {
      const change = work(...given);
      change.conversation.changed = Date.now();
      return change;
    });
    const follower = this.#follow(made.answer);
    this.#take(id, made);
    this.#until(made.answer.id, follower.begin());
    if (made.draft) tabs.tell('sent', { id: made.draft.id, text: made.draft.text });
    this.refreshList().catch(() => {}); // the message is stored, whatever happens
  }

  #take(id, { conversation, turns }) {
    if (this.id === id) this.#show(conversation, turns);
    tabs.tell('changed', id);
    this.#changed();
  }

  /**
   * Show these turns. Answers that this page is receiving are newer in memory than in the
   * database.
   */
  #show(conversation, turns) {
    this.conversation = conversation;
    this.turns = turns;
    this.#alternatives = null;
    for (const turn of turns.values()) {
      const follower = this.followers.get(turn.id);
      if (follower) turn.answer = follower.answer;
      else if (turn.answer?.status === 'running') this.#resume(turn);
    }
  }

  /**
   * Resume an answer that was begun earlier. A message that the server has not accepted yet is sent
   * by a single tab; if that tab is closed, by the next one that shows it.
   */
  async #resume({ id, answer }) {
    if (this.followers.has(id) || this.#resuming.has(id)) return;
    this.#resuming.add(id);
    const isElsewhere = !answer.responseId && (await tabs.isSentElsewhere(id));
    const turn = await stored.readTurn(id);
    this.#resuming.delete(id);
    if (turn?.answer.status !== 'running' || this.followers.has(id)) return;
    if (isElsewhere && !turn.answer.responseId) {
      setTimeout(() => this.#resume(turn), ASK_AGAIN_MILLISECONDS); // that tab may be closed
    } else {
      this.#until(id, this.#follow(turn).rejoin());
    }
  }

  /** Stop receiving the answers of the open conversation, which is being deleted. */
  #leave() {
    for (const id of this.turns.keys()) {
      this.followers.get(id)?.leave();
      this.#forget(id);
    }
  }

  #forget(id) {
    this.followers.delete(id);
    this.#followed.delete(id);
  }

  /** Forget the follower of a turn when it is done. */
  async #until(id, following) {
    const follower = this.followers.get(id);
    await following;
    if (this.followers.get(id) !== follower) return;
    this.#forget(id);
    this.#changed();
  }

  #follow(turn) {
    const request = () => this.#request(turn);
    const follower = new Follower(turn.answer, request, (isDurable) => {
      const isOver = turn.answer.status !== 'running';
      if (isOver) this.#forget(turn.id);
      this.#save(turn, isDurable);
      if (isOver) this.#ended(turn);
      if (isDurable) this.#changed();
      else this.#changedSoon();
    });
    follower.mayRestart = () => this.id === turn.conversation;
    this.followers.set(turn.id, follower);
    this.#followed.set(turn.id, turn.conversation);
    const shown = this.turns.get(turn.id);
    if (shown) shown.answer = turn.answer;
    return follower;
  }

  /** The request for the answer of a turn. */
  async #request(turn) {
    if (!this.models.length) await this.refreshModels();
    const conversation = await stored.readConversation(turn.conversation);
    const turns = await stored.readTurns(turn.conversation);
    return requestFor(conversation, turns, turn, this.modelOf(turn.answer.model));
  }

  /** Update what depends on an answer that has ended. */
  async #ended(turn) {
    if (turn.answer.status === 'failed') await this.#leaveOutRefused(turn);
    await Promise.allSettled([this.refreshList(), this.refreshModels()]);
  }

  /** If an answer failed because of an image, stop sending that image. */
  async #leaveOutRefused({ id, conversation, answer }) {
    if (!answer.failure?.param) return;
    await this.#change(conversation, (whole, turns) => {
      const found = refusedImage(turns, { ...turns.get(id), answer });
      if (!found) return { conversation: whole };
      const { turn, place } = found;
      turn.leftOut = { ...turn.leftOut, [place]: answer.error };
      return { conversation: whole, changed: [turn] };
    });
  }

  #save(turn, isDurable) {
    const save = async () => {
      this.#unsaved.delete(turn);
      await stored.saveAnswer(turn.id, turn.answer);
      if (isDurable) tabs.tell('changed', turn.conversation);
    };
    if (isDurable) {
      save();
    } else if (!this.#unsaved.has(turn)) {
      this.#unsaved.add(turn);
      setTimeout(save, SAVE_MILLISECONDS);
    }
  }

  /** Show what another tab has changed. */
  async #reread(id) {
    if (this.id === id) {
      const conversation = await stored.readConversation(id);
      const turns = await stored.readTurns(id);
      if (conversation && this.id === id) {
        this.settings = { ...DEFAULTS, ...conversation.settings };
        this.#show(conversation, turns);
      }
    }
    await this.refreshList();
  }

  /** Another tab has deleted a conversation. */
  async #close(id) {
    if (this.conversation?.id === id) {
      this.#leave();
      this.#takeNewId(id); // so that the message being typed stays
      this.#show(null, new Map());
      this.dispatchEvent(new Event('deleted'));
    }
    await this.refreshList();
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
