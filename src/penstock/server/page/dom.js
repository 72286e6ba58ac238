// Preact with HTML-like templates, and what every component needs.

import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export { render } from "./vendor/preact.js";
export { useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./vendor/hooks.js";

export const html = htm.bind(h);

/** A file that the browser saves. */
export function download(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Copies a text, and says so on the button for a moment. */
export async function copy(text, button) {
  const label = button.textContent;
  const isCopied = await writeClipboard(text);
  button.textContent = isCopied ? "Copied" : "Copying is not allowed here";
  setTimeout(() => {
    button.textContent = label;
  }, 1500);
}

async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text); // navigator.clipboard is for HTTPS and this machine alone
  }
}

function copySelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}

/** A file, chosen by the user; null if none was chosen. */
export function chooseFile(accept) {
  return new Promise((resolve) => {
    const input = document.createElement("input");
    input.type = "file";
    input.accept = accept;
    input.onchange = () => resolve(input.files[0] ?? null);
    input.oncancel = () => resolve(null);
    input.click();
  });
}
