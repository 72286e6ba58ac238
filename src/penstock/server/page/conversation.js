// A conversation as a tree: each edit and each regeneration is a branch beside the others.
//
//     user "2+2?" ─┬─ assistant "4"
//                  └─ assistant "It is 4."  <- chosen
//
// Nodes are plain objects, so that IndexedDB and JSON files can hold them.

export function newConversation() {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? fallbackId(), title: "", created: now, updated: now, root: newNode("root") };
}

// randomUUID exists in secure contexts alone, and a server in the local network is none.
function fallbackId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newNode(role, fields = {}) {
  return { id: fallbackId(), role, content: "", ...fields, children: [], chosen: 0 };
}

/** Adds a node and chooses it. */
export function addNode(parent, node) {
  parent.chosen = parent.children.push(node) - 1;
  return node;
}

/** The nodes on the chosen branch, below the root. */
export function chosenPath(conversation) {
  const path = [];
  for (let node = conversation.root.children[conversation.root.chosen]; node; node = node.children[node.chosen]) {
    path.push(node);
  }
  return path;
}

/** The parent of each node on the chosen branch. */
export function parentOf(conversation, node) {
  const path = [conversation.root, ...chosenPath(conversation)];
  return path[path.indexOf(node) - 1];
}

/** Messages of the API up to a node, which is not the last answer's own. */
export function apiMessages(conversation, node, system) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const one of chosenPath(conversation)) {
    const isEmpty = one.role === "assistant" && !one.content && !one.toolCalls?.length; // it failed, or was stopped
    if (!isEmpty) messages.push(apiMessage(one));
    if (one === node) break;
  }
  return messages;
}

function apiMessage(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.toolCallId, content: node.content };
  if (node.role === "user") return { role: "user", content: contentWithImages(node) };
  const message = { role: "assistant", content: node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.toolCalls?.length) message.tool_calls = node.toolCalls;
  return message;
}

function contentWithImages({ content, images }) {
  if (!images?.length) return content;
  const parts = images.map((image) => ({ type: "image_url", image_url: { url: image } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** The title of a conversation: its first question's first line. */
export function titleOf(conversation) {
  const first = chosenPath(conversation).find((node) => node.role === "user");
  return first?.content.trim().split("\n")[0].slice(0, 80) || "New chat";
}

const ROLES = new Set(["root", "user", "assistant", "tool"]);

/** Whether a value from a file is a conversation. */
export function isConversation(value) {
  return typeof value?.id === "string" && Number.isFinite(value.updated) && isNode(value.root, 0);
}

function isNode(node, depth) {
  return (
    depth < 2000 &&
    ROLES.has(node?.role) &&
    typeof node.id === "string" &&
    typeof node.content === "string" &&
    Number.isInteger(node.chosen) &&
    Array.isArray(node.children) &&
    (node.images ?? []).every((image) => typeof image === "string" && image.startsWith("data:image/")) &&
    (node.toolCalls ?? []).every((call) => typeof call?.function?.name === "string") &&
    node.children.every((child) => isNode(child, depth + 1))
  );
}
