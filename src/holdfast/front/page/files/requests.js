// Builds the request for an answer from the turns before it.

import { itemsToSend } from './answers.js';
import { takesImages } from './images.js';

/** @typedef {import('./conversations.js').Turn} Turn */

/** The token limit of an answer if the user sets none, so that no answer is endless. */
export const LONGEST_ANSWER = 16_384;
const OF_TEXT_MODEL = '[image left out: this model reads text only]';
const OF_LEFT_OUT = '[image left out here]';

/** The turns before an answer, in order. @param {Map<string, Turn>} turns @param {Turn} turn */
function turnsBefore(turns, turn) {
  const path = [];
  for (let each = turns.get(turn.parent); each; each = turns.get(each.parent)) path.unshift(each);
  return path;
}

/**
 * The content of a user's message. Part n is image n, and the text is the last part. An image that
 * the model cannot take is replaced by a note, so that later messages still work.
 */
function contentOf({ text, images, leftOut = {} }, seesImages) {
  if (!images) return text;
  const parts = images.map((image, place) => {
    if (place in leftOut) return { type: 'input_text', text: OF_LEFT_OUT };
    if (!seesImages) return { type: 'input_text', text: OF_TEXT_MODEL };
    return { type: 'input_image', image_url: image };
  });
  return text ? [...parts, { type: 'input_text', text }] : parts;
}

/** The input items, and the turn that each of them belongs to. */
function inputOf(turns, answered, seesImages) {
  const input = [];
  const owners = [];
  for (const turn of turnsBefore(turns, answered)) {
    const items = turn.answer
      ? itemsToSend(turn.answer)
      : [{ role: 'user', content: contentOf(turn, seesImages) }];
    input.push(...items);
    owners.push(...items.map(() => turn));
  }
  return { input, owners };
}

/**
 * @param {import('./conversations.js').Conversation} conversation
 * @param {Map<string, Turn>} turns
 * @param {Turn} answered  the turn of the answer
 * @param {object | undefined} model  as /v1/models describes it
 */
export function requestFor(conversation, turns, answered, model) {
  const { instructions, temperature, maxTokens, shortens } = conversation.settings;
  const body = {
    model: answered.answer.model,
    input: inputOf(turns, answered, takesImages(model)).input,
    include: ['reasoning.encrypted_content'],
    holdfast: { explain: true },
    max_output_tokens: maxTokens ?? LONGEST_ANSWER,
    ...(instructions && { instructions }),
    ...(temperature !== null && { temperature }),
    ...(shortens && { truncation: 'auto' }),
  };
  return { body, headers: { 'x-session-id': sessionOf(conversation.id) } };
}

export function sessionOf(conversationId) {
  return `chat-${conversationId}`;
}

/**
 * The image because of which a request was refused, if there is one.
 * @param {Map<string, Turn>} turns @param {Turn} answered
 * @returns {{turn: Turn, place: number} | null}
 */
export function refusedImage(turns, answered) {
  const found = /^input\.(\d+)\.content\.(\d+)/.exec(answered.answer.failure?.param ?? '');
  if (!found) return null;
  const [item, place] = [Number(found[1]), Number(found[2])];
  const turn = inputOf(turns, answered, true).owners[item];
  return turn?.images?.[place] ? { turn, place } : null;
}

/** The turns before an answer with images that are still sent. @returns {Turn[]} */
export function turnsWithImages(turns, answered) {
  return turnsBefore(turns, answered).filter(({ images = [], leftOut = {} }) =>
    images.some((_, place) => !(place in leftOut)),
  );
}
