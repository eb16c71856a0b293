// What the devices of one lane hold over the step, on the timeline's axis, and what those of each lane hold at their peak.

import { useEffect, useRef, useState } from "preact/hooks";
import { Chart } from "./chart";
import { colour, laneVariable, SHARES } from "./colours";
import { bytes, percent, seconds } from "./format";
import type { Times } from "./time";
import { Tooltip, type Tip } from "./tooltip";
import type { View } from "./view";

const AXIS = 22;
const HEIGHT = 220;
/** Where less than this part of a device is used, the drawing is of what is held, and the limit is off it. */
const LITTLE = 0.2;

/** Bytes up to which memory is drawn. */
const room = (limit: number, peak: number) => (peak < limit * LITTLE ? peak * 1.25 : Math.max(limit, peak) * 1.04);

export function Memory({ times, view, lane, setLane }: { times: Times; view: View; lane: number; setLane: (lane: number) => void }) {
  const { page } = times, facts = page.lanes[lane];
  const [tip, setTip] = useState<Tip | null>(null);
  const canvas = useRef<HTMLCanvasElement>(null), chart = useRef<Chart | null>(null), shown = useRef(lane);
  shown.current = lane;
  useEffect(() => {
    const made: Chart = new Chart(
      canvas.current!, view, () => ((made?.width ?? 0) < 600 ? 64 : 128),
      () => draw(made, times, shown.current),
      (x, _, event) => setTip(event && x >= made.gutter() ? held(made.time(x), times, shown.current, event) : null),
      () => {},
    );
    chart.current = made;
    return () => made.stop();
  }, []);
  useEffect(() => chart.current?.redraw(), [lane]);
  const peak = Math.max(...page.lanes.map((l) => l.peak_bytes)), limit = Math.max(...page.lanes.map((l) => l.limit_bytes));
  const little = peak < limit * LITTLE, most = little ? peak : Math.max(limit, peak);
  return (
    <div class="memory">
      <div class="controls">
        <label>Devices of <select value={lane} onChange={(e) => setLane(Number(e.currentTarget.value))} aria-label="Lane whose memory is shown">
          {page.lanes.map((l, i) => <option key={i} value={i}>{l.name}</option>)}
        </select></label>
        <span>peak {bytes(facts.peak_bytes)} of {bytes(facts.limit_bytes)} ({percent(facts.peak_bytes / Math.max(1, facts.limit_bytes))})</span>
      </div>
      <canvas ref={canvas} class="over-time" style={{ height: `${HEIGHT}px` }} role="img"
        aria-label={`Memory of a device of ${facts.name} over the step: at most ${bytes(facts.peak_bytes)} of ${bytes(facts.limit_bytes)}. The table below says it in figures.`} />
      <ul class="legend">
        {SHARES.map((share) => <li key={share.name}><i style={{ background: `var(--${share.colour})` }} />{share.name}</li>)}
        {facts.peak_bytes >= facts.limit_bytes * LITTLE ? <li><i class="limit" />what a device has</li> : <li>a device has {bytes(facts.limit_bytes)}, far above</li>}
      </ul>
      <div class="scroll">
        <table class="peaks">
          <caption>At the peak, on each device</caption>
          <thead><tr><th scope="col">stage</th><th scope="col" class="wide">{little ? "beside the fullest" : "of what the largest device has"}</th>
            {["parameters", "gradients", "optimizer state", "activations", "in all", "of the device"].map((h) => <th key={h} scope="col" class="number">{h}</th>)}</tr></thead>
          <tbody>
            {page.lanes.map((l, i) => {
              const s = page.stages[l.stages[0]];
              const parts = [s.parameters_bytes, s.gradients_bytes, s.optimizer_bytes, s.activations_bytes];
              return (
                <tr key={i} class={i === lane ? "chosen" : ""}>
                  <th scope="row"><button type="button" class="link" onClick={() => setLane(i)}><i class="chip" style={{ background: laneVariable(i) }} />{l.name}</button></th>
                  <td class="wide"><span class="bar" style={{ width: `${Math.min(1, l.limit_bytes / most) * 100}%` }}>
                    {parts.map((part, p) => <i key={p} style={{ width: `${(part / Math.min(l.limit_bytes, most)) * 100}%`, background: `var(--${SHARES[p].colour})` }} />)}</span></td>
                  {parts.map((part, p) => <td key={p} class="number">{bytes(part)}</td>)}
                  <td class="number">{bytes(s.peak_bytes)}</td><td class={`number${s.peak_bytes > l.limit_bytes ? " bad" : ""}`}>{percent(s.peak_bytes / Math.max(1, l.limit_bytes))}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      <p class="note">In the table as in the report, activations are all that is held beyond what lasts; above, what lives within one body or comes from outside is called buffers.</p>
      <Tooltip tip={tip} />
    </div>
  );
}

/** The last moment that is not after a time. */
function before(at: Float64Array, time: number): number {
  let low = 0, high = at.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

function held(time: number, times: Times, lane: number, event: PointerEvent): Tip {
  const memory = times.memory(lane), i = before(memory.at, time);
  const lines = SHARES.map((share, s) => `${share.name}: ${bytes(memory.bytes[s][i])}`).reverse();
  return { x: event.clientX, y: event.clientY, lines: [`${seconds(time)} into the step: ${bytes(memory.total[i])}`, ...lines] };
}

function draw(chart: Chart, times: Times, lane: number) {
  const { context, view, width, height } = chart, facts = times.page.lanes[lane], memory = times.memory(lane);
  const left = chart.gutter(), top = AXIS + 8, bottom = height - 4;
  const most = room(facts.limit_bytes, facts.peak_bytes), y = (b: number) => bottom - (b / most) * (bottom - top);
  chart.axis(AXIS);
  context.fillStyle = colour("muted");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  const rough = most / 4, power = 10 ** Math.floor(Math.log10(rough)), tick = power * ([1, 2, 5, 10].find((n) => n * power >= rough) ?? 10);
  for (let b = 0; b <= most; b += tick) {
    context.fillStyle = colour("grid");
    context.fillRect(left, Math.round(y(b)), width - left, 1);
    context.fillStyle = colour("muted");
    context.fillText(b === 0 ? "0" : bytes(b), left - 6, Math.min(bottom - 5, y(b)));
  }
  context.textAlign = "left";
  let i = before(memory.at, view.from);
  for (let x = left; x < width; x++) {
    const end = chart.time(x + 1);
    // Of all that is held within a pixel the fullest moment is drawn.
    let fullest = i;
    while (i + 1 < memory.at.length && memory.at[i + 1] < end) {
      i++;
      if (memory.total[i] > memory.total[fullest]) fullest = i;
    }
    if (chart.time(x) > view.end) break;
    let under = 0;
    SHARES.forEach((share, s) => {
      const part = memory.bytes[s][fullest];
      context.fillStyle = colour(share.colour);
      context.fillRect(x, y(under + part), 1, y(under) - y(under + part));
      under += part;
    });
  }
  if (facts.limit_bytes > most) return;
  context.strokeStyle = colour("limit");
  context.lineWidth = 1.5;
  context.setLineDash([6, 4]);
  context.beginPath();
  context.moveTo(left, y(facts.limit_bytes));
  context.lineTo(width, y(facts.limit_bytes));
  context.stroke();
  context.setLineDash([]);
}
