// The history in this browser: conversations in IndexedDB, at most 200; nothing is sent to the server.

import { isConversation } from "./conversation.js";

const MAX_CONVERSATIONS = 200;
const STORE = "conversations";

let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("penstock", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function transact(mode, work) {
  const store = (await database()).transaction(STORE, mode).objectStore(STORE);
  const request = work(store);
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** All conversations, the newest first. */
export async function allConversations() {
  const found = await transact("readonly", (store) => store.getAll());
  return found.sort((one, other) => other.updated - one.updated);
}

/** Keeps a conversation, without log-probabilities, which would be most of it. */
export async function save(conversation) {
  const kept = { ...conversation, root: withoutLogprobs(conversation.root) };
  await transact("readwrite", (store) => store.put(kept));
  if ((await transact("readonly", (store) => store.count())) <= MAX_CONVERSATIONS) return;
  const surplus = (await allConversations()).slice(MAX_CONVERSATIONS);
  for (const { id } of surplus) await remove(id);
}

export const remove = (id) => transact("readwrite", (store) => store.delete(id));

export const removeAll = () => transact("readwrite", (store) => store.clear());

function withoutLogprobs(node) {
  const { logprobs, ...kept } = node;
  return { ...kept, children: node.children.map(withoutLogprobs) };
}

/** The history as the text of a file. */
export async function exportHistory() {
  return JSON.stringify({ format: "penstock-history", version: 1, conversations: await allConversations() }, null, 1);
}

/** Adds the conversations of such a file; their number. Throws an Error that says what is wrong. */
export async function importHistory(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== "penstock-history" || !Array.isArray(file.conversations)) {
    throw new Error("The file is no history that this page has exported.");
  }
  if (!file.conversations.every(isConversation)) throw new Error("The file holds a conversation that is damaged.");
  for (const conversation of file.conversations) await save(conversation);
  return file.conversations.length;
}
