// Requests as lanes, from the events of /debug/live: what each did in which steps. No page in here.

const KEPT_SECONDS = 60;
const MAX_REQUESTS = 500;
/** What lasts less, between two steps, is no segment. */
const MIN_SECONDS = 0.0005;

/** The lanes and steps of the last minute. Times are the server's monotonic seconds. */
export class Timeline {
  lanes = new Map();
  steps = [];
  now = 0;
  /** The head of the queue after the last step, and what it waits for; null if nothing waits. */
  blocked = null;

  /** Takes an event in. */
  add({ now, steps, requests }) {
    this.now = now;
    const first = (this.steps[0] ?? steps[0])?.began ?? now;
    for (const request of requests) this.#know(request, first);
    for (const step of steps) this.#step(step);
    const open = new Set(requests.filter(({ ended }) => ended === null).map((request) => request.request_id));
    for (const lane of this.lanes.values()) {
      if (lane.ended === null && !open.has(lane.id)) lane.ended = now; // it failed, and left no ending
      if (lane.ended !== null) this.#enter(lane.id, "ended", lane.ended);
    }
    this.#forget();
  }

  /** A request from before the `first` step that is known here may have been admitted in a step that is not. */
  #know(request, first) {
    const id = request.request_id;
    const lane = this.lanes.get(id) ?? {
      id,
      segments: [],
      state: request.first_token !== null && request.arrival < first ? "decode" : "queued",
      since: request.arrival,
    };
    this.lanes.set(id, lane);
    lane.key = request.tenant;
    lane.arrival = request.arrival;
    lane.ended = request.ended;
    lane.prompt = request.prompt_tokens;
    lane.generated = request.num_generated;
    lane.finish = request.finish_reasons.join(", ");
    lane.place = request.replicas.at(-1)?.[1] ?? null;
  }

  #step({ began, schedule, execute, update, replica, trace }) {
    const ended = began + schedule + execute + update;
    this.steps.push({ began, ended, replica, tokens: trace.num_tokens, sequences: trace.num_sequences });
    for (const id of trace.preempted) this.#enter(id, "preempted", began);
    for (const [id] of trace.admitted) this.#enter(id, "decode", began);
    for (const [id, tokens] of trace.chunks) {
      const lane = this.lanes.get(id);
      if (!lane) continue;
      this.#enter(id, "decode", began);
      lane.segments.push({ kind: "prompt", from: began, to: ended, tokens });
      lane.since = ended;
    }
    this.blocked = trace.blocked;
  }

  /** A lane's state changes: what it did since the last change becomes a segment. */
  #enter(id, state, at) {
    const lane = this.lanes.get(id);
    if (!lane) return;
    close(lane, at);
    lane.state = state;
    lane.since = Math.max(at, lane.since);
  }

  /** What a queued lane waits for: "slots", or the head of the queue before it; empty if it does not wait. */
  waitsFor(lane) {
    if (lane.ended !== null || lane.state !== "queued" || !this.blocked) return "";
    const [head, obstacle] = this.blocked;
    return lane.id === head ? obstacle : shortName({ id: head });
  }

  #forget() {
    const since = this.now - KEPT_SECONDS;
    const first = this.steps.findIndex((step) => step.ended >= since);
    this.steps.splice(0, first < 0 ? this.steps.length : first);
    for (const [id, lane] of this.lanes) {
      const isSurplus = this.lanes.size > MAX_REQUESTS;
      if (lane.ended !== null && (lane.ended < since || isSurplus)) this.lanes.delete(id);
      while (lane.segments.length && lane.segments[0].to < since) lane.segments.shift();
    }
  }

  /** Lanes with something in these seconds: open ones first, then by arrival, the newest first. */
  lanesSince(since) {
    const lanes = [...this.lanes.values()].filter((lane) => lane.ended === null || lane.ended >= since);
    const isEnded = (lane) => (lane.ended === null ? 0 : 1);
    return lanes.sort((one, other) => isEnded(one) - isEnded(other) || other.arrival - one.arrival);
  }
}

/** The end of a request's id, which tells it from the others, and its key. */
export function shortName({ id, key }) {
  const end = id.replace(/^\w+?-/, "").slice(0, 8);
  return key ? `${end} ${key}` : end;
}

/** What a lane did, with what it does now. */
export function segmentsOf(lane, now) {
  return lane.ended === null ? [...lane.segments, { kind: lane.state, from: lane.since, to: now }] : lane.segments;
}

function close(lane, at) {
  if (lane.state === "ended" || at - lane.since < MIN_SECONDS) return;
  lane.segments.push({ kind: lane.state, from: lane.since, to: at });
}
