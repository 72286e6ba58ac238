// The page: its head with tabs, model and theme, and the two tabs.

import { Chat } from "./chat.js";
import { html, render, useEffect, useState } from "./dom.js";
import { KeyDialog } from "./key-dialog.js";
import { Live } from "./live.js";
import { ModelPicker, useModels } from "./models.js";
import { keepSettings, loadSettings } from "./settings.js";

const TABS = [
  ["#chat", "Chat"],
  ["#live", "Live"],
];
const THEMES = { "": "Auto", light: "Light", dark: "Dark" };
const THEME = "penstock-theme";

function App() {
  const [tab, setTab] = useState(location.hash === "#live" ? "#live" : "#chat");
  const [settings, setSettings] = useState(loadSettings);
  const { models, problem } = useModels();
  const isWide = matchMedia("(min-width: 70rem)").matches;
  const [panels, setPanels] = useState({ history: isWide, settings: false });

  useEffect(() => {
    addEventListener("hashchange", () => setTab(location.hash === "#live" ? "#live" : "#chat"));
  }, []);
  useEffect(() => keepSettings(settings), [settings]);

  const card = models.find((model) => model.id === settings.model) ?? models[0];
  const toggle = (panel) => () => {
    const others = matchMedia("(max-width: 50rem)").matches ? { history: false, settings: false } : panels;
    setPanels({ ...others, [panel]: !panels[panel] });
  };
  const isChat = tab === "#chat";
  return html`
    <header>
      <h1>Penstock</h1>
      <nav class="tabs" aria-label="Tabs">
        ${TABS.map(([hash, name]) => html`<a href=${hash} aria-current=${tab === hash ? "page" : undefined}>${name}</a>`)}
      </nav>
      ${isChat &&
      html`<button type="button" class="quiet" aria-expanded=${panels.history} onClick=${toggle("history")}>History</button>`}
      <span class="space"></span>
      ${isChat &&
      html`<${ModelPicker} models=${models} chosen=${card?.id} onChoose=${(model) => setSettings({ ...settings, model })} />
        <button type="button" class="quiet" aria-expanded=${panels.settings} onClick=${toggle("settings")}>Settings</button>`}
      <${ThemePicker} />
    </header>
    <main>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      <${Chat} settings=${{ ...settings, model: card?.id ?? "" }} onSettings=${setSettings} card=${card} panels=${panels}
        onPanels=${setPanels} isHidden=${!isChat} />
      ${!isChat && html`<${Live} />`}
    </main>
    <${KeyDialog} />
  `;
}

function ThemePicker() {
  const [theme, setTheme] = useState(localStorage.getItem(THEME) ?? "");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
  }, [theme]);
  return html`<label class="hidden" for="theme">Colours</label>
    <select id="theme" value=${theme} onChange=${(event) => setTheme(event.target.value)}>
      ${Object.entries(THEMES).map(([value, name]) => html`<option value=${value}>${name}</option>`)}
    </select>`;
}

document.getElementById("app").replaceChildren();
render(html`<${App} />`, document.getElementById("app"));
