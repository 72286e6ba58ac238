// The calls of tools in an answer, and the results that the user enters for them.

import { html, useState } from "./dom.js";

/** `results` are the nodes of results that follow, if there are any; `onResults` sends new ones, as texts. */
export function ToolCalls({ calls, results, isLast, onResults }) {
  const [texts, setTexts] = useState(calls.map(() => ""));
  const send = (event) => {
    event.preventDefault();
    onResults(calls.map((_, index) => texts[index] ?? ""));
  };
  return html`
    <form class="tool-calls" onSubmit=${send}>
      ${calls.map(
        (call, index) => html`
          <section key=${call.id} class="tool-call" aria-label=${`Call of ${call.function.name}`}>
            <p><span class="badge">tool</span> <code>${call.function.name}</code></p>
            <pre tabindex="0" role="region" aria-label="Arguments">${pretty(call.function.arguments)}</pre>
            ${isLast &&
            html`<label>Result
              <textarea rows="2" value=${texts[index] ?? ""} placeholder="what the tool returns"
                onInput=${(event) => setTexts(texts.with(index, event.target.value))}></textarea>
            </label>`}
            ${results[index] && html`<p class="caption">Result</p><pre tabindex="0" role="region" aria-label="Result">${
              pretty(results[index].content)
            }</pre>`}
          </section>
        `,
      )}
      ${isLast && html`<button type="submit">Send ${calls.length > 1 ? "results" : "result"}</button>`}
    </form>
  `;
}

/** JSON with line breaks; a text that is none, or not yet, as it is. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
