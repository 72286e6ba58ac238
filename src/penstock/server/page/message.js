// One message of the chat: a question that can be edited, or an answer as it streams.

import { summary } from "./answer.js";
import { copy, html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "./dom.js";
import { oncePerFrame } from "./frames.js";
import { MarkdownView } from "./markdown.js";
import { Waiting } from "./models.js";
import { TokenView } from "./token-view.js";
import { ToolCalls } from "./tool-calls.js";

export function Question({ node, branches, isBusy, onEdit }) {
  const [draft, setDraft] = useState(null);
  const save = (event) => {
    event.preventDefault();
    onEdit(draft);
    setDraft(null);
  };
  const keys = (event) => {
    if (event.key === "Escape") setDraft(null);
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
  };
  if (draft !== null) {
    return html`<article class="question editing" aria-label="Your message">
      <form onSubmit=${save}>
        <label class="hidden" for=${`edit-${node.id}`}>Edit the message</label>
        <textarea id=${`edit-${node.id}`} value=${draft} rows="3" onKeyDown=${keys}
          ref=${(element) => element?.dataset.focused ?? focusOnce(element)}
          onInput=${(event) => setDraft(event.target.value)}></textarea>
        <div class="row">
          <button type="submit" disabled=${!draft.trim()}>Send as a new branch</button>
          <button type="button" class="quiet" onClick=${() => setDraft(null)}>Cancel</button>
        </div>
      </form>
    </article>`;
  }
  return html`<article class="question" aria-label="Your message">
    <div class="bubble">
      ${node.images?.map((image) => html`<img src=${image} alt="Attached by you" />`)}
      ${node.content && html`<div class="plain">${node.content}</div>`}
    </div>
    <div class="actions">
      ${branches}
      <button type="button" class="quiet" disabled=${isBusy} onClick=${() => setDraft(node.content)}>Edit</button>
      <${CopyButton} text=${() => node.content} />
    </div>
  </article>`;
}

function focusOnce(element) {
  if (!element) return;
  element.dataset.focused = "";
  element.focus();
}

export function Answer({ node, results, branches, isBusy, isStreaming, isLast, listeners, onRegenerate, onResults, say }) {
  const [showTokens, setShowTokens] = useState(false);
  const { body, reasoning, stats, version } = useGrowingAnswer({ node, isStreaming, showTokens, listeners, say });
  const isWaiting = isStreaming && !node.content && !node.reasoning && !node.toolCalls;
  return html`<article class="answer" aria-label="Answer" aria-busy=${isStreaming ? "true" : "false"}>
    ${node.reasoning &&
    html`<details class="reasoning"><summary>Reasoning</summary><div class="plain" ref=${reasoning}></div></details>`}
    ${isWaiting && html`<${Waiting} model=${node.model} />`}
    <div ref=${body} class="markdown" hidden=${showTokens}></div>
    ${showTokens && node.logprobs && html`<${TokenView} tokens=${node.logprobs} version=${version} />`}
    ${node.toolCalls?.length > 0 &&
    html`<${ToolCalls} key=${node.toolCalls.length} calls=${node.toolCalls} results=${results}
      isLast=${isLast && !isBusy} onResults=${onResults} />`}
    ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
    <div class="actions">
      ${branches}
      <button type="button" class="quiet" disabled=${isBusy} onClick=${onRegenerate}>
        ${node.error ? "Try again" : "Regenerate"}
      </button>
      <${CopyButton} text=${() => node.content} />
      ${node.logprobs &&
      html`<button type="button" class="quiet" aria-pressed=${showTokens ? "true" : "false"}
        onClick=${() => setShowTokens(!showTokens)}>Tokens</button>`}
      <span class="stats" ref=${stats}></span>
    </div>
  </article>`;
}

// Writes a node into the elements of the returned references, at most once per frame while it streams. `listeners`
// notify of each change of the node, so that the page is not rendered with it; the answer itself is rendered again only
// when it gets a part that it did not have.
function useGrowingAnswer({ node, isStreaming, showTokens, listeners, say }) {
  const [version, changed] = useReducer((count) => count + 1, 0);
  const [body, reasoning, stats] = [useRef(null), useRef(null), useRef(null)];
  const view = useRef(null);
  const parts = useRef("");

  const update = (isDone) => {
    const now = [node.content, node.reasoning, node.logprobs, node.error].map(Boolean).join();
    if (now !== parts.current || node.toolCalls || (showTokens && node.logprobs)) {
      parts.current = now;
      changed();
    }
    if (reasoning.current) growText(reasoning.current, node.reasoning ?? "");
    if (stats.current) stats.current.textContent = isDone ? summary(node) : progress(node);
    return view.current.update(node.content, isDone);
  };
  useLayoutEffect(() => {
    view.current ??= new MarkdownView(body.current, (text) => isStreaming && say(text));
    update(!isStreaming);
    if (!isStreaming) return undefined;
    const request = oncePerFrame(() => update(false));
    const stop = listeners.add(node.id, request);
    return () => {
      stop();
      request.cancel();
    };
  }, [node, isStreaming, showTokens]);
  useEffect(() => {
    if (reasoning.current) growText(reasoning.current, node.reasoning ?? "");
  });
  return { body, reasoning, stats, version };
}

function progress({ stats }) {
  return stats?.tokens ? `${stats.tokens} tokens` : "";
}

function growText(element, text) {
  element.firstChild ?? element.append("");
  const shown = element.firstChild.data;
  if (text.startsWith(shown)) element.firstChild.appendData(text.slice(shown.length));
  else element.firstChild.data = text;
}

function CopyButton({ text }) {
  return html`<button type="button" class="quiet" onClick=${(event) => copy(text(), event.currentTarget)}>Copy</button>`;
}

/** Arrows between the branches of a message: 2/3. */
export function Branches({ parent, onChoose }) {
  const { chosen, children } = parent;
  if (children.length < 2) return null;
  const to = (index) => () => onChoose(index);
  return html`<span class="branches" role="group" aria-label="Branches">
    <button type="button" class="quiet" aria-label="Previous branch" disabled=${chosen === 0} onClick=${to(chosen - 1)}>‹</button>
    <span>${chosen + 1}/${children.length}</span>
    <button type="button" class="quiet" aria-label="Next branch" disabled=${chosen === children.length - 1}
      onClick=${to(chosen + 1)}>›</button>
  </span>`;
}
