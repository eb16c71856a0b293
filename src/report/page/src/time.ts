// The step put together from calls and bodies: when each call starts, what an op of it is, what is sent, and what is held.
// Lanes are put together when they are first drawn, so that a page of many lanes opens at once.

import type { Bytes, Kind, Lane, Op, Page } from "./data";

/** A lane's calls with their starts. */
export interface Played {
  lane: Lane;
  kind: Uint32Array;
  microbatch: Uint32Array;
  start: Float64Array;
  end: Float64Array;
}

/** A stretch of time in which something is sent to another stage. */
export interface Sent { call: number; from: number; to: number }

/** An op of a body. Seconds are from the body's start. */
export interface Placed { op: Op; number: number | null; from: number; to: number }

/** What is held from each moment on, by share. */
export interface Held { at: Float64Array; bytes: Float64Array[]; total: Float64Array }

export class Times {
  readonly end: number;
  private played: (Played | undefined)[];
  private sends: (Sent[] | undefined)[];
  private held: (Held | undefined)[];
  private bodies: (Placed[] | undefined)[];

  constructor(readonly page: Page) {
    this.played = new Array(page.lanes.length);
    this.sends = new Array(page.lanes.length);
    this.held = new Array(page.lanes.length);
    this.bodies = new Array(page.bodies.length);
    this.end = page.plan.step_s;
  }

  of(lane: number): Played {
    return (this.played[lane] ??= played(this.page.lanes[lane]));
  }

  /** What a lane's stages send, each of them in its own order. */
  sent(lane: number): Sent[] {
    return (this.sends[lane] ??= sent(this.page, this.of(lane)));
  }

  memory(lane: number): Held {
    return (this.held[lane] ??= held(this.of(lane)));
  }

  body(kind: Kind): Placed[] {
    return (this.bodies[kind.body] ??= body(this.page, kind.body));
  }

  /** The call that runs at a time, or else the one that is next; the number of calls past the last. */
  at(lane: number, time: number): number {
    const ends = this.of(lane).end;
    let low = 0, high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** A call in words, as the trace names it. */
  name(lane: number, call: number): string {
    const { kind, microbatch } = this.of(lane);
    const { phase, stage } = this.page.lanes[lane].kinds[kind[call]];
    const of = this.page.lanes[lane].stages.length > 1 && phase !== "finish" ? ` of stage${stage}` : "";
    return phase === "finish" ? "reduce and update" : `${phase} ${microbatch[call]}${of}`;
  }
}

/** An op's name with its number, as the model has it, and the ops that it is. */
export function opName({ op, number }: Placed, kind: Kind): string {
  const name = number === null ? op.name : op.name.replace("*", `${kind.first_number + number}`);
  return name === "" ? op.ops : `${name} (${op.ops})`;
}

function played(lane: Lane): Played {
  const n = lane.calls.length;
  const all = {
    lane, kind: new Uint32Array(n), microbatch: new Uint32Array(n), start: new Float64Array(n), end: new Float64Array(n),
  };
  let free = 0;
  lane.calls.forEach(([kind, microbatch, wait], i) => {
    all.kind[i] = kind;
    all.microbatch[i] = microbatch;
    all.start[i] = free + wait;
    all.end[i] = free = free + wait + lane.kinds[kind].seconds;
  });
  return all;
}

function sent(page: Page, { lane, kind, end }: Played): Sent[] {
  const all: Sent[] = [];
  // A link carries one transfer at a time in each direction.
  const free = new Map<string, number>();
  for (let i = 0; i < kind.length; i++) {
    const { stage, phase } = lane.kinds[kind[i]];
    const { transfer_forward_s, transfer_backward_s } = page.stages[stage];
    const seconds = phase === "forward" ? transfer_forward_s : phase === "backward" ? transfer_backward_s : 0;
    if (seconds === 0) continue;
    const key = `${phase}${stage}`;
    const from = Math.max(end[i], free.get(key) ?? 0);
    free.set(key, from + seconds);
    all.push({ call: i, from, to: from + seconds });
  }
  return all.sort((a, b) => a.from - b.from);
}

function held({ lane, kind, start, end }: Played): Held {
  let moments = 1;
  for (const k of kind) moments += lane.kinds[k].memory.length;
  const at = new Float64Array(moments), total = new Float64Array(moments);
  const bytes = lane.lasting.map(() => new Float64Array(moments));
  const now: Bytes = [...lane.lasting];
  let n = 0;
  const push = (time: number, change: Bytes | null) => {
    at[n] = time;
    for (let share = 0; share < now.length; share++) {
      bytes[share][n] = now[share] + (change ? change[share] : 0);
      total[n] += bytes[share][n];
    }
    n++;
  };
  push(0, null);
  for (let i = 0; i < kind.length; i++) {
    const { memory } = lane.kinds[kind[i]];
    for (const [part, change] of memory) push(start[i] + (end[i] - start[i]) * part, change);
    const last = memory[memory.length - 1]?.[1];
    if (last) for (let share = 0; share < now.length; share++) now[share] += last[share];
  }
  return { at, bytes, total };
}

function body(page: Page, number: number): Placed[] {
  const end = [0, 0];
  return page.bodies[number].map(([which, offset, gap]) => {
    const op = page.ops[which], track = op.sends ? 1 : 0;
    const from = end[track] + gap;
    end[track] = from + op.seconds;
    return { op, number: offset < 0 ? null : offset, from, to: end[track] };
  });
}
