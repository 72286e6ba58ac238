// One streamed answer of /v1/chat/completions, written into its node.

import { ApiError, call } from "./api.js";
import { events } from "./sse.js";

/** Streams the answer to `body` into `node`; `onChange` is called for each event. */
export async function streamAnswer(body, node, { signal, onChange }) {
  const began = performance.now();
  const stats = { tokens: 0, seconds: 0, firstToken: null };
  node.stats = stats;
  try {
    const response = await call("v1/chat/completions", {
      body: { ...body, stream: true, stream_options: { include_usage: true } },
      signal,
    });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code);
      node.callId = chunk.id ?? node.callId;
      applyChunk(chunk, node, (performance.now() - began) / 1000);
      onChange();
    }
    node.finish ??= "abort";
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else node.error = error.message;
  }
  onChange();
}

function applyChunk(chunk, node, seconds) {
  const { stats } = node;
  if (chunk.usage) {
    stats.tokens = chunk.usage.completion_tokens;
    stats.promptTokens = chunk.usage.prompt_tokens;
    stats.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  if (delta.content || delta.reasoning_content || delta.tool_calls) {
    stats.firstToken ??= seconds;
    if (!chunk.usage) stats.tokens += choice.logprobs?.content?.length || 1;
  }
  stats.seconds = seconds;
  if (delta.content) node.content += delta.content;
  if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) addToolCall(node, call);
  if (choice.logprobs?.content) (node.logprobs ??= []).push(...choice.logprobs.content);
  if (choice.finish_reason) node.finish = choice.finish_reason;
}

function addToolCall(node, { index, id, function: called }) {
  const calls = (node.toolCalls ??= []);
  const call = (calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (id) call.id = id;
  call.function.name += called?.name ?? "";
  call.function.arguments += called?.arguments ?? "";
}

/** What is shown below an answer. */
export function summary({ stats, finish }) {
  if (!stats?.tokens) return finish === "stopped" ? "stopped" : "";
  const rate = stats.tokens > 1 ? (stats.tokens - 1) / (stats.seconds - stats.firstToken) : 0;
  const parts = [`${stats.tokens} tokens`];
  if (rate > 0 && Number.isFinite(rate)) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  if (stats.firstToken !== null) parts.push(`first after ${milliseconds(stats.firstToken)}`);
  if (stats.cachedTokens) parts.push(`${stats.cachedTokens} of ${stats.promptTokens} prompt tokens cached`);
  const endings = { stopped: "stopped", length: "ended at its limit of tokens", abort: "ended by the server" };
  if (endings[finish]) parts.push(endings[finish]);
  return parts.join(" · ");
}

const milliseconds = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`);
