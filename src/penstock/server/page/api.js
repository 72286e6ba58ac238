// Calls to the server: its address, the API key, errors.

/** The server's root, also behind a proxy's prefix: this file is at page/HASH/api.js. */
const BASE = new URL("../../", import.meta.url);
const KEY = "penstock-api-key";

let askForKey = async () => null;

/** Sets the function that asks the user for an API key: (reason) => key, or null. */
export function setKeyPrompt(prompt) {
  askForKey = prompt;
}

export const url = (path) => new URL(path, BASE);

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The server's response; asks for an API key where it needs one. Throws ApiError with the server's message. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const response = await send(path, body, signal);
    if (response.ok) return response;
    const message = await messageOf(response);
    if (response.status !== 401) throw new ApiError(message, response.status);
    const key = await askForKey(message);
    if (!key) throw new ApiError(message, response.status);
    sessionStorage.setItem(KEY, key);
  }
}

async function send(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  try {
    return await fetch(url(path), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `The server answered with status ${response.status}.`;
  }
}
