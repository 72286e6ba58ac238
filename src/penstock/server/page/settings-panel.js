// The panel with the controls of requests.

import { html } from "./dom.js";
import { EFFORTS, EXAMPLE_SCHEMA, EXAMPLE_TOOLS, FORMATS, jsonProblem, NUMBERS, TOOL_CHOICES } from "./settings.js";

export function SettingsPanel({ settings, onChange }) {
  const set = (name) => (event) => onChange({ ...settings, [name]: event.target.value });
  const setNumber = (name) => (event) =>
    onChange({ ...settings, numbers: { ...settings.numbers, [name]: event.target.value } });
  return html`
    <form class="settings" onSubmit=${(event) => event.preventDefault()}>
      <label>System prompt
        <textarea rows="3" value=${settings.system} onInput=${set("system")}
          placeholder="How the model should answer"></textarea>
      </label>
      <fieldset class="numbers">
        <legend>Sampling</legend>
        ${NUMBERS.map(
          (number) => html`<${NumberField} key=${number.name} ...${number}
            value=${settings.numbers[number.name] ?? ""} onInput=${setNumber(number.name)} />`,
        )}
        <${NumberField} name="top_logprobs" label="Log-probabilities" min="0" max="20" step="1"
          hint="alternatives for each token" value=${settings.numbers.top_logprobs ?? ""}
          onInput=${setNumber("top_logprobs")} />
        <button type="button" class="quiet" onClick=${() => onChange({ ...settings, numbers: {} })}>
          Model's defaults
        </button>
      </fieldset>
      <label>Reasoning
        <select value=${settings.effort} onChange=${set("effort")}>
          ${EFFORTS.map((effort) => html`<option value=${effort}>${effort || "the model's default"}</option>`)}
        </select>
      </label>
      <label>Answer format
        <select value=${settings.format} onChange=${set("format")}>
          ${FORMATS.map(([value, label]) => html`<option value=${value}>${label}</option>`)}
        </select>
      </label>
      ${settings.format === "json_schema" &&
      html`<${JsonField} label="JSON schema" kind="schema" example=${EXAMPLE_SCHEMA} value=${settings.schema}
        onChange=${(schema) => onChange({ ...settings, schema })} />`}
      <${JsonField} label="Tools" kind="tools" example=${EXAMPLE_TOOLS} value=${settings.tools}
        onChange=${(tools) => onChange({ ...settings, tools })} />
      ${settings.tools.trim() &&
      html`<label>Tool choice
        <select value=${settings.toolChoice} onChange=${set("toolChoice")}>
          ${TOOL_CHOICES.map((choice) => html`<option value=${choice}>${choice}</option>`)}
        </select>
      </label>`}
    </form>
  `;
}

function NumberField({ name, label, hint, value, onInput, ...limits }) {
  return html`
    <label title=${hint}>${label}
      <input type="number" name=${name} inputmode="decimal" placeholder="default" aria-description=${hint}
        value=${value} onInput=${onInput} ...${limits} />
    </label>
  `;
}

/** A text area for JSON: says what is wrong as it is typed, formats, and has an example. */
function JsonField({ label, kind, example, value, onChange }) {
  const problem = jsonProblem(value, kind);
  const id = `json-${kind}`;
  const format = () => onChange(JSON.stringify(JSON.parse(value), null, 2));
  return html`
    <div class="json-field">
      <label for=${id}>${label}</label>
      <textarea id=${id} rows=${value ? 8 : 2} spellcheck="false" value=${value} aria-invalid=${problem ? "true" : "false"}
        aria-describedby=${`${id}-problem`} placeholder=${kind === "tools" ? "none" : "{ }"}
        onInput=${(event) => onChange(event.target.value)}></textarea>
      <p id=${`${id}-problem`} class="problem" role="status">${problem}</p>
      <div class="row">
        <button type="button" class="quiet" disabled=${!value.trim() || problem !== null} onClick=${format}>Format</button>
        <button type="button" class="quiet" onClick=${() => onChange(JSON.stringify(example, null, 2))}>Example</button>
        ${value && html`<button type="button" class="quiet" onClick=${() => onChange("")}>Clear</button>`}
      </div>
    </div>
  `;
}
