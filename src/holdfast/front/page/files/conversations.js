// The conversations and drafts of this browser, in IndexedDB.
//
// A conversation is a tree of turns, since a question can be asked anew in other words and an answer
// generated again. What is shown is one path through it: in each turn, the child that was chosen last.
//
// Several tabs may have the same conversation open. So each change reads and writes the stored
// state in one transaction, instead of using what a tab read earlier; an answer that several tabs
// receive is replaced only by a later state of it.

import { isOlder } from './answers.js';

/**
 * @typedef {object} Turn
 * @property {string} id
 * @property {string} conversation
 * @property {string | null} parent
 * @property {'user' | 'assistant'} role
 * @property {string | null} chosen  the child that is shown
 * @property {number} created  milliseconds
 * @property {string} [text]  of the user
 * @property {string[]} [images]  of the user, as data URLs
 * @property {Record<number, string>} [leftOut]  indices of images that are no longer sent, and why
 * @property {import('./answers.js').Answer} [answer]  of the model
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} changed  milliseconds
 * @property {string | null} chosen  the first turn that is shown
 * @property {Settings} settings
 *
 * @typedef {object} Settings
 * @property {string} model
 * @property {string} instructions
 * @property {number | null} temperature
 * @property {number | null} maxTokens
 * @property {boolean} shortens  whether the middle of an overlong conversation is left out
 *
 * @typedef {object} Draft
 * @property {string} id  of the conversation, for a new message; of the edited message otherwise
 * @property {string} text
 * @property {string[]} images  as data URLs
 * @property {string} [title]  its first words; an edited message has none
 */

const NAME = 'holdfast';
const VERSION = 2;
const BLOCKED =
  'This page was updated while another tab was open. Reload or close the other tab.';

/** @type {Promise<IDBDatabase> | null} */
let opened = null;

/** The database, opened once. @returns {Promise<IDBDatabase>} */
export function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => {
      const base = request.result;
      if (oldVersion < 1) {
        base.createObjectStore('conversations', { keyPath: 'id' });
        base.createObjectStore('turns', { keyPath: 'id' }).createIndex('conversation', 'conversation');
      }
      request.transaction.objectStore('turns').createIndex('status', 'answer.status');
      base.createObjectStore('drafts', { keyPath: 'id' }).createIndex('title', 'title');
    };
    request.onsuccess = () => {
      // do not block a later version of this page in another tab
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onblocked = () => reject(new Error(BLOCKED));
    request.onerror = () => reject(request.error);
  });
  opened.catch(() => {
    opened = null; // the next attempt opens it again
  });
  return opened;
}

/** Run `work` in one transaction; returns the result of the request that it returns, if any. */
async function transaction(stores, mode, work) {
  const base = await database();
  return new Promise((resolve, reject) => {
    const run = base.transaction(stores, mode);
    const request = work(...stores.map((name) => run.objectStore(name)));
    run.oncomplete = () => resolve(request?.result);
    run.onerror = () => reject(run.error);
    run.onabort = () => reject(run.error);
  });
}

/** All conversations, the last changed first. @returns {Promise<Conversation[]>} */
export async function listConversations() {
  const all = await transaction(['conversations'], 'readonly', (store) => store.getAll());
  return all.sort((one, other) => other.changed - one.changed);
}

/** @returns {Promise<Conversation | undefined>} */
export function readConversation(id) {
  return transaction(['conversations'], 'readonly', (store) => store.get(id));
}

/** @returns {Promise<Turn | undefined>} */
export function readTurn(id) {
  return transaction(['turns'], 'readonly', (store) => store.get(id));
}

/** The turns of a conversation by id. @returns {Promise<Map<string, Turn>>} */
export async function readTurns(conversation) {
  const turns = await transaction(['turns'], 'readonly', (store) =>
    store.index('conversation').getAll(conversation),
  );
  return new Map(turns.map((turn) => [turn.id, turn]));
}

/**
 * Change the stored state of a conversation, which another tab may have changed meanwhile.
 * @template {{conversation: Conversation, changed?: Turn[], draft?: Draft}} Change  draft: became a
 * message, and is deleted unless the user has typed something else since then, here or in another tab
 * @param {string} id
 * @param {(conversation: Conversation | undefined, turns: Map<string, Turn>) => Change | null} work
 * may throw or return null; then nothing changes
 * @returns {Promise<(Change & {turns: Map<string, Turn>}) | null>}
 */
