// Edits of a conversation: new messages, turns for answers, and which turns are shown. Each
// function changes its arguments and returns what must be saved.

import { newAnswer } from './answers.js';

/**
 * @typedef {import('./conversations.js').Turn} Turn
 * @typedef {import('./conversations.js').Conversation} Conversation
 * @typedef {{conversation: Conversation, changed: Turn[], answer: Turn}} Addition
 */

const LONGEST_TITLE = 60;

/** A random UUID. `crypto.randomUUID` exists only over HTTPS and on localhost. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40; // version 4
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
}

/** The first words of a message. @param {string} text */
export function titleOf(text) {
  return text.trim().split('\n')[0].slice(0, LONGEST_TITLE) || 'Image';
}

/** @returns {Conversation} */
export function newConversation(id, text, settings) {
  return { id, title: titleOf(text), changed: Date.now(), chosen: null, settings };
}

/**
 * Add a message, and a turn for its answer.
 * @param {Conversation} conversation @param {Map<string, Turn>} turns
 * @param {Turn | null} parent  the turn before it
 * @param {{text: string, images: string[]}} message @param {string} model  the model that answers
 * @returns {Addition}
 */
export function withMessage(conversation, turns, parent, { text, images }, model) {
  const turn = newTurn(conversation, 'user', parent);
  turn.text = text;
  if (images.length) turn.images = images;
  turns.set(turn.id, turn);
  const linked = choose(conversation, parent, turn);
  const made = withAnswer(conversation, turns, turn, model);
  return { ...made, changed: [...linked.changed, ...made.changed] };
}

/** Add a turn for another answer to a question. @returns {Addition} */
export function withAnswer(conversation, turns, question, model) {
  const turn = newTurn(conversation, 'assistant', question);
  turn.answer = newAnswer(model);
  turns.set(turn.id, turn);
  choose(conversation, question, turn);
  return { conversation, changed: [question, turn], answer: turn };
}

/** Make a turn the shown child of its parent. */
export function choose(conversation, parent, turn) {
  (parent ?? conversation).chosen = turn.id;
  return { conversation, changed: parent ? [parent] : [] };
}

/** Remove an image from a message. @param {Turn} turn @param {number} place */
export function removeImage(turn, place) {
  const kept = turn.images.map((_, each) => each).filter((each) => each !== place);
  const leftOut = turn.leftOut ?? {};
  const reasons = kept.flatMap((from, to) => (from in leftOut ? [[to, leftOut[from]]] : []));
  turn.images = kept.map((each) => turn.images[each]);
  turn.leftOut = Object.fromEntries(reasons);
  if (!kept.length) delete turn.images;
}

function newTurn(conversation, role, parent) {
  return {
    id: newId(),
    conversation: conversation.id,
    parent: parent?.id ?? null,
    role,
    chosen: null,
    created: Date.now(),
  };
}
