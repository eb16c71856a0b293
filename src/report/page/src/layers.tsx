// The model's graph by layers: a strip of all layers, and what each class of equal layers does, op by op, with what is sent between.

import { useState } from "preact/hooks";
import { laneVariable } from "./colours";
import { bytes, count, plural, ranges, seconds } from "./format";
import type { Class, Fact, OpRow, Page } from "./data";

/** `A`, ..., `Z`, `AA`, ... */
function letter(n: number): string {
  return (n >= 26 ? letter(Math.floor(n / 26) - 1) : "") + String.fromCharCode(65 + (n % 26));
}

/** The colour of what is split over some axes; sets of axes have hues in the order in which they appear. */
function layouts(page: Page): Map<string, string> {
  const found = new Map<string, string>([["", "var(--replicated)"]]);
  for (const { ops } of page.layers.classes) {
    for (const op of ops) {
      const key = op.axes.join(" \u00d7 ");
      if (!found.has(key)) found.set(key, `var(--layout${(found.size - 1) % 6})`);
    }
  }
  return found;
}

export function Layers({ page, ask }: { page: Page; ask: (answer: number) => void }) {
  const { class_of, classes } = page.layers, colours = layouts(page);
  const [open, setOpen] = useState<Set<number>>(new Set());
  const toggle = (c: number, wanted = !open.has(c)) => {
    const next = new Set(open);
    if (wanted) next.add(c);
    else next.delete(c);
    setOpen(next);
  };
  const show = (c: number) => {
    toggle(c, true);
    requestAnimationFrame(() => document.getElementById(`class${c}`)?.scrollIntoView({ block: "nearest" }));
  };
  return (
    <div class="layers">
      <p class="note">Equal layers have one letter. Seconds are of the forward of one microbatch on each device, op by op, by the prices of the search; the timeline has the kernels that they become.</p>
      <ol class="strip" aria-label="Layers by stage">
        {page.stages.map((stage, s) => (
          <li key={s}>
            <span class="of"><i class="chip" style={{ background: laneVariable(stage.lane) }} />stage{s}</span>
            <span class="of-stage">
              {class_of.slice(...stage.layers).map((c, i) => (
                <button key={i} type="button" title={`layer ${stage.layers[0] + i}: like all ${letter(c)}`} aria-label={`layer ${stage.layers[0] + i}, class ${letter(c)}`}
                  style={{ background: mixture(classes[c], colours) }} onClick={() => show(c)}>{letter(c)}</button>
              ))}
            </span>
            {stage.transfer_forward_s > 0 && <span class="edge" title="seconds to send a microbatch's values to the next stage">{"\u2192"} {seconds(stage.transfer_forward_s)}</span>}
          </li>
        ))}
      </ol>
      <ul class="legend">
        {[...colours].map(([axes, fill]) => <li key={axes}><i style={{ background: fill }} />{axes === "" ? "whole on each device" : `split over ${axes}`}</li>)}
        <li><i class="partial" />partial sums</li>
      </ul>
      {classes.map((one, c) => {
        const members = class_of.flatMap((of, layer) => (of === c ? [layer] : []));
        return (
          <details key={c} id={`class${c}`} open={open.has(c)} onToggle={(e) => toggle(c, e.currentTarget.open)}>
            <summary>
              <b style={{ background: mixture(one, colours) }}>{letter(c)}</b>
              <span class="what">{members.length === 1 ? `layer ${members[0]}` : `${members.length} layers: ${ranges(members)}`}</span>
              <span>{plural(one.ops.length, "op")}</span>
              <span>{seconds(one.compute_s)} computing</span>
              <span>{one.reshards_s > 0 ? `${seconds(one.reshards_s)} resharding` : "nothing sent"}</span>
              {one.parameter_elements > 0 && <span>{count(one.parameter_elements)} parameters</span>}
            </summary>
            {open.has(c) && <Ops one={one} first={members[0]} colours={colours} ask={ask} />}
          </details>
        );
      })}
    </div>
  );
}

/** The layouts of a class's ops, as wide as their seconds. */
function mixture(one: Class, colours: Map<string, string>): string {
  const parts = new Map<string, number>();
  for (const op of one.ops) parts.set(op.axes.join(" \u00d7 "), (parts.get(op.axes.join(" \u00d7 ")) ?? 0) + op.seconds + 1e-12);
  const all = [...parts.values()].reduce((a, b) => a + b, 0);
  let at = 0;
  const stops = [...parts].sort((a, b) => b[1] - a[1]).map(([axes, part]) => {
    const from = at;
    at += (part / all) * 100;
    return `${colours.get(axes)} ${from.toFixed(1)}% ${at.toFixed(1)}%`;
  });
  return stops.length > 0 ? `linear-gradient(90deg, ${stops.join(", ")})` : "var(--replicated)";
}

