// Why the plan is as it is: what a step's time goes to, what other layouts of a value would cost, and which plans lost.

import { laneVariable } from "./colours";
import { bytes, digits, percent, plural, seconds } from "./format";
import type { Answer, Page } from "./data";

/** Where the step goes: each device's seconds, and those of all together. */
export function Limits({ page }: { page: Page }) {
  const { plan, lanes, stages } = page;
  const parts = lanes.map((lane) => {
    const of = (key: "compute_s" | "communication_s") => lane.stages.reduce((sum, s) => sum + stages[s][key], 0);
    return { lane, compute: of("compute_s"), sends: of("communication_s"), waits: stages[lane.stages[0]].bubble_s };
  });
  const all = lanes.reduce((sum, lane) => sum + lane.devices.length, 0) * plan.step_s;
  const share = (of: (p: (typeof parts)[0]) => number) => parts.reduce((sum, p) => sum + of(p) * p.lane.devices.length, 0) / all;
  const idle = plan.num_devices - plan.devices_used, step = plan.trains ? "step" : "batch";
  return (
    <div class="limits">
      <ul class="facts">
        <li><b>{percent(share((p) => p.compute))}</b> of the devices' time is computing</li>
        <li><b>{percent(share((p) => p.sends))}</b> is sending while nothing is computed</li>
        <li><b>{percent(share((p) => p.waits))}</b> is waiting for other stages{plan.schedule === "forward" || lanes.length === 1 ? "" : " (the bubble)"}</li>
        {idle > 0 && <li><b>{idle} of {plan.num_devices}</b> devices are not used: no plan found that uses more is faster</li>}
        <li>At the devices' peak rate the {step}'s FLOPs take <b>{seconds(plan.lower_bound_s)}</b>, {digits(plan.step_s / Math.max(plan.lower_bound_s, 1e-300))} times less: no plan on these devices can be faster</li>
        {plan.gap !== null && <li>{plan.gap < 1e-6 ? <>The shardings are <b>proven the best</b> in their space</> : <>The shardings are proven within <b>{percent(plan.gap)}</b> of the best in their space</>}{stages.length > 1 ? ", stage by stage" : ""}, by the prices of the search</li>}
      </ul>
      <div class="scroll">
        <table class="goes">
          <caption>Seconds of a {step}, on each device</caption>
          <thead><tr><th scope="col">stage</th><th scope="col" class="wide" aria-label="shares" /><th scope="col" class="number">computing</th><th scope="col" class="number">sending alone</th><th scope="col" class="number">waiting</th></tr></thead>
          <tbody>
            {parts.map(({ lane, compute, sends, waits }, i) => (
              <tr key={i}>
                <th scope="row"><i class="chip" style={{ background: laneVariable(i) }} />{lane.name}</th>
                <td class="wide"><span class="bar full">
                  <i style={{ width: `${(compute / plan.step_s) * 100}%`, background: "var(--computing)" }} />
                  <i style={{ width: `${(sends / plan.step_s) * 100}%`, background: "var(--sending)" }} />
                </span></td>
                {[compute, sends, waits].map((s, n) => <td key={n} class="number">{seconds(s)}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <ul class="legend"><li><i style={{ background: "var(--computing)" }} />computing</li><li><i style={{ background: "var(--sending)" }} />sending while nothing is computed</li><li><i class="bubble" />waiting</li></ul>
    </div>
  );
}

/** What other layouts would cost. */
export function Why({ page, chosen, choose }: { page: Page; chosen: number; choose: (answer: number) => void }) {
  const { answers, left_out } = page.questions;
  if (answers.length === 0) return <p class="empty">Every device has all of every value: there are no other layouts to compare with.</p>;
  const kinds = [{ title: "Parameters", is: true }, { title: "Results of products and lookups", is: false }];
  return (
    <div class="why">
      <label>Value <select value={chosen} onChange={(e) => choose(Number(e.currentTarget.value))}>
        {kinds.map((kind) => (
          <optgroup key={kind.title} label={kind.title}>
            {answers.map((a, i) => a.is_parameter === kind.is && <option key={i} value={i}>{a.name} ({a.ty}, stage{a.stage}{a.alike > 1 ? `, ${a.alike} alike` : ""})</option>)}
          </optgroup>
        ))}
      </select></label>
      <Layouts answer={answers[chosen]} />
      <p class="note">
        {left_out > 0 && `${plural(left_out, "smaller value")} of other kinds ${left_out === 1 ? "is" : "are"} not on this page. `}
        For any value:
      </p>
      {answers[chosen].is_parameter
        ? <code class="command">altiplano why PLAN --param {quoted(answers[chosen].name)}</code>
        : <code class="command">altiplano why PLAN --op {quoted(answers[chosen].name)}</code>}
    </div>
  );
}

/** A name as a shell takes it. */
const quoted = (name: string) => `'${name.replace(/'/g, `'\\''`)}'`;

function Layouts({ answer }: { answer: Answer }) {
  const change = (s: number | null) => {
    if (s === null) return "cannot be";
    if (Math.abs(s) <= 1e-9 * answer.microbatch_s) return "the same";
    return `${s < 0 ? "\u2212" : "+"}${seconds(Math.abs(s))}`;
  };
  const most = Math.max(1e-12, ...answer.layouts.map((l) => l.whole_s ?? 0));
  return (
    <>
      <p>A microbatch of stage{answer.stage} takes {seconds(answer.microbatch_s)}, and a device holds {bytes(answer.peak_bytes)} of {bytes(answer.device_bytes)} when it holds most. By the search's estimates, which leave out what overlaps, a microbatch with another layout of <span class="code">{answer.name}</span> would take longer by the seconds below; the command predicts a step.</p>
      <div class="scroll">
        <table>
          <thead><tr><th scope="col">layout</th><th scope="col" class="number">all else as it is</th><th scope="col" class="number">all else anew</th><th scope="col" class="wide" aria-label="seconds beside those of the others" />
            <th scope="col" class="number">others change</th><th scope="col">memory</th></tr></thead>
          <tbody>
            {answer.layouts.map((l) => (
              <tr key={l.layout} class={l.chosen ? "chosen" : ""}>
                <td class="code">{l.layout}{l.chosen && <b class="tag">taken</b>}</td>
                <td class="number">{change(l.in_place_s)}</td><td class="number">{change(l.whole_s)}</td>
                <td class="wide">{l.whole_s !== null && <span class="seconds" style={{ width: `${(Math.max(0, l.whole_s) / most) * 100}%` }} />}</td>
                <td class="number">{l.whole_s === null ? "" : l.others}</td>
                <td class={l.over_bytes > 0 ? "bad" : ""}>{l.over_bytes > 0 ? `${bytes(l.over_bytes)} too much` : "fits"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {answer.more_layouts > 0 && <p class="note">And {plural(answer.more_layouts, "more layout")}.</p>}
    </>
  );
}

/** The plans that lost, and why. */
export function Alternatives({ page }: { page: Page }) {
  const { alternatives, plan } = page;
  if (alternatives.length === 0) return <p class="empty">The plan was made without alternatives to compare with.</p>;
  // Plans that are many times slower would leave no room to tell the others apart.
  const most = Math.min(Math.max(...alternatives.map((a) => a.step_s ?? 0)), 3 * plan.step_s), step = plan.trains ? "s/step" : "s/batch";
  return (
    <div class="scroll">
      <table class="alternatives">
        <thead><tr><th scope="col">plan</th><th scope="col" class="number">{step}</th><th scope="col" class="wide" aria-label="seconds beside those of the others" />
          {["beside chosen", "samples/s", "MFU", "GB/device"].map((h) => <th key={h} scope="col" class="number">{h}</th>)}<th scope="col">fits</th><th scope="col">how, or why not</th></tr></thead>
        <tbody>
          {alternatives.map((a, i) => (
            <tr key={i} class={a.name === "chosen" ? "chosen" : ""}>
              <th scope="row">{a.name}</th>
              <td class="number">{a.step_s === null ? "\u2013" : digits(a.step_s)}</td>
              <td class="wide">{a.step_s !== null && <span class={`seconds${a.fits ? "" : " unfit"}${a.step_s > most ? " beyond" : ""}`} style={{ width: `${Math.min(1, a.step_s / most) * 100}%` }} />}</td>
              <td class="number">{a.step_s === null ? "" : `${digits(a.step_s / plan.step_s)} \u00d7`}</td>
              <td class="number">{a.samples_per_s === null ? "\u2013" : digits(a.samples_per_s)}</td>
              <td class="number">{a.mfu === null ? "\u2013" : percent(a.mfu)}</td>
              <td class="number">{a.peak_bytes === null ? "\u2013" : digits(a.peak_bytes / 1e9)}</td>
              <td class={a.step_s !== null && !a.fits ? "bad" : ""}>{a.step_s === null ? "\u2013" : a.fits ? "yes" : "no"}</td>
              <td>{a.detail}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

