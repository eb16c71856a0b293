// The timeline: of every lane a track of calls, one of what its bodies compute, one of what they send, and one of transfers to other
// stages. A lane's background is the bubble.

import { useEffect, useRef, useState } from "preact/hooks";
import { Chart, Track } from "./chart";
import { colour, opColour, PHASES } from "./colours";
import { bytes, percent, ranges, seconds } from "./format";
import { opName, type Times } from "./time";
import { Tooltip, type Tip } from "./tooltip";
import type { View } from "./view";

export interface Selected { lane: number; call: number }

const AXIS = 22;
/** Ops that are drawn at most, beyond which only calls are. */
const MOST_OPS = 40000;
/** Lanes up to which ops have tracks from the start. */
const OPEN_LANES = 12;

export function Timeline({ times, view, selected, select }: {
  times: Times; view: View; selected: Selected | null; select: (selected: Selected | null) => void;
}) {
  const { page } = times;
  const [open, setOpen] = useState(page.lanes.length <= OPEN_LANES);
  const [tip, setTip] = useState<Tip | null>(null);
  const canvas = useRef<HTMLCanvasElement>(null), scroller = useRef<HTMLDivElement>(null);
  const chart = useRef<Chart | null>(null);
  const state = useRef({ open, selected });
  state.current = { open, selected };
  const row = open ? 54 : 20;
  const height = AXIS + page.lanes.length * row + 4;

  useEffect(() => {
    const made: Chart = new Chart(
      canvas.current!, view, () => gutter(made?.width ?? 0),
      () => draw(made, times, state.current.open, state.current.selected, scroller.current!.scrollTop),
      (x, y, event) => setTip(event && found(made, times, state.current.open, x, y + scroller.current!.scrollTop, event)),
      (x, y) => {
        const at = hit(made, times, state.current.open, x, y + scroller.current!.scrollTop);
        if (at) select({ lane: at.lane, call: at.call });
      },
    );
    chart.current = made;
    return () => made.stop();
  }, []);
  useEffect(() => chart.current?.resize(), [open, height]);
  useEffect(() => chart.current?.redraw(), [selected]);

  const choose = (lane: number, call: number) => {
    const { start, end } = times.of(lane);
    call = Math.max(0, Math.min(start.length - 1, call));
    select({ lane, call });
    if (start.length > 0) view.show(start[call], end[call]);
    const box = scroller.current!, top = lane * row;
    if (top < box.scrollTop) box.scrollTop = top;
    if (top + row + AXIS > box.scrollTop + box.clientHeight) box.scrollTop = top + row + AXIS - box.clientHeight;
  };
  const key = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { lane, call } = selected ?? { lane: 0, call: -1 };
    const at = selected && times.of(lane).start.length > 0 ? (times.of(lane).start[call] + times.of(lane).end[call]) / 2 : undefined;
    const actions: Record<string, () => void> = {
      ArrowRight: () => (event.shiftKey ? view.pan(view.span / 4) : choose(lane, call + 1)),
      ArrowLeft: () => (event.shiftKey ? view.pan(-view.span / 4) : choose(lane, call - 1)),
      ArrowDown: () => lane + 1 < page.lanes.length && choose(lane + 1, times.at(lane + 1, at ?? view.from)),
      ArrowUp: () => lane > 0 && choose(lane - 1, times.at(lane - 1, at ?? view.from)),
      Home: () => choose(lane, 0),
      End: () => choose(lane, times.of(lane).start.length - 1),
      "+": () => view.zoom(2, at),
      "=": () => view.zoom(2, at),
      "-": () => view.zoom(1 / 2, at),
      "0": () => view.all(),
      Enter: () => {
        if (!selected) return;
        const { start, end } = times.of(lane), margin = (end[call] - start[call]) / 20;
        view.set(start[call] - margin, end[call] + margin);
      },
      Escape: () => select(null),
    };
    const action = actions[event.key];
    if (action) {
      event.preventDefault();
      action();
    }
  };

  return (
    <div class="timeline">
      <div class="controls">
        <button type="button" onClick={() => view.zoom(2)} aria-label="Zoom in">+</button>
        <button type="button" onClick={() => view.zoom(1 / 2)} aria-label="Zoom out">{"\u2212"}</button>
        <button type="button" onClick={() => view.all()}>whole step</button>
        <button type="button" onClick={() => view.set(view.end - tail(times), view.end)}>its end</button>
        <label><input type="checkbox" checked={open} onChange={(e) => setOpen(e.currentTarget.checked)} /> ops and transfers</label>
        <span class="hint">Drag to pan; Ctrl and wheel, or + and {"\u2212"}, to zoom; arrows to go from call to call</span>
      </div>
      <div class="scroller" ref={scroller} style={{ height: `min(${height}px, 72vh)` }} tabIndex={0} role="application"
        aria-label="Timeline of the step. Arrow keys go from call to call and from lane to lane, plus and minus zoom, Enter zooms to the call, 0 shows the whole step."
        onKeyDown={key} onScroll={() => chart.current?.redraw()}>
        <div style={{ height: `${height}px` }}><canvas ref={canvas} class="over-time" /></div>
      </div>
      <p class="selected" role="status" aria-live="polite">{selected ? words(times, selected) : "Nothing is selected: choose a call."}</p>
      <Legend times={times} open={open} />
      <Tooltip tip={tip} />
    </div>
  );
}

