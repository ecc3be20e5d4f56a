// Vercel's AI SDK with its providers for all protocols: `node with_vercel.mjs BASE_URL MODEL`, as conversations.py has it; with a third
// argument before a server that is silent for long, as waits.py has it.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { createOllama as createOtherOllama } from 'ai-sdk-ollama';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { createOllama } from 'ollama-ai-provider-v2';
import { z } from 'zod';

const [baseURL, name, waits] = process.argv.slice(2);
const root = baseURL.replace(/\/v1$/, '');
const apiKey = 'none';
const MODELS = {
  chat: createOpenAICompatible({ name: 'holdfast', baseURL, includeUsage: true, supportsStructuredOutputs: true })(name),
  responses: createOpenAI({ baseURL, apiKey })(name),
  messages: createAnthropic({ baseURL, apiKey })(name),
  ollama: createOllama({ baseURL: `${root}/api` })(name),
  'ollama (ai-sdk-ollama)': createOtherOllama({ baseURL: root })(name),
};
const OPTIONS = {
  responses: { openai: { forceReasoning: true, reasoningSummary: 'auto' } }, // it shows thoughts as summaries only
  messages: { anthropic: { thinking: { type: 'enabled', budgetTokens: 1024 } } },
  ollama: { ollama: { think: true } },
  'ollama (ai-sdk-ollama)': { ollama: { think: true } },
};
const versions = Object.fromEntries(
  ['ai', '@ai-sdk/openai', '@ai-sdk/anthropic', '@ai-sdk/openai-compatible', 'ollama-ai-provider-v2', 'ai-sdk-ollama'].map(
    (each) => [each, JSON.parse(readFileSync(new URL(`./node_modules/${each}/package.json`, import.meta.url))).version],
  ),
);
const tools = {
  get_weather: tool({
    description: 'Get the weather of a city',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (assert.equal(city, 'Oslo'), 'sunny, 21 degrees'),
  }),
};
const asked = (protocol, prompt) => ({
  model: MODELS[protocol], temperature: 0, maxOutputTokens: 300, maxRetries: 0, prompt, providerOptions: OPTIONS[protocol],
});
const told = (text) => assert.match(text, /21 degrees/);
const summed = (text) => (assert.match(text, /42/), assert.doesNotMatch(text, /think/));

const checks = {
  async tool_loop(protocol) {
    const done = await generateText({ ...asked(protocol, 'What is the weather in Oslo?'), tools, stopWhen: stepCountIs(3) });
    assert.equal(done.steps.length, 2);
    told(done.text);
  },
  async tool_loop_streamed(protocol) {
    const stream = streamText({
      ...asked(protocol, 'What is the weather in Oslo?'), tools, stopWhen: stepCountIs(3), onError: () => {},
    });
    let text = '';
    for await (const part of stream.textStream) text += part;
    told(text);
    assert.equal((await stream.steps).length, 2);
    const usage = await stream.totalUsage;
    assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
  },
  async thinking(protocol) {
    const done = await generateText(asked(protocol, 'What is 17 + 25?'));
    summed(done.text);
    assert.ok(done.reasoningText);
  },
  async thinking_streamed(protocol) {
    let reasoning = '', text = '';
    for await (const part of streamText({ ...asked(protocol, 'What is 17 + 25?'), onError: () => {} }).fullStream) {
      if (part.type === 'error') throw part.error;
      if (part.type === 'reasoning-delta') reasoning += part.text;
      if (part.type === 'text-delta') text += part.text;
    }
    summed(text);
    assert.ok(reasoning);
  },
  async structure(protocol) {
    const schema = z.object({ city: z.string().max(20), degrees: z.number().int().min(0).max(40) });
    const done = await generateText({ ...asked(protocol, 'Write JSON.'), providerOptions: {}, output: Output.object({ schema }) });
    assert.equal(typeof done.output.city, 'string');
  },
};

const waiting = {
  async vercel(protocol) {
    let text = '';
    for await (const part of streamText({ ...asked(protocol, 'Hi'), providerOptions: {} }).fullStream) {
      if (part.type === 'error') throw part.error;
      if (part.type === 'text-delta') text += part.text;
    }
    assert.equal(text, 'Hello');
  },
};

let failed = false;
for (const [check, run] of Object.entries(waits ? waiting : checks)) {
  for (const protocol of Object.keys(MODELS)) {
    let problem = '';
    try {
      await run(protocol);
    } catch (error) {
      problem = `${error.stack ?? error} ${error.responseBody ?? ''}`;
      failed = true;
    }
    console.log(JSON.stringify({ check: `${check} ${protocol}`, problem, versions }).replace('"check":', '"check": '));
  }
}
process.exit(failed ? 1 : 0);
