// An answer's tokens with their log-probabilities: shaded by probability, with the alternatives on hover.

import { html, useEffect, useRef, useState } from "./dom.js";

export function TokenView({ tokens, version }) {
  const list = useRef(null);
  const [shown, setShown] = useState(null);
  useEffect(() => appendTokens(list.current, tokens), [tokens, version, tokens.length]);
  const show = (element) => {
    const index = Number(element?.dataset.index ?? -1);
    if (index >= 0) setShown({ index, left: element.offsetLeft, top: element.offsetTop + element.offsetHeight });
  };
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") setShown(null);
    if (!step) return;
    event.preventDefault();
    const index = Math.min(Math.max((shown?.index ?? -1) + step, 0), tokens.length - 1);
    show(list.current.children[index]);
  };
  return html`
    <div class="tokens" onMouseLeave=${() => setShown(null)}>
      <div ref=${list} class="token-list" tabindex="0" role="group"
        aria-label="Tokens of the answer: left and right show their probabilities"
        onMouseOver=${(event) => show(event.target.closest("span"))} onKeyDown=${move}
        onBlur=${() => setShown(null)}></div>
      <div class="token-card" role="status" hidden=${!shown}
        style=${shown ? { left: `min(${shown.left}px, 100% - 18rem)`, top: `${shown.top}px` } : {}}>
        ${shown && html`<${TokenCard} token=${tokens[shown.index]} />`}
      </div>
    </div>
  `;
}

function TokenCard({ token }) {
  const rows = token.top_logprobs?.length ? token.top_logprobs : [token];
  const isListed = rows.some((row) => row.token === token.token);
  return html`
    <table>
      <caption>${quoted(token.token)}: ${percent(token.logprob)}, log ${token.logprob.toFixed(3)}</caption>
      <tbody>
        ${[...rows, ...(isListed ? [] : [token])].map(
          (row) => html`<tr class=${row.token === token.token ? "taken" : ""}>
            <th scope="row">${quoted(row.token)}</th>
            <td>${percent(row.logprob)}</td>
            <td><meter min="0" max="1" value=${Math.exp(row.logprob)} aria-hidden="true"></meter></td>
          </tr>`,
        )}
      </tbody>
    </table>
  `;
}

function appendTokens(list, tokens) {
  if (list.children.length > tokens.length) list.replaceChildren();
  const added = document.createDocumentFragment();
  for (let index = list.children.length; index < tokens.length; index += 1) {
    const span = document.createElement("span");
    span.textContent = tokens[index].token;
    span.dataset.index = index;
    span.className = `p${Math.min(4, Math.floor(Math.exp(tokens[index].logprob) * 5))}`;
    added.append(span);
  }
  list.append(added);
}

const quoted = (text) => JSON.stringify(text);
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
