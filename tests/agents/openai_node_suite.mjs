// openai's package for Node: create, stream, parse, runTools and responses; all that a helper returns is sent back.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import {
  ANSWER,
  CALLED,
  DESCRIPTIONS,
  FEW_TOKENS,
  FUNCTIONS,
  KEY,
  MODEL,
  MOST_TURNS,
  QUIET,
  SCHEMAS,
  SCRIPTED,
  SERVERS,
  assert,
  product,
  runTool,
  script,
  suite,
} from "./common.mjs";

const clients = Object.fromEntries(
  Object.entries(SERVERS).map(([kind, url]) => [kind, new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries: 0 })]),
);
const functions = Object.keys(SCHEMAS).map((name) => ({ name, description: DESCRIPTIONS[name], parameters: SCHEMAS[name] }));
const tools = functions.map((made) => ({ type: "function", function: made }));
const responsesTools = functions.map((made) => ({ type: "function", ...made, strict: false }));
const strictTools = [
  zodFunction({ name: "lookup", parameters: z.object({ query: z.string() }) }),
  zodFunction({ name: "add", parameters: z.object({ a: z.int(), b: z.int() }) }),
];
const Answer = z.object({ text: z.string() });

const ways = {
  created: async (client, body) => (await client.chat.completions.create(body)).choices[0].message,
  parsed: async (client, body) => (await client.chat.completions.parse(body)).choices[0].message,
  streamed: async (client, body) => client.chat.completions.stream(body).finalMessage(),
};

// Messages of a loop of tools, and the names of the tools called; what the client returns goes back as it is.
async function chatLoop(way, kind, name, options) {
  const messages = [{ role: "user", content: script(name) }];
  const called = [];
  for (let turn = 0; turn < MOST_TURNS; turn++) {
    const message = await ways[way](clients[kind], { model: MODEL, messages, ...options });
    messages.push(message);
    if (!message.tool_calls?.length) return [messages, called];
    for (const call of message.tool_calls) {
      called.push(call.function.name);
      messages.push({ role: "tool", tool_call_id: call.id, content: runTool(call.function.name, call.function.arguments)[0] });
    }
  }
  throw new Error(`the loop did not end: ${called}`);
}

const resultsOf = (answer) =>
  answer.output
    .filter((item) => item.type === "function_call")
    .map((call) => ({ type: "function_call_output", call_id: call.call_id, output: runTool(call.name, call.arguments)[0] }));

const respond = (kind, streamed, body) =>
  streamed ? clients[kind].responses.stream({ model: MODEL, ...body }).finalResponse() : clients[kind].responses.create({ model: MODEL, ...body });

const cases = [];

for (const [way, kind, effort] of product(["created", "streamed"], SCRIPTED, ["unset", "none", "low", "high"])) {
  if (effort === "none" && !QUIET.includes(kind)) continue;
  cases.push([`chat loop, ${way}, ${kind}, effort ${effort}`, async () => {
    const [messages, called] = await chatLoop(way, kind, "loop", { tools, ...(effort === "unset" ? {} : { reasoning_effort: effort }) });
    assert.deepEqual(called, CALLED);
    assert.equal(messages.at(-1).content, ANSWER);
    assert.equal(Boolean(messages[1].reasoning_content), effort !== "none");
  }]);
}

for (const [way, kind, name] of product(["created", "streamed"], SCRIPTED, ["error", "unknown"])) {
  cases.push([`tool that is none or fails, ${way}, ${kind}, ${name}`, async () => {
    const [messages] = await chatLoop(way, kind, name, { tools });
    messages.push({ role: "user", content: "Go on." });
    assert.equal((await ways[way](clients[kind], { model: MODEL, messages, tools })).content, ANSWER);
  }]);
}

for (const [kind, name] of product(SCRIPTED, ["broken", "thinking"])) {
  cases.push([`answer that max_tokens cuts, ${kind}, ${name}`, async () => {
    const messages = [{ role: "user", content: script(name) }];
    const first = await clients[kind].chat.completions.create({ model: MODEL, messages, tools, max_completion_tokens: FEW_TOKENS });
    assert.equal(first.choices[0].finish_reason, "length");
    const message = first.choices[0].message;
    messages.push(message);
    for (const call of message.tool_calls ?? []) messages.push({ role: "tool", tool_call_id: call.id, content: "That was cut." });
    messages.push({ role: "user", content: "Go on." });
    assert.equal((await ways.created(clients[kind], { model: MODEL, messages, tools })).content, ANSWER);
  }]);
}

