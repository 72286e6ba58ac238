// Settings of requests: what each control sends, and where it is kept.

const KEPT = "penstock-settings";

/** Numbers of the API, in the order in which they are shown. */
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "0 takes the most likely token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, hint: "keep this share of probability" },
  { name: "top_k", label: "Top k", min: 0, step: 1, hint: "keep the k most likely tokens" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "relative to the most likely token" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, step: 0.01, hint: "1: none" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "longest answer" },
  { name: "seed", label: "Seed", step: 1, hint: "equal seeds give equal answers" },
];

export const FORMATS = [
  ["", "Text"],
  ["json_object", "Any JSON object"],
  ["json_schema", "JSON that obeys a schema"],
];

export const EFFORTS = ["", "none", "low", "medium", "high"];
export const TOOL_CHOICES = ["auto", "required", "none"];

const EMPTY = { model: "", system: "", numbers: {}, format: "", schema: "", tools: "", toolChoice: "auto", effort: "" };

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { answer: { type: "integer" }, certain: { type: "boolean" } },
  required: ["answer", "certain"],
  additionalProperties: false,
};

export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** The settings that this browser kept. */
export function loadSettings() {
  try {
    return { ...EMPTY, ...JSON.parse(localStorage.getItem(KEPT) ?? "{}") };
  } catch {
    return { ...EMPTY };
  }
}

export function keepSettings(settings) {
  try {
    localStorage.setItem(KEPT, JSON.stringify(settings));
  } catch {
    // full, or storage is forbidden: they last as long as the page
  }
}

/** What is wrong with a JSON field: null if nothing, also when it is empty. */
export function jsonProblem(text, kind) {
  if (!text.trim()) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return `Not JSON: ${error.message}`;
  }
  if (kind === "tools") return Array.isArray(value) ? null : "Tools are a JSON array of functions.";
  return value && typeof value === "object" && !Array.isArray(value) ? null : "A schema is a JSON object.";
}

/** What is wrong with the settings that would be sent; null if nothing. */
export function problemOf(settings) {
  if (settings.format === "json_schema") {
    if (!settings.schema.trim()) return "Enter a JSON schema in the settings, or choose another answer format.";
    const problem = jsonProblem(settings.schema, "schema");
    if (problem) return `JSON schema: ${problem}`;
  }
  const problem = jsonProblem(settings.tools, "tools");
  return problem && `Tools: ${problem}`;
}

/** The fields of a request's body. */
export function bodyOf(settings) {
  const body = {};
  if (settings.model) body.model = settings.model;
  for (const { name } of NUMBERS) {
    const text = settings.numbers[name];
    if (text !== undefined && text !== "") body[name] = Number(text);
  }
  if (settings.numbers.top_logprobs) {
    body.logprobs = true;
    body.top_logprobs = Number(settings.numbers.top_logprobs);
  }
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = JSON.parse(settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  if (settings.tools.trim()) {
    body.tools = JSON.parse(settings.tools);
    body.tool_choice = settings.toolChoice;
  }
  if (settings.effort) body.reasoning_effort = settings.effort;
  return body;
}
