// The frame of the page: it asks for a key if the server wants one, and shows the view of the address.

import { html, nothing, render } from './vendor/lit.js';
import { access } from './api.js';
import { announce } from './view.js';

/** path → [title, name of the view's element, its module] */
const VIEWS = {
  '/': ['Chat', 'chat-view', './views/chat.js'],
  '/page/now': ['Now', 'now-view', './views/now.js'],
  '/page/performance': ['Performance', 'performance-view', './views/performance.js'],
  '/page/memory': ['Memory', 'memory-view', './views/memory.js'],
  '/page/models': ['Models', 'models-view', './views/models.js'],
  '/page/connect': ['Connect', 'connect-view', './views/connect.js'],
  '/page/logs': ['Logs', 'logs-view', './views/logs.js'],
};

const RETRY_MILLISECONDS = 1000;
const main = /** @type {HTMLElement} */ (document.getElementById('view'));
const place = /** @type {HTMLElement} */ (document.getElementById('place'));
const notice = /** @type {HTMLElement} */ (document.getElementById('notice'));
let wanted = ''; // the view that the address names
let shown = ''; // the visible view

/** Show the view that the address names, as soon as the server can send it. */
async function show() {
  const path = location.pathname.replace(/(?<=.)\/+$/, ''); // the server accepts a last slash, too
  if (path !== location.pathname) history.replaceState(null, '', path + location.search);
  const [title, tag, module] = VIEWS[location.pathname] ?? VIEWS['/'];
  for (const link of document.querySelectorAll('header nav a')) {
    if (link.getAttribute('href') === location.pathname) {
      link.setAttribute('aria-current', 'page');
    } else {
      link.removeAttribute('aria-current');
    }
  }
  document.title = `${title} – Holdfast`;
  const isUnderWay = wanted === tag;
  wanted = tag;
  if (isUnderWay) return;
  await loaded(title, tag, module);
  if (wanted !== tag || shown === tag) return;
  shown = tag;
  place.replaceChildren(document.createElement(tag));
}

/** Load the module of a view; while the server does not answer, say so and try again. */
async function loaded(title, tag, module) {
  const address = new URL(module, import.meta.url);
  while (wanted === tag && !customElements.get(tag)) {
    try {
      await import(module);
      return;
    } catch (error) {
      if (customElements.get(tag)) throw error; // a bug in the view itself
      shown = '';
      const text = `${title} appears as soon as the server answers.`;
      const line = Object.assign(document.createElement('p'), { className: 'empty', textContent: text });
      place.replaceChildren(line);
      await serverAnswers(address, () => wanted === tag);
      // Browsers may remember that an address failed, or that a module which this one imports did;
      // only loading the page anew helps then, but it closes the open conversation.
      const again = `${module}?again=${Date.now()}`;
      if (wanted === tag) await import(again).catch(() => location.reload());
    }
  }
}

/** Resolves when a file of the page can be fetched again, or when nobody waits for it. */
async function serverAnswers(address, isAwaited) {
  while (isAwaited()) {
    try {
      if ((await fetch(address, { cache: 'no-store' })).ok) return;
    } catch {
      // the server is not back yet
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
  }
}

/** Go to an address of this page without loading it anew. @param {string} url */
function go(url) {
  history.pushState(null, '', url);
  const before = shown;
  show().then(() => {
    if (shown !== before) main.focus();
  });
  dispatchEvent(new Event('holdfast-address'));
}

document.addEventListener('holdfast-go', ({ detail }) => go(detail));
document.addEventListener('click', (event) => {
  const link = event.target instanceof Element ? event.target.closest('a[href]') : null;
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey) return;
  if (event.shiftKey || event.altKey || link.hasAttribute('download') || link.target) return;
  const url = new URL(link.href);
  if (url.origin !== location.origin || !(url.pathname in VIEWS) || url.hash) return;
  event.preventDefault();
  go(url.pathname + url.search);
});
addEventListener('popstate', () => {
  show();
  dispatchEvent(new Event('holdfast-address'));
});

const dialog = document.createElement('dialog');
dialog.setAttribute('aria-labelledby', 'key-title');
dialog.addEventListener('close', () => render(nothing, dialog));
document.body.append(dialog);

const REFUSED = 'The server does not know this key.';
const WITHDRAWN = 'The server no longer accepts the key of this tab.';

/** @param {string} failure  why the earlier key was refused; empty if there was none */
function askForKey(failure) {
  const useKey = async (event) => {
    event.preventDefault();
    const key = String(new FormData(event.target).get('key')).trim();
    try {
      await access.use(key);
    } catch (error) {
      draw(`The server does not answer: ${error.message}`);
      return;
    }
    if (access.caller) {
      dialog.close();
      announce('The key is accepted');
    } else {
      draw(REFUSED);
    }
  };
  const draw = (text) =>
    render(
      html`<form @submit=${useKey}>
        <h2 id="key-title">This server needs a key</h2>
        ${text ? html`<p class="failure" role="alert">${text}</p>` : nothing}
        <label>API key <input name="key" type="password" autocomplete="off" required /></label>
        <p class="hint">It is kept until you close this tab. <code>holdfast keys add NAME</code> creates one.</p>
        <p class="actions">
          <button class="primary">Use this key</button>
          <button type="button" @click=${() => dialog.close()}>Not now</button>
        </p>
      </form>`,
      dialog,
    );
  if (dialog.open) return;
  draw(failure);
  dialog.showModal();
}

/** The notice above the view: the server needs a key, or does not answer. */
function drawNotice(outage = '') {
  const isLocked = access.isLocked && !access.caller;
  place.hidden = isLocked;
  const lock = html`<div class="panel">
    <h1>This server needs a key</h1>
    <p>Enter a key to continue. Your drafts are kept in this browser.</p>
    <button type="button" class="primary" @click=${() => askForKey('')}>Enter a key</button>
  </div>`;
  const down = outage
    ? html`<p class="failure" role="alert">The server does not answer; trying again. (${outage})</p>`
    : nothing;
  render(isLocked ? lock : down, notice);
}

access.addEventListener('locked', ({ detail }) => {
  drawNotice();
  askForKey(detail.wasAccepted ? WITHDRAWN : '');
});
access.addEventListener('change', () => {
  const corner = /** @type {HTMLElement} */ (document.getElementById('access'));
  const caller = access.caller;
  drawNotice();
  if (!caller) return render(nothing, corner);
  const role = caller.is_admin ? 'admin' : 'user';
  const name = caller.key || (caller.needs_key ? 'with a key' : '');
  const forget = () => access.use('');
  return render(
    html`${name} <span class="badge">${role}</span>
      ${access.key ? html`<button type="button" @click=${forget}>Forget key</button>` : nothing}`,
    corner,
  );
});

/** Ask the server who we are, until it answers. */
async function enter() {
  try {
    await access.refresh();
  } catch (error) {
    drawNotice(error.message);
    setTimeout(enter, RETRY_MILLISECONDS);
  }
}

show();
enter();
