// The page: its data is in the document as JSON, and every name in it becomes a text node.

import { render } from "preact";
import { useState } from "preact/hooks";
import { Certificate } from "./certificate";
import { Cluster } from "./cluster";
import type { Page } from "./data";
import { bytes, count, digits, percent, plural, seconds } from "./format";
import { Layers } from "./layers";
import { Memory } from "./memory";
import { Parameters } from "./parameters";
import "./page.css";
import { Times } from "./time";
import { Timeline, type Selected } from "./timeline";
import { View } from "./view";
import { Alternatives, Limits, Why } from "./why";

const SECTIONS = [
  ["cluster", "Cluster"], ["timeline", "Timeline"], ["memory", "Memory"], ["limits", "What limits it"], ["layers", "Layers"],
  ["parameters", "Parameters"], ["why", "Other layouts"], ["alternatives", "Other plans"], ["certificate", "Certificate"],
] as const;

function Report({ page, times, view }: { page: Page; times: Times; view: View }) {
  const { plan } = page;
  const [lane, setLane] = useState(0);
  const [selected, setSelected] = useState<Selected | null>(null);
  const [answer, setAnswer] = useState(0);
  const select = (at: Selected | null) => {
    setSelected(at);
    if (at) setLane(at.lane);
  };
  const ask = (which: number) => {
    setAnswer(which);
    const section = document.getElementById("why");
    section?.scrollIntoView();
    section?.querySelector("select")?.focus({ preventScroll: true });
  };
  const peak = Math.max(...page.lanes.map((l) => l.peak_bytes)), part = Math.max(...page.lanes.map((l) => l.peak_bytes / Math.max(1, l.limit_bytes)));
  const step = plan.trains ? "step" : "batch";
  const tiles = [
    [seconds(plan.step_s), `a ${step}`],
    [digits(plan.samples_per_s), "samples/s"],
    [percent(plan.mfu), "of the devices' peak (MFU)"],
    [`${bytes(peak)}`, `on the fullest device, ${percent(part)} of what the fullest kind has`.replace(" of what the fullest kind has", page.groups.length > 1 ? " at most of what it has" : " of what it has")],
    [`${plan.devices_used}`, plan.devices_used === plan.num_devices ? "devices, all of them" : `of ${plan.num_devices} devices`],
    [count(plan.elements), `parameters, ${bytes(plan.parameter_bytes)}`],
  ];
  const contents: Record<string, preact.ComponentChildren> = {
    cluster: <Cluster page={page} lane={lane} setLane={setLane} />,
    timeline: <Timeline times={times} view={view} selected={selected} select={select} />,
    memory: <Memory times={times} view={view} lane={lane} setLane={setLane} />,
    limits: <Limits page={page} />,
    layers: <Layers page={page} ask={ask} />,
    parameters: <Parameters page={page} ask={ask} />,
    why: <Why page={page} chosen={answer} choose={setAnswer} />,
    alternatives: <Alternatives page={page} />,
    certificate: page.certificate && <Certificate certificate={page.certificate} />,
  };
  const sections = SECTIONS.filter(([id]) => contents[id]);
  return (
    <>
      <header>
        <div>
          <h1>{plan.model} <small>on {plan.cluster}</small></h1>
          <p>{plan.one_line}; {plan.global_batch > 0 ? plural(plan.global_batch, "sample") : "the traced batch"} a {step}{plan.trains ? `, ${plan.optimizer}` : ", run and not trained"}
            {plan.target !== "altiplano" && `, run by ${plan.target}`}</p>
        </div>
        <Theme />
      </header>
      {plan.profile !== null && <p class="warning">The plan was predicted by the {plan.profile}; what is drawn here is played by the cluster's figures, so that seconds differ from those of the plan.</p>}
      <ul class="tiles">{tiles.map(([figure, what]) => <li key={what}><b>{figure}</b><span>{what}</span></li>)}</ul>
      <nav aria-label="Sections">{sections.map(([id, title]) => <a key={id} href={`#${id}`}>{title}</a>)}</nav>
      <main>
        {sections.map(([id, title]) => (
          <section key={id} id={id} aria-labelledby={`${id}-title`}>
            <h2 id={`${id}-title`}>{title}</h2>
            {contents[id]}
          </section>
        ))}
      </main>
    </>
  );
}

/** Light, dark, or as the system has it. */
function Theme() {
  const [theme, setTheme] = useState("auto");
  const set = (wanted: string) => {
    setTheme(wanted);
    if (wanted === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = wanted;
    dispatchEvent(new Event("themechange"));
  };
  return (
    <fieldset class="theme">
      <legend class="unseen">Colours</legend>
      {["auto", "light", "dark"].map((name) => (
        <label key={name}><input type="radio" name="theme" checked={theme === name} onChange={() => set(name)} /><span>{name}</span></label>
      ))}
    </fieldset>
  );
}

const page: Page = JSON.parse(document.getElementById("data")!.textContent!);
const times = new Times(page), view = new View(times.end);
document.title = `${page.plan.model} on ${page.plan.cluster}`;
const root = document.getElementById("page")!;
root.textContent = "";
render(<Report page={page} times={times} view={view} />, root);
// For whoever measures how long the page takes to open.
performance.mark("interactive");
