// Draws lanes of requests over steps on a canvas.

import { segmentsOf, shortName } from "./timeline.js";

export const LANE = 22;
export const STEPS = 34;
const NAMES = 148;
const COLOURS = { queued: "--queued", prompt: "--prompt", decode: "--decode", preempted: "--preempted" };
export const KINDS = [
  ["queued", "queued"],
  ["prompt", "prompt chunk"],
  ["decode", "decode"],
  ["preempted", "preempted"],
];

/** Draws `lanes` in the seconds before `timeline.now`; `chosen` is the id of a lane to mark. */
export function drawLanes(canvas, timeline, lanes, seconds, chosen) {
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(name);
  const scale = devicePixelRatio;
  const width = canvas.clientWidth;
  const height = STEPS + Math.max(1, lanes.length) * LANE;
  canvas.style.height = `${height}px`;
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `12px ${style.fontFamily}`;
  context.textBaseline = "middle";
  const since = timeline.now - seconds;
  const x = (time) => NAMES + ((time - since) / seconds) * (width - NAMES);
  drawSteps(context, timeline.steps, since, x, colour);
  lanes.forEach((lane, index) => drawLane(context, lane, index, { x, since, timeline, colour, chosen, width }));
}

function drawSteps(context, steps, since, x, colour) {
  context.fillStyle = colour("--muted");
  context.fillText("tokens per step", 0, STEPS / 2);
  const shown = steps.filter((step) => step.ended >= since);
  const most = Math.max(1, ...shown.map((step) => step.tokens));
  context.fillStyle = colour("--accent");
  for (const { began, ended, tokens } of shown) {
    const height = Math.max(1, (tokens / most) * (STEPS - 8));
    const left = Math.max(NAMES, x(began));
    context.fillRect(left, STEPS - 4 - height, Math.max(1, x(ended) - left - 0.5), height);
  }
}

function drawLane(context, lane, index, { x, since, timeline, colour, chosen, width }) {
  const top = STEPS + index * LANE;
  if (lane.id === chosen) {
    context.fillStyle = colour("--marked");
    context.fillRect(0, top, width, LANE);
  }
  context.fillStyle = colour("--text");
  context.fillText(shortName(lane), 2, top + LANE / 2, NAMES - 8);
  for (const { kind, from, to } of segmentsOf(lane, timeline.now)) {
    if (to < since || !COLOURS[kind]) continue;
    const left = Math.max(NAMES, x(from));
    context.fillStyle = colour(COLOURS[kind]);
    context.fillRect(left, top + 4, Math.max(1, x(to) - left - (kind === "prompt" ? 0.5 : 0)), LANE - 8);
  }
  const reason = timeline.waitsFor(lane);
  if (!reason) return;
  context.fillStyle = colour("--text");
  context.textAlign = "end";
  context.fillText(`waits for ${reason}`, width - 6, top + LANE / 2);
  context.textAlign = "start";
}

/** The lane at a height on the canvas; undefined above them and below. */
export const laneAt = (lanes, y) => lanes[Math.floor((y - STEPS) / LANE)];
