// Rates and shares between the events of /debug/live.

const KEPT = 240; // a minute of events

const total = (values) => Object.values(values).reduce((sum, value) => sum + value, 0);

export class Rates {
  #events = [];
  /** Tokens by key, from the last event of each of its requests. */
  #requests = new Map();

  add(event) {
    this.#events.push(event);
    if (this.#events.length > KEPT) this.#events.shift();
    for (const request of event.requests) this.#count(request, event.now);
  }

  #count(request, now) {
    const known = this.#requests.get(request.request_id);
    const tokens = request.num_generated;
    const counts = known?.counts ?? [];
    counts.push([now, tokens - (known?.tokens ?? 0)]);
    while (counts.length && counts[0][0] < now - 10) counts.shift();
    this.#requests.set(request.request_id, { tokens, counts, key: request.tenant, isOpen: request.ended === null, now });
    for (const [id, one] of this.#requests) if (one.now < now - 10) this.#requests.delete(id);
  }

  get latest() {
    return this.#events.at(-1);
  }

  value(name, label = "") {
    return this.latest?.metrics[name]?.[label] ?? 0;
  }

  /** A counter's increase per second over the last `count` events. */
  rate(name, count = 8) {
    const [before, now] = [this.#events.at(-1 - count) ?? this.#events[0], this.latest];
    if (!now || now.now === before.now) return 0;
    return Math.max(0, total(now.metrics[name]) - total(before.metrics[name])) / (now.now - before.now);
  }

  /** A counter's increase per second between all events. */
  series(name) {
    return this.#events.slice(1).map((event, index) => {
      const before = this.#events[index];
      return Math.max(0, total(event.metrics[name]) - total(before.metrics[name])) / (event.now - before.now);
    });
  }

  /** Part of the prompt tokens that the prefix cache had, in the last minute; null if there were none. */
  hitRate() {
    const [first, last] = [this.#events[0], this.latest];
    if (!last) return null;
    const asked = total(last.metrics.prefix_queries) - total(first.metrics.prefix_queries);
    const hits = total(last.metrics.prefix_hits) - total(first.metrics.prefix_hits);
    return asked > 0 ? hits / asked : null;
  }

  /** Open requests and tokens per second of each key, over the last ten seconds. */
  keys() {
    const keys = new Map();
    const now = this.latest?.now ?? 0;
    const seconds = Math.max(1, Math.min(10, now - (this.#events[0]?.now ?? now)));
    for (const { counts, key, isOpen } of this.#requests.values()) {
      const row = keys.get(key) ?? { key, open: 0, rate: 0 };
      row.open += isOpen;
      for (const [time, tokens] of counts) if (time >= now - 10) row.rate += tokens / seconds;
      keys.set(key, row);
    }
    return [...keys.values()].sort((one, other) => other.rate - one.rate);
  }
}