export async function change(id, work) {
  const base = await database();
  return new Promise((resolve, reject) => {
    const names = ['conversations', 'turns', 'drafts'];
    const run = base.transaction(names, 'readwrite');
    const [conversationStore, turnStore, draftStore] = names.map((name) => run.objectStore(name));
    const conversation = conversationStore.get(id);
    const stored = turnStore.index('conversation').getAll(id);
    let made = null;
    let failure = null;
    stored.onsuccess = () => {
      const turns = new Map(stored.result.map((turn) => [turn.id, turn]));
      try {
        const change = work(conversation.result, turns);
        if (!change) return;
        made = { ...change, turns };
        conversationStore.put(made.conversation);
        for (const turn of made.changed ?? []) turnStore.put(turn);
        if (made.draft) deleteSent(draftStore, made.draft);
      } catch (error) {
        failure = error;
        run.abort();
      }
    };
    run.oncomplete = () => resolve(made);
    run.onabort = () => reject(failure ?? run.error);
  });
}

function deleteSent(store, sent) {
  const reading = store.get(sent.id);
  reading.onsuccess = () => {
    const draft = reading.result;
    if (draft?.text === sent.text && `${draft.images}` === `${sent.images}`) store.delete(sent.id);
  };
}

/**
 * Save the state of an answer, unless another tab has saved a later state or deleted its turn.
 * @param {string} id  of the turn @param {import('./answers.js').Answer} answer
 */
export function saveAnswer(id, answer) {
  return transaction(['turns'], 'readwrite', (store) => {
    const reading = store.get(id);
    reading.onsuccess = () => {
      const turn = reading.result;
      if (turn?.answer && !isOlder(answer, turn.answer)) store.put({ ...turn, answer });
    };
  });
}

/** The turns with incomplete answers, in all conversations. @returns {Promise<Turn[]>} */
export function runningTurns() {
  return transaction(['turns'], 'readonly', (store) => store.index('status').getAll('running'));
}

export function deleteConversation(id) {
  const stores = ['conversations', 'turns', 'drafts'];
  return transaction(stores, 'readwrite', (conversationStore, turnStore, draftStore) => {
    conversationStore.delete(id);
    draftStore.delete(id);
    const request = turnStore.index('conversation').getAllKeys(id);
    request.onsuccess = () =>
      request.result.forEach((key) => {
        turnStore.delete(key);
        draftStore.delete(key);
      });
  });
}

/** @returns {Promise<Draft | undefined>} */
export function readDraft(id) {
  return transaction(['drafts'], 'readonly', (store) => store.get(id));
}

/** The drafts of new messages, without their images. @returns {Promise<{id: string, title: string}[]>} */
export async function listDrafts() {
  const base = await database();
  return new Promise((resolve, reject) => {
    const found = [];
    const request = base.transaction(['drafts']).objectStore('drafts').index('title').openKeyCursor();
    request.onsuccess = () => {
      const cursor = request.result;
      if (!cursor) return resolve(found);
      found.push({ id: String(cursor.primaryKey), title: String(cursor.key) });
      return cursor.continue();
    };
    request.onerror = () => reject(request.error);
  });
}

/** Save a draft. An empty draft of a new message is removed. @param {Draft} draft */
export function saveDraft(draft) {
  const isEmpty = 'title' in draft && !draft.text && !draft.images.length;
  return changeDrafts((store) => (isEmpty ? store.delete(draft.id) : store.put(draft)));
}

export function deleteDraft(id) {
  return changeDrafts((store) => store.delete(id));
}

async function changeDrafts(work) {
  const base = await database();
  return new Promise((resolve, reject) => {
    const run = base.transaction(['drafts'], 'readwrite');
    work(run.objectStore('drafts'));
    run.oncomplete = () => resolve();
    run.onabort = () => reject(run.error);
    run.commit(); // at once, because the page may be closing
  });
}

/** The turns that are shown, the first one first. @returns {Turn[]} */
export function shownPath(conversation, turns) {
  const path = [];
  let turn = turns.get(conversation.chosen);
  while (turn) {
    path.push(turn);
    turn = turns.get(turn.chosen);
  }
  return path;
}

/**
 * The turns that stand for the same place, by their parent, the oldest first.
 * @param {Map<string, Turn>} turns @returns {Map<string | null, Turn[]>}
 */
export function alternatives(turns) {
  const found = new Map();
  for (const turn of [...turns.values()].sort((one, other) => one.created - other.created)) {
    if (!found.has(turn.parent)) found.set(turn.parent, []);
    found.get(turn.parent).push(turn);
  }
  return found;
}
