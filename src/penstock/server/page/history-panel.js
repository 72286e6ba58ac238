// The list of conversations in this browser.

import { chooseFile, download, html } from "./dom.js";
import { exportHistory } from "./store.js";

export function HistoryPanel({ chat, onNew, onOpened }) {
  const open = (conversation) => {
    chat.open(conversation);
    onOpened();
  };
  const importFile = async () => {
    const file = await chooseFile("application/json,.json");
    if (file) chat.importFile(file);
  };
  const removeAll = () => {
    if (confirm("Delete all chats in this browser?")) chat.removeAll();
  };
  return html`
    <nav class="panel history" aria-label="Chats">
      <button type="button" onClick=${onNew}>New chat</button>
      <ul>
        ${chat.history.map(
          (one) => html`<li key=${one.id}>
            <button type="button" class="quiet title" aria-current=${one.id === chat.conversation.id ? "true" : undefined}
              onClick=${() => open(one)}>${one.title || "New chat"}</button>
            <button type="button" class="quiet" aria-label=${`Delete ${one.title}`} onClick=${() => chat.remove(one.id)}>×</button>
          </li>`,
        )}
      </ul>
      <div class="row">
        <button type="button" class="quiet" onClick=${importFile}>Import</button>
        <button type="button" class="quiet" disabled=${!chat.history.length}
          onClick=${async () => download("penstock-history.json", await exportHistory(), "application/json")}>Export</button>
        <button type="button" class="quiet" disabled=${!chat.history.length} onClick=${removeAll}>Delete all</button>
      </div>
    </nav>
  `;
}
