// Messages between the tabs of one browser. All tabs read the same conversations from the browser's
// database, so a tab only announces which one it changed.

const ANSWER_MILLISECONDS = 300; // how long to wait for another tab to claim a message

/**
 * Events: `changed`, `deleted`, `draft`, each with the id of a conversation; `sent` with the id and
 * the text of a draft that became a message; `stop` with the id of a turn.
 */
class Tabs extends EventTarget {
  #channel = new BroadcastChannel('holdfast');
  #name = Math.random(); // of two tabs that ask at the same time, the smaller name wins
  #asking = new Set(); // turns
  #elsewhere = new Set(); // turns whose messages another tab claims to send
  /** Whether this tab is sending the message of a turn. @type {(turn: string) => boolean} */
  sends = () => false;

  constructor() {
    super();
    this.#channel.onmessage = ({ data: { what, id, name } }) => {
      if (what === 'who sends') this.#claim(id, name);
      else if (what === 'I send') this.#elsewhere.add(id);
      else this.dispatchEvent(new CustomEvent(what, { detail: id }));
    };
  }

  /** @param {'changed' | 'deleted' | 'draft' | 'sent' | 'stop'} what @param {unknown} id */
  tell(what, id) {
    this.#channel.postMessage({ what, id });
  }

  /** Whether another tab is sending the message of a turn. @param {string} turn */
  async isSentElsewhere(turn) {
    this.#asking.add(turn);
    this.#elsewhere.delete(turn);
    this.#channel.postMessage({ what: 'who sends', id: turn, name: this.#name });
    await new Promise((resolve) => setTimeout(resolve, ANSWER_MILLISECONDS));
    this.#asking.delete(turn);
    return this.#elsewhere.has(turn);
  }

  #claim(turn, name) {
    const asksFirst = this.#asking.has(turn) && this.#name < name;
    if (asksFirst || this.sends(turn)) this.#channel.postMessage({ what: 'I send', id: turn });
  }
}

export const tabs = new Tabs();
