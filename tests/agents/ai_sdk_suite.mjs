// The AI SDK with each of its providers that reach Penstock: loops of tools, whole and streamed, with its own history.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

import { ANSWER, CALLED, DESCRIPTIONS, FUNCTIONS, KEY, MODEL, SCHEMAS, SCRIPTED, SERVERS, assert, product, script, suite } from "./common.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const providers = {
  responses: (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: KEY }).responses(MODEL),
  chat: (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: KEY }).chat(MODEL),
  compatible: (url) => createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, apiKey: KEY, supportsStructuredOutputs: true })(MODEL),
  anthropic: (url) => createAnthropic({ baseURL: `${url}/v1`, apiKey: KEY })(MODEL),
};
const efforts = {
  responses: { openai: { reasoningEffort: "high", reasoningSummary: "auto", forceReasoning: true } },
  chat: { openai: { reasoningEffort: "high", forceReasoning: true } },
  compatible: { penstock: { reasoningEffort: "high" } },
  anthropic: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } },
};
const notStored = { responses: { openai: { store: false } } };
const tools = Object.fromEntries(
  Object.keys(SCHEMAS).map((name) => [
    name,
    tool({ description: DESCRIPTIONS[name], inputSchema: jsonSchema(SCHEMAS[name]), execute: async (given) => FUNCTIONS[name](given) }),
  ]),
);

// [text, names of the tools called, messages]
async function finished(streamed, options) {
  const given = { stopWhen: stepCountIs(6), maxRetries: 0, maxOutputTokens: 2000, ...options };
  let failure;
  const result = streamed ? streamText({ ...given, onError: ({ error }) => (failure = error) }) : await generateText(given);
  if (streamed) await result.consumeStream({ onError: (error) => (failure = error) });
  if (failure) throw failure;
  const [text, steps, response] = await Promise.all([result.text, result.steps, result.response]);
  const called = steps.flatMap((step) => step.toolCalls.map((call) => call.toolName));
  return [text, called, steps.flatMap((step, index) => (index === steps.length - 1 ? step.response.messages : [])), response, await result.output?.catch?.(() => null)];
}

const cases = [];

for (const [provider, kind, streamed, thinking] of product(Object.keys(providers), SCRIPTED, [false, true], [false, true])) {
  const title = `${provider}, ${kind}, ${streamed ? "streamed" : "whole"}${thinking ? ", thinking" : ""}`;
  cases.push([`loop, ${title}`, async () => {
    const model = providers[provider](SERVERS[kind]);
    const messages = [{ role: "user", content: script("loop") }];
    const providerOptions = thinking ? efforts[provider] : {};
    const [text, called, made] = await finished(streamed, { model, messages, tools, providerOptions });
    assert.deepEqual(called, CALLED);
    assert.equal(text, ANSWER);
    const kept = [...messages, ...made, { role: "user", content: "Again." }];
    assert.equal((await finished(streamed, { model, messages: kept, tools, providerOptions }))[0], ANSWER);
  }]);
}

for (const [kind, streamed] of product(SCRIPTED, [false, true])) {
  cases.push([`loop, responses not stored, ${kind}, ${streamed ? "streamed" : "whole"}`, async () => {
    const [text] = await finished(streamed, { model: providers.responses(SERVERS[kind]), prompt: script("loop"), tools, providerOptions: notStored.responses });
    assert.equal(text, ANSWER);
  }]);
}

for (const [provider, kind, streamed, name] of product(Object.keys(providers), SCRIPTED, [false, true], ["error", "unknown"])) {
  cases.push([`tool that is none or fails, ${provider}, ${kind}, ${streamed ? "streamed" : "whole"}, ${name}`, async () => {
    await finished(streamed, { model: providers[provider](SERVERS[kind]), prompt: script(name), tools });
  }]);
}

for (const [provider, kind, streamed] of product(Object.keys(providers), SCRIPTED, [false, true])) {
  cases.push([`form, ${provider}, ${kind}, ${streamed ? "streamed" : "whole"}`, async () => {
    const form = jsonSchema({ type: "object", properties: { text: { type: "string" } }, required: ["text"], additionalProperties: false });
    const options = { model: providers[provider](SERVERS[kind]), prompt: script("plain"), output: Output.object({ schema: form }), maxRetries: 0 };
    const result = streamed ? streamText(options) : await generateText(options);
    assert.equal(typeof (await result.output).text, "string");
  }]);
}

for (const [provider, streamed] of product(Object.keys(providers), [false, true])) {
  cases.push([`real model, ${provider}, ${streamed ? "streamed" : "whole"}`, async () => {
    await finished(streamed, { model: providers[provider](SERVERS.smollm2), prompt: "What is 2 + 2?", maxOutputTokens: 16 });
  }]);
}

suite("ai sdk", cases);
