// Work at most once per animation frame, however often it is asked for.

/** Returns a function that has `work` run in the next frame; `work` may return milliseconds to leave it in peace. */
export function oncePerFrame(work) {
  let pending = 0;
  let restUntil = 0;
  const run = (now) => {
    if (now < restUntil) {
      pending = requestAnimationFrame(run);
      return;
    }
    pending = 0;
    restUntil = now + (work() || 0);
  };
  const request = () => {
    pending ||= requestAnimationFrame(run);
  };
  request.cancel = () => {
    cancelAnimationFrame(pending);
    pending = 0;
  };
  return request;
}

/** Listeners by name: a stream's answer reaches its message without rendering the whole page. */
export class Listeners {
  #byName = new Map();

  add(name, listener) {
    const listeners = this.#byName.get(name) ?? new Set();
    this.#byName.set(name, listeners.add(listener));
    return () => listeners.delete(listener);
  }

  notify(name) {
    this.#byName.get(name)?.forEach((listener) => listener());
  }
}