/** The steps that a step follows from, it included, in the order of the proof. */
function chain(facts: Fact[], last: number): number[] {
  const seen = new Set<number>([last]), pending = [last];
  for (let step = pending.pop(); step !== undefined; step = pending.pop()) {
    for (const from of facts[step].from) {
      if (!seen.has(from)) pending.push(from);
      seen.add(from);
    }
  }
  return [...seen].sort((a, b) => a - b);
}

/** How a value follows from parameters, inputs and other layers; the last steps if there are many. */
function Proof({ facts, last }: { facts: Fact[]; last: number }) {
  const MOST = 60, steps = chain(facts, last), shown = steps.slice(-MOST);
  return (
    <ol class="proof">
      {steps.length > MOST && <li>{plural(steps.length - MOST, "step")} before</li>}
      {shown.map((s) => {
        const { op, rule, of, layout, from } = facts[s];
        return <li key={s}><b>#{s} {op}</b> is {of} in <span class="code">{layout}</span> <span class="from">by {rule}{from.length > 0 && ` from ${from.map((f) => `#${f}`).join(", ")}`}</span></li>;
      })}
    </ol>
  );
}

function Ops({ one, first, colours, ask }: { one: Class; first: number; colours: Map<string, string>; ask: (answer: number) => void }) {
  const [proved, setProved] = useState<number | null>(null);
  const most = Math.max(1e-12, ...one.ops.map((op) => op.seconds), ...one.ops.flatMap((op) => op.reshards.map((r) => r.seconds)));
  const bar = (s: number, sends: boolean) => <td class="wide"><span class={`seconds${sends ? " sends" : ""}`} style={{ width: `${(s / most) * 100}%` }} /></td>;
  const row = (op: OpRow, i: number) => [
    ...op.reshards.map((r, n) => (
      <tr key={`${i}.${n}`} class="reshard">
        <td /><td colSpan={2}>{"\u21c4"} {r.collective} of {r.value}, {bytes(r.bytes)}</td>
        <td class="code">{r.from} {"\u2192"} {r.to}</td><td />
        <td class="number">{seconds(r.seconds)}</td>{bar(r.seconds, true)}
      </tr>
    )),
    <tr key={i}>
      <td class="number">{i}</td>
      <td><b>{op.op}</b> {op.name !== op.op && <span class="from">{op.name}</span>}</td>
      <td class="code nowrap">{op.ty}</td>
      <td class="code"><i class={`chip${op.is_partial ? " partial" : ""}`} style={{ background: op.is_partial ? undefined : colours.get(op.axes.join(" \u00d7 ")) }} />{op.sharding}
        {op.why !== null && <> <button type="button" class="link" onClick={() => ask(op.why!)} aria-label={`Why ${op.name || op.op} is laid out so`}>why?</button></>}
        {op.fact !== null && <> <button type="button" class="link" aria-expanded={proved === i} onClick={() => setProved(proved === i ? null : i)} aria-label={`Proof of ${op.name || op.op}`}>proof</button></>}</td>
      <td class="from">{[...op.reads.map((back) => `#${i - back}`), ...op.parameters].join(", ")}</td>
      <td class="number">{seconds(op.seconds)}</td>{bar(op.seconds, false)}
    </tr>,
    proved === i && op.fact !== null && <tr key={`${i}.proof`}><td /><td colSpan={6}><Proof facts={one.facts} last={op.fact} /></td></tr>,
  ];
  return (
    <div class="scroll tall" tabIndex={0} role="region" aria-label={`Ops of layer ${first}`}>
      <table class="ops">
        <caption>As in layer {first}; {"\u21c4"} is sent before the op below it</caption>
        <thead><tr><th scope="col" class="number">#</th><th scope="col">op</th><th scope="col">type</th><th scope="col">sharding</th><th scope="col">reads in this layer</th>
          <th scope="col" class="number">seconds</th><th scope="col" class="wide" aria-label="seconds beside those of the others" /></tr></thead>
        <tbody>{one.ops.map(row)}</tbody>
      </table>
    </div>
  );
}
