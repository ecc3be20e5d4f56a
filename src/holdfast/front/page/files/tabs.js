// What the tabs of one browser tell each other. All of them read the same conversations from the
// browser's base, so a tab only says which one it has changed.

const ANSWER_MILLISECONDS = 300; // in which another tab says that it sends a message

/** Events: `changed`, `deleted`, `draft`, each with the id of a conversation; `stop` with that of a turn. */
class Tabs extends EventTarget {
  #channel = new BroadcastChannel('holdfast');
  #name = Math.random(); // two tabs that are opened at once ask at once: the smaller name goes first
  #asking = new Set(); // turns
  #elsewhere = new Set(); // turns whose messages another tab says it sends
  /** Whether this tab sends the message of a turn. @type {(turn: string) => boolean} */
  sends = () => false;

  constructor() {
    super();
    this.#channel.onmessage = ({ data: { what, id, name } }) => {
      if (what === 'who sends') this.#claim(id, name);
      else if (what === 'I send') this.#elsewhere.add(id);
      else this.dispatchEvent(new CustomEvent(what, { detail: id }));
    };
  }

  /** @param {'changed' | 'deleted' | 'draft' | 'stop'} what @param {string} id */
  tell(what, id) {
    this.#channel.postMessage({ what, id });
  }

  /** Whether another tab sends the message of a turn. @param {string} turn */
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