for (const [way, kind] of product(["parsed", "streamed"], SCRIPTED)) {
  cases.push([`strict tools, ${way}, ${kind}`, async () => {
    if (kind === "harmony") {
      // a grammar forces tokens that no script says, here from an answer's start on: only one turn is asked
      const messages = [{ role: "user", content: script("loop") }];
      const body = { model: MODEL, messages, tools: strictTools, tool_choice: "required" };
      assert((await ways[way](clients[kind], body)).tool_calls.length > 0);
      return;
    }
    const [messages, called] = await chatLoop(way, kind, "loop", { tools: strictTools });
    assert(called.length > 0);
    assert.equal(messages.at(-1).content, ANSWER);
  }]);
  cases.push([`form and another turn, ${way}, ${kind}`, async () => {
    const messages = [{ role: "user", content: script("plain") }];
    for (let turn = 0; turn < 3; turn++) {
      const body = { model: MODEL, messages, response_format: zodResponseFormat(Answer, "answer") };
      const message = await ways[way](clients[kind], body);
      assert.equal(typeof message.parsed.text, "string");
      messages.push(message, { role: "user", content: "Again." });
    }
  }]);
}

for (const [kind, streamed] of product(SCRIPTED, [false, true])) {
  cases.push([`runTools, ${kind}, ${streamed ? "streamed" : "whole"}`, async () => {
    const runnable = functions.map((made) => ({
      type: "function",
      function: { ...made, function: FUNCTIONS[made.name], parse: JSON.parse },
    }));
    const messages = [{ role: "user", content: script("loop") }];
    const runner = clients[kind].chat.completions.runTools({ model: MODEL, messages, tools: runnable, stream: streamed });
    assert.equal(await runner.finalContent(), ANSWER);
    const kept = [...runner.messages, { role: "user", content: "Again." }];
    assert.equal((await ways.created(clients[kind], { model: MODEL, messages: kept, tools })).content, ANSWER);
  }]);
}

for (const [kind, streamed, effort] of product(SCRIPTED, [false, true], ["none", "medium"])) {
  if (effort === "none" && !QUIET.includes(kind)) continue;
  cases.push([`responses loop, ${kind}, ${streamed ? "streamed" : "whole"}, effort ${effort}`, async () => {
    const input = [{ role: "user", content: script("loop") }];
    const called = [];
    let answer;
    for (let turn = 0; turn < 3; turn++) {
      const reasoning = effort === "none" ? { effort } : { effort, summary: "auto" };
      answer = await respond(kind, streamed, { input, tools: responsesTools, reasoning, store: false, include: ["reasoning.encrypted_content"] });
      called.push(...answer.output.filter((item) => item.type === "function_call").map((call) => call.name));
      input.push(...answer.output, ...resultsOf(answer));
    }
    assert.deepEqual(called, CALLED);
    assert.equal(answer.output_text, ANSWER);
  }]);
}

for (const [kind, streamed] of product(SCRIPTED, [false, true])) {
  cases.push([`responses by their ids, ${kind}, ${streamed ? "streamed" : "whole"}`, async () => {
    let input = [{ role: "user", content: script("loop") }];
    let answer;
    for (let turn = 0; turn < 3; turn++) {
      answer = await respond(kind, streamed, { input, tools: responsesTools, previous_response_id: answer?.id });
      input = resultsOf(answer);
    }
    assert.equal(answer.output_text, ANSWER);
  }]);
}

for (const kind of SCRIPTED) {
  cases.push([`parsed responses go back, ${kind}`, async () => {
    const input = [{ role: "user", content: script("plain") }];
    for (let turn = 0; turn < 3; turn++) {
      const answer = await clients[kind].responses.parse({ model: MODEL, input, text: { format: zodTextFormat(Answer, "answer") } });
      assert.equal(typeof answer.output_parsed.text, "string");
      input.push(...answer.output, { role: "user", content: "Again." });
    }
  }]);
}

for (const way of ["created", "streamed"]) {
  cases.push([`real model, ${way}`, async () => {
    const messages = [{ role: "user", content: "What is 2 + 2?" }];
    for (let turn = 0; turn < 3; turn++) {
      messages.push(await ways[way](clients.smollm2, { model: MODEL, messages, max_tokens: 16 }));
      messages.push({ role: "user", content: "And twice that?" });
    }
  }]);
}

suite("openai", cases);
