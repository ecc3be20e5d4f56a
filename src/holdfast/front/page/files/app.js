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

const main = /** @type {HTMLElement} */ (document.getElementById('view'));
let shown = '';

async function show() {
  const [title, tag, module] = VIEWS[location.pathname] ?? VIEWS['/'];
  for (const link of document.querySelectorAll('header nav a')) {
    if (link.getAttribute('href') === location.pathname) {
      link.setAttribute('aria-current', 'page');
      link.scrollIntoView({ block: 'nearest', inline: 'nearest' });
    } else {
      link.removeAttribute('aria-current');
    }
  }
  document.title = `${title} – Holdfast`;
  const isSame = shown === tag;
  shown = tag;
  await import(module);
  if (isSame || shown !== tag) return;
  main.replaceChildren(document.createElement(tag));
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
document.body.append(dialog);

function askForKey() {
  const useKey = async (event) => {
    event.preventDefault();
    const key = new FormData(event.target).get('key');
    await access.use(String(key).trim());
    if (access.caller) {
      dialog.close();
      announce('The key is accepted');
    } else {
      draw('The server does not know this key.');
    }
  };
  const draw = (failure) =>
    render(
      html`<form @submit=${useKey}>
        <h2 id="key-title">This server needs a key</h2>
        ${failure ? html`<p class="failure" role="alert">${failure}</p>` : nothing}
        <label>API key <input name="key" type="password" autocomplete="off" required /></label>
        <p class="hint">It is kept until you close this tab. <code>holdfast keys add NAME</code> creates one.</p>
        <button class="primary">Use this key</button>
      </form>`,
      dialog,
    );
  if (dialog.open) return;
  draw(access.key ? 'The server does not accept the key any more.' : '');
  dialog.showModal();
}

access.addEventListener('locked', askForKey);
access.addEventListener('change', () => {
  const place = /** @type {HTMLElement} */ (document.getElementById('access'));
  const caller = access.caller;
  if (!caller) return render(nothing, place);
  const role = caller.is_admin ? 'admin' : 'user';
  const name = caller.key || (caller.needs_key ? 'with a key' : '');
  const forget = () => access.use('');
  return render(
    html`${name} <span class="badge">${role}</span>
      ${access.key ? html`<button type="button" @click=${forget}>Forget key</button>` : nothing}`,
    place,
  );
});

show();
access.refresh().catch((error) => {
  main.prepend(
    Object.assign(document.createElement('p'), {
      className: 'failure',
      textContent: `The server does not answer: ${error.message}`,
    }),
  );
});
