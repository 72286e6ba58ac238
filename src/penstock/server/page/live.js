// The tab "Live": what the engine does, from the events of /debug/live.

import { call } from "./api.js";
import { download, html, useEffect, useReducer, useRef, useState } from "./dom.js";
import { oncePerFrame } from "./frames.js";
import { drawLanes, KINDS, laneAt } from "./lanes.js";
import { Meters } from "./meters.js";
import { Rates } from "./rates.js";
import { events } from "./sse.js";
import { shortName, Timeline } from "./timeline.js";
import { WhyPanel } from "./why-panel.js";

const WINDOWS = [5, 15, 60];
const MAX_LANES = 60;
const RETRY_SECONDS = 2;

export function Live() {
  const [isPaused, setIsPaused] = useState(false);
  const [seconds, setSeconds] = useState(15);
  const [problem, setProblem] = useState(null);
  const [chosen, setChosen] = useState(null);
  const { timeline, rates } = useFeed(isPaused, setProblem);
  const found = timeline.lanesSince(timeline.now - seconds);
  const lanes = found.slice(0, MAX_LANES);
  return html`
    <div class="live">
      <h2 class="hidden">Live</h2>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      <${Meters} rates=${rates} />
      <section class="lanes" aria-labelledby="lanes-title">
        <div class="row">
          <h3 id="lanes-title">Requests over steps</h3>
          <ul class="legend" aria-label="Colours">
            ${KINDS.map(([kind, name]) => html`<li><span class=${`swatch ${kind}`}></span>${name}</li>`)}
          </ul>
          <span class="space"></span>
          <label>Seconds
            <select value=${seconds} onChange=${(event) => setSeconds(Number(event.target.value))}>
              ${WINDOWS.map((value) => html`<option value=${value}>${value}</option>`)}
            </select>
          </label>
          <button type="button" class="quiet" aria-pressed=${isPaused ? "true" : "false"}
            onClick=${() => setIsPaused(!isPaused)}>Pause</button>
          <button type="button" class="quiet" onClick=${() => exportTrace(setProblem)}>Trace for Perfetto</button>
        </div>
        <${Lanes} timeline=${timeline} lanes=${lanes} seconds=${seconds} chosen=${chosen} onChoose=${setChosen} />
        ${found.length === 0 && html`<p class="caption">No request in the last ${seconds} seconds.</p>`}
        ${found.length > MAX_LANES && html`<p class="caption">${found.length - MAX_LANES} more are not shown.</p>`}
      </section>
      <${RequestTable} timeline=${timeline} lanes=${lanes} chosen=${chosen} onChoose=${setChosen} />
      ${chosen && html`<${WhyPanel} key=${chosen} id=${chosen} onClose=${() => setChosen(null)} />`}
    </div>
  `;
}

/** The events of the server as lanes and rates; renders with each event, unless it is paused. */
function useFeed(isPaused, onProblem) {
  const feed = useRef(null);
  feed.current ??= { timeline: new Timeline(), rates: new Rates() };
  const [, changed] = useReducer((count) => count + 1, 0);
  const paused = useRef(false);
  paused.current = isPaused;
  useEffect(() => {
    const controller = new AbortController();
    const redraw = oncePerFrame(() => void (paused.current || changed()));
    follow(controller.signal, onProblem, (event) => {
      feed.current.timeline.add(event);
      feed.current.rates.add(event);
      redraw();
    });
    return () => {
      controller.abort();
      redraw.cancel();
    };
  }, []);
  return feed.current;
}

function Lanes({ timeline, lanes, seconds, chosen, onChoose }) {
  const canvas = useRef(null);
  useEffect(() => drawLanes(canvas.current, timeline, lanes, seconds, chosen));
  return html`<div class="lanes-frame" tabindex="0" role="region" aria-label="Lanes">
    <canvas ref=${canvas} aria-hidden="true"
      onClick=${(event) => onChoose(laneAt(lanes, event.offsetY)?.id ?? null)}></canvas>
  </div>`;
}

/** Reads events until `signal` aborts, and connects again if the server ends them. */
async function follow(signal, onProblem, onEvent) {
  while (!signal.aborted) {
    try {
      const response = await call("debug/live", { signal });
      onProblem(null);
      for await (const data of events(response)) onEvent(JSON.parse(data));
    } catch (error) {
      if (error.name === "AbortError") return;
      onProblem(error.message);
      if (error.status >= 400 && error.status < 500) return; // the same would be refused again
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_SECONDS * 1000));
  }
}

async function exportTrace(onProblem) {
  try {
    const response = await call("debug/timeline?seconds=60");
    download("penstock-trace.json", await response.text(), "application/json");
  } catch (error) {
    onProblem(error.message);
  }
}

/** The lanes as a table: for the keyboard and for screen readers. */
function RequestTable({ timeline, lanes, chosen, onChoose }) {
  const state = (lane) => {
    const reason = timeline.waitsFor(lane);
    if (lane.ended !== null) return `ended: ${lane.finish || "error"}`;
    return reason ? `${lane.state}: waits for ${reason}` : lane.state;
  };
  return html`
    <details class="requests">
      <summary>Requests as a table (${lanes.length})</summary>
      <table>
        <thead><tr>
          <th scope="col">request</th><th scope="col">key</th><th scope="col">state</th>
          <th scope="col">prompt tokens</th><th scope="col">generated</th>
        </tr></thead>
        <tbody>
          ${lanes.map(
            (lane) => html`<tr key=${lane.id}>
              <td><button type="button" class="quiet" aria-pressed=${lane.id === chosen ? "true" : "false"}
                onClick=${() => onChoose(lane.id)}>${shortName({ id: lane.id })}</button></td>
              <td>${lane.key || "–"}</td><td>${state(lane)}</td><td>${lane.prompt}</td><td>${lane.generated}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </details>
  `;
}
