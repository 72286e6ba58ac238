// The tab "Chat": history, messages, settings.

import { useChat } from "./chat-state.js";
import { Composer } from "./composer.js";
import { chosenPath } from "./conversation.js";
import { html, useEffect, useRef } from "./dom.js";
import { HistoryPanel } from "./history-panel.js";
import { Answer, Branches, Question } from "./message.js";
import { ModelNote } from "./models.js";
import { problemOf } from "./settings.js";
import { SettingsPanel } from "./settings-panel.js";

const EXAMPLES = ["What is 37 + 58?", "Sort these numbers: 9 2 7 4", "Explain a penstock in two sentences."];

export function Chat({ settings, onSettings, card, panels, onPanels, isHidden }) {
  const spoken = useRef(null);
  const input = useRef(null);
  const chat = useChat(settings, (text) => announce(spoken.current, text));
  const path = chosenPath(chat.conversation);
  const openNew = () => {
    chat.openNew();
    onPanels({ ...panels, history: panels.history && !isNarrow() });
    input.current?.focus();
  };
  useKeys({ onStop: chat.streaming && chat.stop, onNew: openNew });
  useEffect(() => input.current?.focus(), []);
  return html`
    <div class="chat" hidden=${isHidden}>
      ${panels.history &&
      html`<${HistoryPanel} chat=${chat} onNew=${openNew} onOpened=${() => isNarrow() && onPanels({ ...panels, history: false })} />`}
      <section class="talk" aria-label="Conversation">
        <${Scroller}>
          ${path.length === 0 && html`<${Welcome} card=${card} onExample=${(text) => chat.send(text, [])} />`}
          ${messages(chat, path, (text) => announce(spoken.current, text))}
        <//>
        <div ref=${spoken} class="hidden" aria-live="polite"></div>
        <${Composer} inputRef=${input} isBusy=${chat.streaming !== null} problem=${problemOf(settings) ?? chat.problem}
          takesImages=${card?.capabilities?.includes("vision") ?? false} onSend=${chat.send} onStop=${chat.stop} />
      </section>
      ${panels.settings &&
      html`<aside class="panel" aria-label="Settings"><${SettingsPanel} settings=${settings} onChange=${onSettings} /></aside>`}
    </div>
  `;
}

const isNarrow = () => matchMedia("(max-width: 50rem)").matches;

function messages(chat, path, say) {
  return path.map((node, index) => {
    const parent = path[index - 1] ?? chat.conversation.root;
    const isBusy = chat.streaming !== null;
    const branches = html`<${Branches} parent=${parent} onChoose=${(chosen) => chat.choose(parent, chosen)} />`;
    if (node.role === "user") {
      return html`<${Question} key=${node.id} node=${node} branches=${branches} isBusy=${isBusy}
        onEdit=${(text) => chat.edit(node, text)} />`;
    }
    if (node.role === "tool") return null; // shown with its call
    const results = [];
    for (let next = index + 1; path[next]?.role === "tool"; next += 1) results.push(path[next]);
    return html`<${Answer} key=${node.id} node=${node} results=${results} branches=${branches} isBusy=${isBusy}
      isStreaming=${chat.streaming === node} isLast=${index === path.length - 1} listeners=${chat.listeners} say=${say}
      onRegenerate=${() => chat.regenerate(node)} onResults=${(texts) => chat.sendResults(node, texts)} />`;
  });
}

function Welcome({ card, onExample }) {
  return html`<div class="welcome">
    <h2>${card ? html`Chat with <strong>${card.id}</strong>` : "Chat"}</h2>
    <${ModelNote} card=${card} />
    <p>What you write goes to this server alone. The history stays in this browser.</p>
    <div class="examples">
      ${EXAMPLES.map((text) => html`<button type="button" onClick=${() => onExample(text)}>${text}</button>`)}
    </div>
    <p class="keys"><kbd>Enter</kbd> sends, <kbd>Shift</kbd>+<kbd>Enter</kbd> breaks the line, <kbd>Esc</kbd> stops an
      answer, <kbd>Ctrl</kbd>+<kbd>K</kbd> begins a new chat.</p>
  </div>`;
}

/** Scrolls along with its content, unless the user has scrolled up. */
function Scroller({ children }) {
  const frame = useRef(null);
  const content = useRef(null);
  useEffect(() => {
    const { current } = frame;
    let follows = true;
    const toEnd = () => {
      if (follows) current.scrollTop = current.scrollHeight;
    };
    const observer = new ResizeObserver(toEnd);
    observer.observe(content.current);
    observer.observe(current);
    current.onscroll = () => {
      follows = current.scrollHeight - current.scrollTop - current.clientHeight < 40;
    };
    return () => observer.disconnect();
  }, []);
  return html`<div class="scroller" ref=${frame} tabindex="0" role="region" aria-label="Messages">
    <div ref=${content} class="messages">${children}</div>
  </div>`;
}

function useKeys({ onStop, onNew }) {
  useEffect(() => {
    const onKey = (event) => {
      if (event.key === "Escape" && onStop) onStop();
      if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        onNew();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });
}

/** Has a screen reader say a text; the region keeps the last few. */
function announce(region, text) {
  if (!region) return;
  const line = document.createElement("p");
  line.textContent = text;
  region.append(line);
  while (region.children.length > 5) region.firstChild.remove();
}
