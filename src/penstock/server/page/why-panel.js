// Why a request took as long as it did: /v1/requests/ID/why.

import { call } from "./api.js";
import { html, useEffect, useState } from "./dom.js";

export function WhyPanel({ id, onClose }) {
  const [account, setAccount] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    const controller = new AbortController();
    const load = async () => {
      try {
        const response = await call(`v1/requests/${encodeURIComponent(id)}/why`, { signal: controller.signal });
        setAccount((await response.json()).requests[0]);
      } catch (error) {
        if (error.name !== "AbortError") setProblem(error.message);
      }
    };
    load();
    const timer = setInterval(() => account?.state !== "ended" && load(), 1000);
    return () => {
      controller.abort();
      clearInterval(timer);
    };
  }, [id, account?.state]);
  return html`
    <section class="why" aria-labelledby="why-title">
      <div class="row">
        <h3 id="why-title">Why: <code>${id}</code></h3>
        <span class="space"></span>
        <button type="button" class="quiet" onClick=${onClose}>Close</button>
      </div>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${account && html`<${Account} account=${account} />`}
    </section>
  `;
}

function Account({ account }) {
  const facts = [
    account.state === "open" ? "open" : `ended: ${account.finish_reasons.join(", ")}`,
    `${account.prompt_tokens} prompt tokens`,
    account.seconds_to_first_token !== null && `first token after ${seconds(account.seconds_to_first_token)}`,
    account.seconds !== null && `${seconds(account.seconds)} in all`,
    account.tenant && `key ${account.tenant}`,
  ];
  return html`
    <p>${facts.filter(Boolean).join(" · ")}</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Events">
      <table>
        <thead><tr>
          <th scope="col">at</th><th scope="col">for</th><th scope="col">what</th><th scope="col">steps</th>
          <th scope="col">tokens</th><th scope="col">reason</th>
        </tr></thead>
        <tbody>
          ${account.events.map(
            (event) => html`<tr>
              <td>${seconds(event.at)}</td><td>${seconds(event.seconds)}</td><td>${event.what}</td><td>${event.steps}</td>
              <td>${event.what === "admitted" ? `${event.tokens} cached` : event.tokens}</td><td>${event.why}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
  `;
}

const seconds = (value) => (value < 1 ? `${(1000 * value).toFixed(1)} ms` : `${value.toFixed(2)} s`);
