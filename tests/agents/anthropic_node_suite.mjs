// Anthropic's package for Node: create, stream, its tool runner and thinking; answers are sent back as they came.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
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
  Object.entries(SERVERS).map(([kind, url]) => [kind, new Anthropic({ baseURL: url, apiKey: KEY, maxRetries: 0 })]),
);
const tools = Object.keys(SCHEMAS).map((name) => ({ name, description: DESCRIPTIONS[name], input_schema: SCHEMAS[name] }));
const thinkings = {
  unset: {},
  enabled: { thinking: { type: "enabled", budget_tokens: 1024 } },
  adaptive: { thinking: { type: "adaptive" }, output_config: { effort: "high" } },
  disabled: { thinking: { type: "disabled" } },
};

const ask = (kind, streamed, options) => {
  const body = { model: MODEL, max_tokens: 2000, tools, ...options };
  return streamed ? clients[kind].messages.stream(body).finalMessage() : clients[kind].messages.create(body);
};

const resultsOf = (answer) =>
  answer.content
    .filter((block) => block.type === "tool_use")
    .map((block) => {
      const [content, failed] = runTool(block.name, block.input);
      return { type: "tool_result", tool_use_id: block.id, content, is_error: failed };
    });

const calledBy = (answers) => answers.flatMap((answer) => answer.content.filter((block) => block.type === "tool_use").map((block) => block.name));

async function toolLoop(kind, streamed, name, options) {
  const messages = [{ role: "user", content: script(name) }];
  const answers = [];
  for (let turn = 0; turn < MOST_TURNS; turn++) {
    const answer = await ask(kind, streamed, { messages, ...options });
    answers.push(answer);
    const results = resultsOf(answer);
    if (!results.length) return answers;
    messages.push({ role: "assistant", content: answer.content }, { role: "user", content: results });
  }
  throw new Error("the loop did not end");
}

const cases = [];

for (const [kind, streamed, thinking] of product(SCRIPTED, [false, true], Object.keys(thinkings))) {
  cases.push([`loop, ${kind}, ${streamed ? "streamed" : "whole"}, thinking ${thinking}`, async () => {
    const answers = await toolLoop(kind, streamed, "loop", thinkings[thinking]);
    assert.deepEqual(calledBy(answers), CALLED);
    assert.equal(answers.at(-1).content.at(-1).text, ANSWER);
    if (thinking !== "disabled") assert.equal(answers[0].content[0].type, "thinking");
  }]);
}

for (const [kind, streamed] of product(SCRIPTED, [false, true])) {
  cases.push([`tool that fails, ${kind}, ${streamed ? "streamed" : "whole"}`, async () => {
    assert.equal((await toolLoop(kind, streamed, "error", {})).at(-1).content.at(-1).text, ANSWER);
  }]);
}

for (const [kind, streamed, name] of product(SCRIPTED, [false, true], ["unknown", "broken", "thinking"])) {
  cases.push([`call of no tool or cut answer, ${kind}, ${streamed ? "streamed" : "whole"}, ${name}`, async () => {
    const messages = [{ role: "user", content: script(name) }];
    const answer = await ask(kind, streamed, { messages, ...(name === "unknown" ? {} : { max_tokens: FEW_TOKENS }) });
    messages.push({ role: "assistant", content: answer.content });
    messages.push({ role: "user", content: [...resultsOf(answer), { type: "text", text: "Go on." }] });
    assert.equal((await ask(kind, streamed, { messages })).content.at(-1).text, ANSWER);
  }]);
}

for (const [kind, streamed] of product(SCRIPTED, [false, true])) {
  cases.push([`tool runner, ${kind}, ${streamed ? "streamed" : "whole"}`, async () => {
    const made = [
      betaZodTool({ name: "lookup", description: DESCRIPTIONS.lookup, inputSchema: z.object({ query: z.string() }), run: FUNCTIONS.lookup }),
      betaZodTool({ name: "add", description: DESCRIPTIONS.add, inputSchema: z.object({ a: z.number(), b: z.number() }), run: FUNCTIONS.add }),
    ];
    const messages = [{ role: "user", content: script("loop") }];
    const runner = clients[kind].beta.messages.toolRunner({ model: MODEL, max_tokens: 2000, messages, tools: made, stream: streamed });
    const answers = [];
    for await (const turn of runner) answers.push(streamed ? await turn.finalMessage() : turn);
    assert.deepEqual(calledBy(answers), CALLED);
    assert.equal(answers.at(-1).content.at(-1).text, ANSWER);
  }]);
}

for (const streamed of [false, true]) {
  cases.push([`real model, ${streamed ? "streamed" : "whole"}`, async () => {
    const messages = [{ role: "user", content: "What is 2 + 2?" }];
    for (let turn = 0; turn < 3; turn++) {
      const answer = await ask("smollm2", streamed, { messages, max_tokens: 16, tools: [] });
      messages.push({ role: "assistant", content: answer.content }, { role: "user", content: "And twice that?" });
    }
  }]);
}

suite("anthropic", cases);
