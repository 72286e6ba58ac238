// Asks for the API key, when the server needs one.

import { setKeyPrompt } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";

export function KeyDialog() {
  const dialog = useRef(null);
  const [asked, setAsked] = useState(null);
  const [key, setKey] = useState("");

  useEffect(() => {
    let pending = null; // several calls may be refused at once: one question for all
    setKeyPrompt((reason) => {
      pending ??= new Promise((answer) => setAsked({ reason, answer })).finally(() => {
        pending = null;
      });
      return pending;
    });
  }, []);
  useEffect(() => {
    if (asked) dialog.current.showModal();
  }, [asked]);

  const close = (answer) => {
    dialog.current.close();
    setKey("");
    setAsked(null);
    asked?.answer(answer);
  };
  const submit = (event) => {
    event.preventDefault();
    if (key.trim()) close(key.trim());
  };
  return html`
    <dialog ref=${dialog} aria-labelledby="key-title" onCancel=${(event) => { event.preventDefault(); close(null); }}>
      <form onSubmit=${submit}>
        <h2 id="key-title">This server needs an API key</h2>
        <p class="problem" role="status">${asked?.reason}</p>
        <label>API key
          <input type="password" value=${key} autocomplete="off" onInput=${(event) => setKey(event.target.value)} />
        </label>
        <p class="caption">It is kept in this tab until you close it.</p>
        <div class="row">
          <button type="submit" disabled=${!key.trim()}>Use this key</button>
          <button type="button" class="quiet" onClick=${() => close(null)}>Cancel</button>
        </div>
      </form>
    </dialog>
  `;
}
