// The cluster: which stage each device works for, and what the stages are.

import { laneVariable } from "./colours";
import { bytes, plural, ranges, rate, seconds } from "./format";
import type { Page } from "./data";

/** Nodes of a group that are drawn one by one at most; beyond, runs of nodes that work for the same stages are one. */
const MOST_NODES = 16;

interface Block { first: number; count: number; lanes: (number | null)[] }

function blocks(page: Page, group: number): Block[] {
  const { nodes, devices_per_node } = page.groups[group];
  const start = page.groups.slice(0, group).reduce((sum, g) => sum + g.nodes * g.devices_per_node, 0);
  const laneOf = new Map<number, number>();
  page.lanes.forEach((lane, i) => lane.devices.forEach((device) => laneOf.set(device, i)));
  const all: Block[] = [];
  for (let node = 0; node < nodes; node++) {
    const lanes = Array.from({ length: devices_per_node }, (_, d) => laneOf.get(start + node * devices_per_node + d) ?? null);
    const last = all[all.length - 1];
    if (nodes > MOST_NODES && last && last.lanes.every((lane, d) => lane === lanes[d])) last.count++;
    else all.push({ first: node, count: 1, lanes });
  }
  return all;
}

/** How far the parameters of a stage are sharded beyond their layouts, as the report says it. */
function storage(page: Page, stage: number): string {
  const levels = page.parameters.rows.filter((r) => r.stage === stage && r.zero !== null).map((r) => r.zero!);
  const [least, most] = [Math.min(...levels), Math.max(...levels)];
  if (levels.length > 0 && least < most) return `ZeRO-${least} to ${most}`;
  return page.stages[stage].zero === 0 ? "not sharded" : `ZeRO-${page.stages[stage].zero}`;
}

export function Cluster({ page, lane, setLane }: { page: Page; lane: number; setLane: (lane: number) => void }) {
  let first = 0;
  return (
    <div class="cluster">
      {page.groups.map((group, g) => {
        const start = first;
        first += group.nodes * group.devices_per_node;
        return (
          <div key={g} class="group">
            <h3>{plural(group.nodes, "node")} of {group.devices_per_node} {group.device}, {bytes(group.memory_bytes)} each</h3>
            <p class="note">Inside a node {group.inside || "links"} at {rate(group.inside_bytes_per_s)} a device{group.nodes > 1 &&
              `; between nodes ${group.between || "network"} at ${rate(group.between_bytes_per_s)}, ${plural(group.nics, "card")} a node`}.</p>
            <div class="nodes">
              {blocks(page, g).map((block) => (
                <div key={block.first} class="node">
                  <span>{block.count === 1 ? `node ${block.first}` : `nodes ${block.first}\u2013${block.first + block.count - 1}`}</span>
                  <div class="devices">
                    {block.lanes.map((of, d) => {
                      const id = start + block.first * group.devices_per_node + d;
                      const what = of === null ? `device ${id}: not used` : `device ${id}: ${page.lanes[of].name}`;
                      return of === null ? <span key={d} class="device idle" title={what} aria-label={what} role="img">{"\u2013"}</span> : (
                        <button key={d} type="button" tabIndex={-1} class={`device${of === lane ? " chosen" : ""}`} title={what} aria-label={what}
                          style={{ background: laneVariable(of), color: `var(--on-hue${of % 8})` }} onClick={() => setLane(of)}>{page.lanes[of].stages[0]}</button>
                      );
                    })}
                  </div>
                </div>
              ))}
            </div>
          </div>
        );
      })}
      {page.between_groups_bytes_per_s !== null && <p class="note">All that two groups send each other goes over {rate(page.between_groups_bytes_per_s)}.</p>}
      <div class="scroll tall" tabIndex={0} role="region" aria-label="Stages">
        <table>
          <caption>{page.plan.virtual_stages > 1 ? "Stages; devices work for several in turn" : "Stages"}, seconds and bytes of each of their devices</caption>
          <thead><tr>
            {["stage", "layers", "devices", "mesh, and links of its axes", "recompute", "storage"].map((h) => <th key={h} scope="col">{h}</th>)}
            {["forward", "backward", "once a step", "computing", "sending alone", "waiting", "peak"].map((h) => <th key={h} scope="col" class="number">{h}</th>)}
          </tr></thead>
          <tbody>
            {page.stages.map((stage, i) => {
              const of = page.lanes[stage.lane];
              return (
                <tr key={i} class={stage.lane === lane ? "chosen" : ""}>
                  <th scope="row"><button type="button" class="link" onClick={() => setLane(stage.lane)}><i class="chip" style={{ background: laneVariable(stage.lane) }} />stage{i}</button></th>
                  <td class="nowrap">{stage.layers[0] + 1 === stage.layers[1] ? stage.layers[0] : `${stage.layers[0]}\u2013${stage.layers[1] - 1}`}</td>
                  <td class="nowrap">{ranges(of.devices)}</td>
                  <td class="mesh"><span class="nowrap">{stage.mesh}</span><br /><span class="from">{stage.axes.filter((a) => a.size > 1).map((a) =>
                    `${a.name} ${a.nodes > 1 ? `over ${a.nodes} nodes` : "in a node"}, ${rate(a.bytes_per_s)}`).join("; ") || "one device"}</span></td>
                  <td>{stage.recompute}</td>
                  <td class="nowrap">{storage(page, i)}</td>
                  {[stage.forward_s, stage.backward_s, stage.step_s, stage.compute_s, stage.communication_s, stage.bubble_s].map((s, n) =>
                    <td key={n} class="number">{seconds(s)}</td>)}
                  <td class="number">{bytes(stage.peak_bytes)}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </div>
  );
}
