// What the suites in JavaScript share: the servers, the tools, and what the script models say (scripts.py).

import assert from "node:assert/strict";
import { describe, test } from "node:test";

export const SERVERS = JSON.parse(process.env.PENSTOCK_SERVERS);
export const KEY = process.env.PENSTOCK_KEY;
export const MODEL = "penstock";
export const SCRIPTED = Object.keys(SERVERS).filter((kind) => kind !== "smollm2");
export const QUIET = SCRIPTED.filter((kind) => kind !== "harmony"); // models whose reasoning can be turned off

export const ANSWER = "The answer is 42.";
export const CALLED = ["lookup", "add"]; // the tools that the script "loop" calls
export const FEW_TOKENS = 40; // they break off a call of the script "broken", and reasoning of the script "thinking"
export const MOST_TURNS = 6;

export const script = (name) => `SCRIPT=${name}. Do what it takes.`;

export const DESCRIPTIONS = { lookup: "Look something up.", add: "Add two numbers." };
const FIELDS = { lookup: { query: { type: "string" } }, add: { a: { type: "integer" }, b: { type: "integer" } } };
export const SCHEMAS = Object.fromEntries(
  Object.entries(FIELDS).map(([name, properties]) => [
    name,
    { type: "object", properties, required: Object.keys(properties), additionalProperties: false },
  ]),
);

export const FUNCTIONS = {
  lookup: ({ query }) => {
    if (query === "nothing") throw new Error("nothing is known about it");
    return `${query}: 40`;
  },
  add: ({ a, b }) => String(a + b),
};

// What a tool returns, and whether it failed; never an exception.
export function runTool(name, given) {
  try {
    return [FUNCTIONS[name](typeof given === "string" ? JSON.parse(given) : given), false];
  } catch (error) {
    return [String(error), true];
  }
}

// One suite, whose cases are `[name, function]`.
export function suite(name, cases) {
  describe(name, () => {
    for (const [title, run] of cases) test(title, { timeout: 120_000 }, run);
  });
}

// All combinations of the values of some lists.
export const product = (...lists) => lists.reduce((made, list) => made.flatMap((one) => list.map((item) => [...one, item])), [[]]);

export { assert };
