// Where a message is written: Enter sends, Shift+Enter breaks the line, Escape stops the answer.

import { html, useRef, useState } from "./dom.js";
import { imageFiles, withImages } from "./images.js";

const PICTURE = html`<svg class="icon" viewBox="0 0 20 20" aria-hidden="true">
  <rect x="2" y="3" width="16" height="14" rx="2" /><path d="M2 14l5-5 5 5 2-2 4 4" /><circle cx="13" cy="7.5" r="1.3" />
</svg>`;

export function Composer({ inputRef, isBusy, takesImages, problem, onSend, onStop }) {
  const [text, setText] = useState("");
  const [images, setImages] = useState([]);
  const [imageProblem, setImageProblem] = useState(null);
  const picker = useRef(null);
  const isEmpty = !text.trim() && !images.length;

  const send = (event) => {
    event?.preventDefault();
    if (isBusy || isEmpty || problem) return;
    onSend(text.trim(), images);
    setText("");
    setImages([]);
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const add = async (files) => {
    setImageProblem(null);
    try {
      setImages(await withImages(images, files));
    } catch (error) {
      setImageProblem(error.message);
    }
  };
  const paste = (event) => {
    const files = takesImages ? imageFiles(event.clipboardData ?? event.dataTransfer) : [];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  };
  const message = problem ?? imageProblem;
  return html`
    <form class="composer" onSubmit=${send} onDrop=${paste} onDragOver=${(event) => takesImages && event.preventDefault()}>
      ${message && html`<p class="problem" role="alert">${message}</p>`}
      ${images.length > 0 &&
      html`<ul class="attached">
        ${images.map(
          (image, index) => html`<li key=${image}>
            <img src=${image} alt=${`Image ${index + 1}`} />
            <button type="button" class="quiet" aria-label=${`Remove image ${index + 1}`}
              onClick=${() => setImages(images.toSpliced(index, 1))}>×</button>
          </li>`,
        )}
      </ul>`}
      <div class="compose-row">
        ${takesImages &&
        html`<button type="button" class="quiet" aria-label="Attach images" onClick=${() => picker.current.click()}>${PICTURE}</button>
          <input ref=${picker} type="file" accept="image/*" multiple hidden
            onChange=${(event) => add([...event.target.files])} />`}
        <label class="hidden" for="message">Message</label>
        <textarea id="message" ref=${inputRef} rows="1" value=${text} placeholder="Ask something" onPaste=${paste}
          onKeyDown=${keys} onInput=${(event) => setText(event.target.value)} autocomplete="off"></textarea>
        ${isBusy
          ? html`<button type="button" class="stop" onClick=${onStop}>Stop</button>`
          : html`<button type="submit" disabled=${isEmpty || Boolean(problem)}>Send</button>`}
      </div>
    </form>
  `;
}
