// The open conversation, the history beside it, and the answer that streams: the actions of the chat.

import { streamAnswer } from "./answer.js";
import { addNode, apiMessages, chosenPath, newConversation, newNode, parentOf, titleOf } from "./conversation.js";
import { useEffect, useReducer, useRef, useState } from "./dom.js";
import { Listeners } from "./frames.js";
import { bodyOf } from "./settings.js";
import * as store from "./store.js";

export function useChat(settings, say) {
  const [conversation, setConversation] = useState(newConversation);
  const [history, setHistory] = useState([]);
  const [problem, setProblem] = useState(null);
  const [streaming, setStreaming] = useState(null);
  const [, changed] = useReducer((count) => count + 1, 0);
  const stream = useRef(null);
  const listeners = useRef(null);
  listeners.current ??= new Listeners();

  const attempt = async (work) => {
    try {
      setProblem(null);
      await work();
      setHistory(await store.allConversations());
    } catch (error) {
      setProblem(`History: ${error.message}`);
    }
  };
  useEffect(() => void attempt(async () => {}), []);

  const keep = () => {
    conversation.updated = Date.now();
    conversation.title = titleOf(conversation);
    return attempt(() => store.save(conversation));
  };

  const stop = () => stream.current?.abort();

  async function respond(parent) {
    const node = addNode(parent, newNode("assistant", { model: settings.model }));
    const controller = new AbortController();
    stream.current = controller;
    setStreaming(node);
    const body = { ...bodyOf(settings), messages: apiMessages(conversation, parent, settings.system) };
    const onChange = () => listeners.current.notify(node.id);
    keep();
    await streamAnswer(body, node, { signal: controller.signal, onChange });
    if (stream.current === controller) {
      stream.current = null;
      setStreaming(null);
    }
    if (node.error) say(`Error: ${node.error}`);
    await keep();
  }

  const open = (next) => {
    if (next.id === conversation.id) return; // the history's copy may be older
    stop();
    setConversation(next);
  };

  return {
    conversation,
    history,
    problem,
    streaming,
    listeners: listeners.current,
    stop,
    open,
    openNew: () => open(newConversation()),
    send(text, images) {
      const last = chosenPath(conversation).at(-1) ?? conversation.root;
      respond(addNode(last, newNode("user", { content: text, images })));
    },
    edit(node, text) {
      respond(addNode(parentOf(conversation, node), newNode("user", { content: text, images: node.images })));
    },
    regenerate: (node) => respond(parentOf(conversation, node)),
    sendResults(node, texts) {
      let last = node;
      texts.forEach((content, index) => {
        last = addNode(last, newNode("tool", { content, toolCallId: node.toolCalls[index].id }));
      });
      respond(last);
    },
    choose(parent, index) {
      parent.chosen = index;
      changed();
      keep();
    },
    remove(id) {
      if (id === conversation.id) open(newConversation());
      return attempt(() => store.remove(id));
    },
    removeAll() {
      open(newConversation());
      return attempt(store.removeAll);
    },
    importFile: (file) => attempt(async () => store.importHistory(await file.text())),
  };
}
