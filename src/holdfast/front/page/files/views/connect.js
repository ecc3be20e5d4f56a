// Connect: how agents and libraries use this server.

import { html, nothing } from '../vendor/lit.js';
import { get } from '../api.js';
import { View } from '../view.js';

class ConnectView extends View {
  static properties = { recipes: { state: true } };

  constructor() {
    super();
    this.recipes = null;
  }

  async load() {
    this.recipes = await get('/admin/clients');
  }

  render() {
    return html`<h1>Connect</h1>
      ${this.failureLine()} ${this.recipes ? this.content(this.recipes) : nothing}`;
  }

  content({ url, model, needs_key: needsKey, key_variable: variable, clients }) {
    const agents = clients.filter((client) => client.launch);
    const libraries = clients.filter((client) => !client.launch);
    return html`<dl>
        <dt>OpenAI's APIs</dt>
        <dd><code>${url}/v1</code> <copy-button .text=${`${url}/v1`}></copy-button></dd>
        <dt>Anthropic's and Ollama's APIs</dt>
        <dd><code>${url}</code> <copy-button .text=${url}></copy-button></dd>
        <dt>Model</dt>
        <dd><code>${model || 'none yet'}</code></dd>
        <dt>Key</dt>
        <dd>
          ${needsKey
            ? html`needed; the examples read it from <code>${variable}</code>`
            : 'not needed; clients that insist on one may send any text'}
        </dd>
      </dl>
      <section aria-labelledby="agents-title">
        <h2 id="agents-title">Coding agents</h2>
        <p>
          <code>holdfast launch</code> configures and starts an agent, and changes none of its
          settings. On a machine without Holdfast, use the command below it.
        </p>
        ${agents.map((client) => recipe(client))}
      </section>
      <section aria-labelledby="libraries-title">
        <h2 id="libraries-title">Libraries and programs</h2>
        ${libraries.map((client) => recipe(client))}
      </section>`;
  }
}
customElements.define('connect-view', ConnectView);

function recipe(client) {
  const title = `client-${client.name}`;
  return html`<section class="card" aria-labelledby=${title}>
    <h3 id=${title}>${client.title}</h3>
    ${client.launch ? snippet(client.launch, `Command that starts ${client.title}`) : nothing}
    ${client.launch
      ? html`<details>
          <summary>Without <code>holdfast launch</code></summary>
          ${snippet(client.text, `Settings of ${client.title}`)}
        </details>`
      : snippet(client.text, `Example for ${client.title}`)}
    ${client.install
      ? html`<p class="hint">To install it: <code>${client.install}</code></p>`
      : nothing}
  </section>`;
}

function snippet(text, label) {
  return html`<div class="code-frame">
    <pre tabindex="0" aria-label=${label} role="region">${text}</pre>
    <copy-button .text=${text}></copy-button>
  </div>`;
}
