// The conversations of this browser, in IndexedDB.
//
// A conversation is a tree of turns, since a question can be asked anew in other words and an answer
// generated again. What is shown is one path through it: in each turn, the child that was chosen last.

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
 */

const NAME = 'holdfast';
const VERSION = 1;

/** @type {Promise<IDBDatabase> | null} */
let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore('conversations', { keyPath: 'id' });
      const turns = request.result.createObjectStore('turns', { keyPath: 'id' });
      turns.createIndex('conversation', 'conversation');
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
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

/** The turns of a conversation by id. @returns {Promise<Map<string, Turn>>} */
export async function readTurns(conversation) {
  const turns = await transaction(['turns'], 'readonly', (store) =>
    store.index('conversation').getAll(conversation),
  );
  return new Map(turns.map((turn) => [turn.id, turn]));
}

/** @param {Conversation} conversation @param {Turn[]} turns */
export function save(conversation, ...turns) {
  return transaction(['conversations', 'turns'], 'readwrite', (ofConversations, ofTurns) => {
    ofConversations.put(conversation);
    for (const turn of turns) ofTurns.put(turn);
  });
}

/** @param {Turn} turn */
export function saveTurn(turn) {
  return transaction(['turns'], 'readwrite', (store) => {
    store.put(turn);
  });
}

export function deleteConversation(id) {
  return transaction(['conversations', 'turns'], 'readwrite', (ofConversations, ofTurns) => {
    ofConversations.delete(id);
    const request = ofTurns.index('conversation').getAllKeys(id);
    request.onsuccess = () => request.result.forEach((key) => ofTurns.delete(key));
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