/** From when on no lane starts a forward. */
function tail(times: Times): number {
  let last = 0;
  times.page.lanes.forEach((lane, l) => {
    const { kind, end } = times.of(l);
    for (let i = kind.length - 1; i >= 0; i--) {
      if (lane.kinds[kind[i]].phase === "forward") {
        last = Math.max(last, end[i]);
        break;
      }
    }
  });
  return Math.max(times.end - last, times.end / 50) * 1.1;
}

const gutter = (width: number) => (width < 600 ? 64 : 128);

function words(times: Times, { lane, call }: Selected): string {
  const { start, end, kind } = times.of(lane);
  if (call >= start.length) return `${times.page.lanes[lane].name} waits until the end of the step.`;
  const stage = times.page.lanes[lane].kinds[kind[call]].stage;
  return `stage${stage}, ${times.name(lane, call)}: ${seconds(end[call] - start[call])}, from ${seconds(start[call])} to ${seconds(end[call])} into the step`;
}

function Legend({ times, open }: { times: Times; open: boolean }) {
  const phases = new Set<string>(), whats = new Map<string, string>();
  for (const lane of times.page.lanes) for (const kind of lane.kinds) phases.add(kind.phase);
  for (const op of times.page.ops) {
    const variable = opColour(op.what);
    if (!whats.has(variable)) whats.set(variable, variable === "op-other" ? "other ops" : variable.slice(3).replace(/_/g, "-"));
  }
  const sends = times.page.stages.some((s) => s.transfer_forward_s > 0);
  return (
    <>
    <ul class="legend">
      <li>calls</li>
      {Object.entries(PHASES).filter(([phase]) => phases.has(phase)).map(([, p]) => (
        <li key={p.name}><i style={{ background: `var(--${p.colour})` }} />{p.name}</li>
      ))}
      <li><i class="bubble" />waiting (bubble)</li>
    </ul>
    {open && <ul class="legend">
      <li>within them</li>
      {[...whats].sort().map(([variable, name]) => <li key={name}><i style={{ background: `var(--${variable})` }} />{name}</li>)}
      {sends && <li><i style={{ background: "var(--transfer)" }} />transfer to another stage</li>}
    </ul>}
    </>
  );
}

interface Hit { lane: number; call: number; time: number; track: "calls" | "computes" | "sends" | "transfers" }

function hit(chart: Chart, times: Times, open: boolean, x: number, y: number): Hit | null {
  const row = open ? 54 : 20, lane = Math.floor((y - AXIS) / row);
  if (y < AXIS || lane < 0 || lane >= times.page.lanes.length) return null;
  const time = chart.time(Math.max(x, chart.gutter())), within = y - AXIS - lane * row;
  const track = !open || within < 22 ? "calls" : within < 33 ? "computes" : within < 44 ? "sends" : "transfers";
  return { lane, call: times.at(lane, time), time, track };
}

function found(chart: Chart, times: Times, open: boolean, x: number, y: number, event: PointerEvent): Tip | null {
  const at = hit(chart, times, open, x, y);
  if (!at) return null;
  const { page } = times, lane = page.lanes[at.lane], { start, end, kind } = times.of(at.lane);
  const tip = (lines: string[]): Tip => ({ x: event.clientX, y: event.clientY, lines });
  if (x < chart.gutter()) {
    return tip([`${lane.name}: devices ${ranges(lane.devices)}, which all do the same`, `works ${seconds(lane.busy_s)}, waits ${seconds(lane.bubble_s)} (${percent(lane.bubble_s / times.end)})`]);
  }
  const near = 2 / chart.scale;
  if (at.track === "transfers") {
    const sent = times.sent(at.lane).find((s) => s.from - near <= at.time && at.time <= s.to + near);
    if (sent) return tip([`${times.name(at.lane, sent.call)}: its result is sent`, `${seconds(sent.to - sent.from)}, from ${seconds(sent.from)}`]);
  }
  const runs = at.call < start.length && start[at.call] <= at.time + near;
  if (!runs) {
    const from = at.call === 0 ? 0 : end[at.call - 1], to = at.call < start.length ? start[at.call] : times.end;
    return tip([`${lane.name} waits`, `${seconds(to - from)}, from ${seconds(from)}`, at.call < start.length ? `for what ${times.name(at.lane, at.call)} reads` : "for the end of the step"]);
  }
  const call = lane.kinds[kind[at.call]], name = times.name(at.lane, at.call);
  if (at.track === "computes" || at.track === "sends") {
    const inside = at.time - start[at.call], sends = at.track === "sends";
    const op = times.body(call).find((o) => o.op.sends === sends && o.from - near <= inside && inside <= o.to + near);
    if (op) {
      const moved = op.op.sends ? `${bytes(op.op.bytes)} of each device` : `${bytes(op.op.bytes)} read and written`;
      return tip([opName(op, call), `${op.op.what}: ${seconds(op.op.seconds)}, ${moved}`, `in ${name}, ${seconds(op.from)} after its start`]);
    }
  }
  return tip([`stage${call.stage}: ${name}`, `${seconds(end[at.call] - start[at.call])}, from ${seconds(start[at.call])} to ${seconds(end[at.call])}`]);
}

