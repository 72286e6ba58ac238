// The models that the server lists, and how far their loads are. The list is read again every second while someone
// waits for a model, or one is being loaded, and else now and then, if there are several.

import { call } from "./api.js";
import { html, useEffect, useReducer } from "./dom.js";

const SOON = 1000;
const LATER = 10_000;

let cards = [];
let problem = null;
let timer = null;
let watchers = 0;
const listeners = new Set();

/** The models' cards, and why they could not be listed. `isWatched`: a change is to be shown soon. */
export function useModels(isWatched = false) {
  const [, changed] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    listeners.add(changed);
    watchers += isWatched ? 1 : 0;
    if (isWatched || !cards.length) refresh();
    return () => {
      listeners.delete(changed);
      watchers -= isWatched ? 1 : 0;
    };
  }, [isWatched]);
  return { models: cards, problem };
}

async function refresh() {
  clearTimeout(timer);
  try {
    const listed = (await (await call("v1/models")).json()).data;
    const isSame = problem === null && JSON.stringify(listed) === JSON.stringify(cards);
    cards = listed;
    problem = null;
    if (!isSame) listeners.forEach((changed) => changed());
  } catch (error) {
    problem = error.message;
    listeners.forEach((changed) => changed());
    if (error.status === 401) return; // no key was given: no further dialog asks for one
  }
  clearTimeout(timer);
  const isSoon = watchers > 0 || cards.some((card) => loadOf(card));
  if (isSoon || isSeveral()) timer = setTimeout(whenVisible, isSoon ? SOON : LATER);
}

function whenVisible() {
  if (!document.hidden) refresh();
  else document.addEventListener("visibilitychange", refresh, { once: true });
}

/** Whether models are loaded when they are used: then their states are shown. */
const isSeveral = () =>
  cards.filter((card) => !card.parent).length > 1 || cards.some((card) => card.status && card.status.value !== "loaded");

const STAGES = {
  waiting: "waiting for its turn, or for memory",
  downloading: "downloading its files",
  starting: "starting the engine",
  "reading weights": "reading weights",
  preparing: "preparing the first step",
};

/** What a load is at, and its share if that is known; null if the model is not being loaded. */
function loadOf(card) {
  const { stage, progress } = card?.status ?? {};
  if (!stage) return null;
  return { stage: STAGES[stage] ?? stage, share: stage === "reading weights" ? progress : null };
}

const percent = (share) => `${Math.floor(share * 100)} %`;

export function ModelPicker({ models, chosen, onChoose }) {
  const option = (card) => html`<option value=${card.id}>${card.id}${card.parent ? "" : stateOf(card)}</option>`;
  const adapters = models.filter((model) => model.parent);
  return html`<label class="hidden" for="model">Model</label>
    <select id="model" value=${chosen} onChange=${(event) => onChoose(event.target.value)}>
      ${models.filter((model) => !model.parent).map(option)}
      ${adapters.length > 0 && html`<optgroup label="Adapters">${adapters.map(option)}</optgroup>`}
    </select>`;
}

function stateOf(card) {
  if (!isSeveral() || !card.status) return "";
  const load = loadOf(card);
  if (load) return ` · loading${load.share === null ? "" : ` ${percent(load.share)}`}`;
  if (card.status.value === "unloaded" && card.status.error) return " · failed";
  return ` · ${card.status.value}`;
}

/** What is to be known of a model before a question: that it will be loaded, is being loaded, or failed. */
export function ModelNote({ card }) {
  if (!card?.status || card.status.value === "loaded") return null;
  if (loadOf(card)) return html`<${LoadProgress} card=${card} />`;
  if (card.status.error) {
    return html`<p class="error" role="alert">
      ${card.id} could not be loaded: ${card.status.error} The next message tries again.
    </p>`;
  }
  return html`<p class="caption">It is loaded for the first message.</p>`;
}

/** The wait for an answer's first token: with the model's load, if there is one. */
export function Waiting({ model }) {
  const { models } = useModels(true);
  const card = models.find((one) => one.id === model);
  const base = models.find((one) => one.id === card?.parent) ?? card;
  if (loadOf(base)) return html`<${LoadProgress} card=${base} />`;
  return html`<p class="waiting"><span></span><span></span><span></span><span class="hidden">Waiting</span></p>`;
}

function LoadProgress({ card }) {
  const { stage, share } = loadOf(card);
  return html`<p class="load">
    <span role="status">Loading ${card.id}: ${stage}</span>
    <progress key=${share === null} value=${share ?? undefined} max="1" aria-label=${`Load of ${card.id}`}></progress>
    ${share !== null && html`<span aria-hidden="true">${percent(share)}</span>`}
  </p>`;
}
