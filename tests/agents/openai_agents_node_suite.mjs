// OpenAI's Agents SDK for JavaScript, over chat completions and responses: loops of tools, whole and streamed.

import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

import { ANSWER, CALLED, DESCRIPTIONS, FUNCTIONS, KEY, MODEL, QUIET, SCHEMAS, SCRIPTED, SERVERS, assert, product, script, suite } from "./common.mjs";

setTracingDisabled(true);
const models = { chat: OpenAIChatCompletionsModel, responses: OpenAIResponsesModel };
const strictTools = [
  tool({ name: "lookup", description: DESCRIPTIONS.lookup, parameters: z.object({ query: z.string() }), execute: FUNCTIONS.lookup }),
  tool({ name: "add", description: DESCRIPTIONS.add, parameters: z.object({ a: z.int(), b: z.int() }), execute: FUNCTIONS.add }),
];
const looseTools = Object.keys(SCHEMAS).map((name) =>
  tool({ name, description: DESCRIPTIONS[name], parameters: { ...SCHEMAS[name], additionalProperties: true }, strict: false, execute: FUNCTIONS[name] }),
);

function agent(dialect, kind, options) {
  const client = new OpenAI({ baseURL: `${SERVERS[kind]}/v1`, apiKey: KEY, maxRetries: 0 });
  return new Agent({ name: "a", instructions: "You help.", model: new models[dialect](client, MODEL), ...options });
}

async function finished(made, streamed, input) {
  const result = await run(made, input, { stream: streamed });
  if (streamed) {
    for await (const _ of result) {
      // all events, as a user would show them
    }
    await result.completed;
  }
  return result;
}

const calledBy = (result) => result.newItems.filter((item) => item.type === "tool_call_item").map((item) => item.rawItem.name);
const cases = [];

for (const [dialect, kind, streamed, effort] of product(Object.keys(models), SCRIPTED, [false, true], ["unset", "none", "high"])) {
  if (effort === "none" && !QUIET.includes(kind)) continue;
  cases.push([`loop, ${dialect}, ${kind}, ${streamed ? "streamed" : "whole"}, effort ${effort}`, async () => {
    const modelSettings = effort === "unset" ? {} : { reasoning: { effort, ...(effort === "high" ? { summary: "auto" } : {}) } };
    const made = agent(dialect, kind, { tools: looseTools, modelSettings });
    const result = await finished(made, streamed, script("loop"));
    assert.deepEqual(calledBy(result), CALLED);
    assert.equal(result.finalOutput, ANSWER);
    const again = await finished(made, streamed, [...result.history, { role: "user", content: "Again." }]);
    assert.equal(again.finalOutput, ANSWER);
  }]);
}

for (const [dialect, kind, streamed] of product(Object.keys(models), SCRIPTED, [false, true])) {
  cases.push([`strict tools, ${dialect}, ${kind}, ${streamed ? "streamed" : "whole"}`, async () => {
    // a grammar forces tokens that no script says, in harmony from an answer's start on: there only one turn is asked
    const once = kind === "harmony" ? { toolUseBehavior: "stop_on_first_tool", modelSettings: { toolChoice: "required" } } : {};
    const result = await finished(agent(dialect, kind, { tools: strictTools, ...once }), streamed, script("loop"));
    assert(calledBy(result).length > 0);
    if (kind !== "harmony") assert.equal(result.finalOutput, ANSWER);
  }]);
  cases.push([`tool that fails, ${dialect}, ${kind}, ${streamed ? "streamed" : "whole"}`, async () => {
    const result = await finished(agent(dialect, kind, { tools: looseTools }), streamed, script("error"));
    assert.equal(result.finalOutput, ANSWER);
  }]);
  cases.push([`form, ${dialect}, ${kind}, ${streamed ? "streamed" : "whole"}`, async () => {
    const made = agent(dialect, kind, { outputType: z.object({ text: z.string() }) });
    assert.equal(typeof (await finished(made, streamed, script("plain"))).finalOutput.text, "string");
  }]);
}

suite("openai agents", cases);
