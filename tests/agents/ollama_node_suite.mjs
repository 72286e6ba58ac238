// ollama's package for Node: chats and prompts, whole and streamed; each message is sent back as history.

import { Ollama } from "ollama";

import {
  ANSWER,
  CALLED,
  DESCRIPTIONS,
  FEW_TOKENS,
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

const headers = { authorization: `Bearer ${KEY}` };
const clients = Object.fromEntries(Object.entries(SERVERS).map(([kind, host]) => [kind, new Ollama({ host, headers })]));
const tools = Object.keys(SCHEMAS).map((name) => ({
  type: "function",
  function: { name, description: DESCRIPTIONS[name], parameters: SCHEMAS[name] },
}));
const form = { type: "object", properties: { text: { type: "string" } }, required: ["text"] };

async function ask(kind, stream, body) {
  if (!stream) return (await clients[kind].chat({ model: MODEL, ...body })).message;
  const message = { role: "assistant", content: "", thinking: "", tool_calls: [] };
  let done = false;
  for await (const part of await clients[kind].chat({ model: MODEL, stream: true, ...body })) {
    assert.equal(done, false);
    message.content += part.message.content;
    message.thinking += part.message.thinking ?? "";
    message.tool_calls.push(...(part.message.tool_calls ?? []));
    done = part.done;
  }
  assert.equal(done, true);
  return message;
}

async function loop(kind, stream, name, body) {
  const messages = [{ role: "user", content: script(name) }];
  const called = [];
  for (let turn = 0; turn < MOST_TURNS; turn++) {
    const message = await ask(kind, stream, { messages, tools, ...body });
    messages.push(message);
    if (!message.tool_calls?.length) return [called, messages.filter(({ role }) => role === "assistant")];
    for (const { function: made } of message.tool_calls) {
      called.push(made.name);
      messages.push({ role: "tool", tool_name: made.name, content: runTool(made.name, made.arguments)[0] });
    }
  }
  throw new Error("the loop does not end");
}

const cases = [];
for (const [kind, stream] of product(SCRIPTED, [false, true])) {
  const how = `${kind} ${stream ? "streamed" : "whole"}`;
  for (const think of QUIET.includes(kind) ? [true, false] : [true]) {
    cases.push([
      `loop ${how} think ${think}`,
      async () => {
        const [called, said] = await loop(kind, stream, "loop", { think, keep_alive: "5m" });
        assert.deepEqual(called, CALLED);
        assert.equal(said.at(-1).content, ANSWER);
        assert.equal(Boolean(said[0].thinking), think);
      },
    ]);
  }
  cases.push([
    `a call that is cut off, ${how}`,
    () => ask(kind, stream, { messages: [{ role: "user", content: script("broken") }], tools, options: { num_predict: FEW_TOKENS } }),
  ]);
  for (const format of ["json", form]) {
    cases.push([
      `form ${typeof format} ${how}`,
      async () => {
        const { content } = await ask(kind, stream, { messages: [{ role: "user", content: script("plain") }], format });
        assert.equal(typeof JSON.parse(content), "object");
      },
    ]);
  }
}
for (const kind of SCRIPTED) {
  cases.push([
    `prompts and models ${kind}`,
    async () => {
      const client = clients[kind];
      const { response, context } = await client.generate({ model: MODEL, prompt: script("plain"), system: "Be brief." });
      assert.equal(response, "Hello there, I am fine.");
      assert.ok(context.length > 0);
      const { models } = await client.list();
      assert.ok((await client.show({ model: models[0].name })).capabilities.includes("tools"));
      assert.equal((await client.ps()).models[0].name, models[0].name);
      assert.equal((await client.pull({ model: models[0].name })).status, "success");
    },
  ]);
}
suite("ollama", cases);
