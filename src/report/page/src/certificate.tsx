// The figures of a compiler that compiled the plan for devices that were not there.

import type { Certificate as Figures, Traffic } from "./data";
import { bytes, ranges, seconds } from "./format";

/** The memory of each stage as the compiler allocates it, and the collectives that it emitted. */
export function Certificate({ certificate }: { certificate: Figures }) {
  const { compiler, target, device_bytes, stages } = certificate;
  const traffic = ({ count, bytes: sent }: Traffic) => (count === 0 ? "none" : `${count} with ${bytes(sent)}`);
  return (
    <div class="certificate">
      <p>Compiled for {target} ({bytes(device_bytes)}) by {compiler}. The peak is what lasts (parameters, optimizer state and sums of gradients), what is
        held between bodies, and what the fullest body takes beside its arguments.</p>
      <div class="scroll">
        <table>
          <caption>Bytes on a device</caption>
          <thead><tr><th scope="col">stage</th><th scope="col">fits</th>
            {["peak", "predicted", "lasting", "held", "body"].map((h) => <th key={h} scope="col" class="number">{h}</th>)}
            <th scope="col">fullest body</th><th scope="col" class="number">compiling</th></tr></thead>
          <tbody>
            {stages.map((s, i) => (
              <tr key={i}>
                <th scope="row">{ranges(s.stages)}</th>
                <td class={s.peak_bytes <= device_bytes ? "" : "bad"}>{s.peak_bytes <= device_bytes ? "yes" : "no"}</td>
                {[s.peak_bytes, s.predicted_bytes, s.lasting_bytes, s.held_bytes, s.body_bytes].map((b, n) => <td key={n} class="number">{bytes(b)}</td>)}
                <td>{s.fullest}</td>
                <td class="number">{seconds(s.seconds)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <div class="scroll">
        <table>
          <caption>Collectives of a step on each device</caption>
          <thead><tr><th scope="col">stage</th><th scope="col">collective</th><th scope="col">of the plan</th><th scope="col">compiled</th></tr></thead>
          <tbody>
            {stages.map((s, i) => s.collectives.map((row, n) => (
              <tr key={`${i}.${n}`}><th scope="row">{n === 0 ? ranges(s.stages) : ""}</th><td>{row.kind}</td><td>{traffic(row.planned)}</td><td>{traffic(row.compiled)}</td></tr>
            )))}
            {stages.every((s) => s.collectives.length === 0) && <tr><td colSpan={4}>none</td></tr>}
          </tbody>
        </table>
      </div>
    </div>
  );
}
