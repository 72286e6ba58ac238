// The numbers above the lanes: tokens per second, batch, KV pool, prefix cache, keys.

import { html } from "./dom.js";

export function Meters({ rates }) {
  const held = rates.value("kv_blocks", "held");
  const cached = rates.value("kv_blocks", "cached");
  const free = rates.value("kv_blocks", "free");
  const slots = (rates.latest?.max_num_seqs ?? 0) * (rates.latest?.engines.length ?? 1);
  const hits = rates.hitRate();
  const waiting = rates.value("waiting") + rates.value("fleet_queued");
  const drafted = rates.rate("drafted_tokens");
  return html`
    <section class="meters" aria-label="Now">
      <${Meter} label="Generated" value=${`${number(rates.rate("generation_tokens"))} tokens/s`}>
        <${Sparkline} values=${rates.series("generation_tokens")} />
      <//>
      <${Meter} label="Prompts" value=${`${number(rates.rate("prompt_tokens"))} tokens/s`}>
        <${Sparkline} values=${rates.series("prompt_tokens")} />
      <//>
      <${Meter} label="Batch" value=${`${rates.value("running")} of ${slots} sequences`}>
        <${Bar} parts=${[["decode", rates.value("running")], ["free", slots - rates.value("running")]]} />
        <p class="caption">${waiting} waiting · ${number(rates.rate("steps"))} steps/s${
          drafted > 0 ? ` · ${percent(rates.rate("accepted_tokens") / drafted)} of drafts accepted` : ""
        }</p>
      <//>
      <${Meter} label="KV blocks" value=${`${percent(held / (held + cached + free || 1))} held`}>
        <${Bar} parts=${[["decode", held], ["prompt", cached], ["free", free]]} />
        <p class="caption">${held} held · ${cached} cached · ${free} free · ${rates.value("preemptions")} preemptions</p>
      <//>
      <${Meter} label="Prefix cache" value=${hits === null ? "–" : `${percent(hits)} hits`}>
        <p class="caption">of the prompt tokens of the last minute</p>
      <//>
      <${Keys} keys=${rates.keys()} />
    </section>
  `;
}

function Meter({ label, value, children }) {
  return html`<div class="meter"><p class="label">${label}</p><p class="value">${value}</p>${children}</div>`;
}

function Keys({ keys }) {
  if (!keys.some(({ key }) => key)) return null; // without API keys all callers are one
  return html`<div class="meter"><p class="label">By API key</p>
    <table>
      <thead><tr><th scope="col">key</th><th scope="col">open</th><th scope="col">tokens/s</th></tr></thead>
      <tbody>${keys.map(
        (row) => html`<tr><td>${row.key}</td><td>${row.open}</td><td>${number(row.rate)}</td></tr>`,
      )}</tbody>
    </table>
  </div>`;
}

function Bar({ parts }) {
  const whole = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  return html`<div class="bar" aria-hidden="true">
    ${parts.map(([kind, size]) => html`<span class=${kind} style=${{ width: `${(100 * size) / whole}%` }}></span>`)}
  </div>`;
}

function Sparkline({ values }) {
  const most = Math.max(1, ...values);
  const points = values.map((value, index) => `${(index / Math.max(1, values.length - 1)) * 100},${30 - (28 * value) / most}`);
  return html`<svg class="sparkline" viewBox="0 0 100 30" preserveAspectRatio="none" aria-hidden="true">
    <polyline points=${points.join(" ")} />
  </svg>`;
}

const number = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toString());
const percent = (share) => `${Math.round(100 * share)} %`;