function draw(chart: Chart, times: Times, open: boolean, selected: Selected | null, top: number) {
  const { context, view, width, height } = chart, { page } = times;
  const row = open ? 54 : 20, left = chart.gutter(), right = Math.floor(width) - 1;
  const first = Math.max(0, Math.floor(top / row)), last = Math.min(page.lanes.length, Math.ceil((top + height - AXIS) / row));
  context.save();
  chart.axis(AXIS);
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  let visible = 0;
  for (let lane = first; lane < last; lane++) {
    const { kind } = times.of(lane);
    for (let i = times.at(lane, view.from); i < kind.length && times.of(lane).start[i] < view.to && visible <= MOST_OPS; i++) {
      visible += page.bodies[page.lanes[lane].kinds[kind[i]].body].length;
    }
  }
  for (let lane = first; lane < last; lane++) {
    const y = AXIS + lane * row - top, facts = page.lanes[lane], { start, end, kind, microbatch } = times.of(lane);
    const tall = open ? 18 : 16;
    if (selected?.lane === lane) {
      context.fillStyle = colour("highlight");
      context.fillRect(0, y, width, row);
    }
    context.fillStyle = colour(`hue${lane % 8}`);
    context.fillRect(0, y + 2, 4, open ? row - 6 : tall);
    context.fillStyle = colour("ink");
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillText(fitted(context, width < 600 ? facts.stages.map((s) => `s${s}`).join(" ") : facts.name, left - 16), 10, y + 2 + tall / 2);
    if (open) {
      context.fillStyle = colour("muted");
      context.font = "11px system-ui, sans-serif";
      context.fillText(fitted(context, `${width < 600 ? "" : "devices "}${ranges(facts.devices)}`, left - 16), 10, y + 28);
    }
    context.fillStyle = colour("bubble");
    context.fillRect(left, y + 2, width - left, tall);
    context.font = "11px system-ui, sans-serif";
    const calls = new Track(context, y + 2, tall, left, right);
    const from = times.at(lane, view.from);
    for (let i = from; i < start.length && start[i] < view.to; i++) {
      const call = facts.kinds[kind[i]], style = PHASES[call.phase], [a, b] = [chart.x(start[i]), chart.x(end[i])];
      if (!calls.add(a, b, colour(style.colour))) continue;
      const [x, room] = [Math.max(a, left), Math.min(b, right) - Math.max(a, left)];
      if (room < 14) continue;
      const name = times.name(lane, i), short = call.phase === "finish" ? "update" : `${microbatch[i]}`;
      const text = context.measureText(name).width + 8 < room ? name : context.measureText(short).width + 4 < room ? short : "";
      context.fillStyle = colour(style.ink);
      if (text) context.fillText(text, text === name ? x + 4 : x + (room - context.measureText(text).width) / 2, y + 3 + tall / 2);
    }
    calls.flush();
    if (selected?.lane === lane && selected.call < start.length) {
      const [a, b] = [chart.x(start[selected.call]), chart.x(end[selected.call])];
      if (b >= left && a <= right) {
        context.strokeStyle = colour("ink");
        context.lineWidth = 2;
        context.strokeRect(Math.max(a, left) - 1, y + 1, Math.max(2, Math.min(b, right) - Math.max(a, left)) + 2, tall + 2);
      }
    }
    if (!open) continue;
    if (visible <= MOST_OPS) {
      const tracks = [false, true].map((sends) => new Track(context, y + (sends ? 33 : 23), 8, left, right));
      for (let i = from; i < start.length && start[i] < view.to; i++) {
        for (const op of times.body(facts.kinds[kind[i]])) {
          const [a, b] = [chart.x(start[i] + op.from), chart.x(start[i] + op.to)];
          if (b >= left && a <= right) tracks[op.op.sends ? 1 : 0].add(a, b, colour(opColour(op.op.what)));
        }
      }
      tracks.forEach((track) => track.flush());
    } else {
      context.fillStyle = colour("muted");
      context.fillText("zoom in to see ops", left + 6, y + 33);
    }
    const transfers = new Track(context, y + 44, 5, left, right), sent = times.sent(lane);
    for (const { from: a, to: b } of sent) if (b >= view.from && a <= view.to) transfers.add(chart.x(a), chart.x(b), colour("transfer"));
    transfers.flush();
  }
  context.restore();
}

function fitted(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let kept = text.length;
  while (kept > 1 && context.measureText(`${text.slice(0, kept)}\u2026`).width > width) kept--;
  return `${text.slice(0, kept)}\u2026`;
}
