// The parameters: a table that can be sorted by every column and narrowed to what contains a text.

import { useMemo, useState } from "preact/hooks";
import { bytes, plural } from "./format";
import type { Page, ParameterRow } from "./data";

/** Rows that are shown at first. */
const FIRST = 100;

interface Column { name: string; key: (row: ParameterRow) => string | number; text?: (row: ParameterRow) => string; number?: boolean }

export function Parameters({ page, ask }: { page: Page; ask: (answer: number) => void }) {
  const { texts, rows } = page.parameters, trains = page.plan.trains;
  const columns: Column[] = [
    { name: "parameter", key: (r) => r.name },
    { name: "shape", key: (r) => r.shape.reduce((a, b) => a * b, 1), text: (r) => `[${r.shape.join(", ")}]` },
    { name: "dtype", key: (r) => texts[r.dtype] },
    { name: "stage", key: (r) => r.stage, text: (r) => `stage${r.stage}` },
    { name: "layout", key: (r) => texts[r.layout] },
    { name: "sharding", key: (r) => texts[r.sharding] },
    { name: "storage", key: (r) => r.zero ?? -1, text: (r) => (r.zero === null ? "" : `ZeRO-${r.zero}`) },
    { name: "local bytes", key: (r) => r.local_bytes, text: (r) => bytes(r.local_bytes), number: true },
    ...(trains ? [
      { name: "gradient", key: (r: ParameterRow) => r.gradient_bytes, text: (r: ParameterRow) => bytes(r.gradient_bytes), number: true },
      { name: "optimizer state", key: (r: ParameterRow) => r.state_bytes, text: (r: ParameterRow) => bytes(r.state_bytes), number: true },
    ] : []),
  ];
  const [sort, setSort] = useState<{ column: number; down: boolean } | null>(null);
  const [filter, setFilter] = useState("");
  const [most, setMost] = useState(FIRST);
  const found = useMemo(() => {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (r: ParameterRow) => `${r.name} stage${r.stage} ${texts[r.dtype]} ${texts[r.layout]} ${texts[r.sharding]}`.toLowerCase();
    const kept = words.length === 0 ? [...rows] : rows.filter((r) => words.every((word) => text(r).includes(word)));
    if (sort) {
      const { key } = columns[sort.column], sign = sort.down ? -1 : 1;
      kept.sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        return sign * (typeof x === "number" ? x - (y as number) : x.localeCompare(y as string, undefined, { numeric: true }));
      });
    }
    return kept;
  }, [sort, filter]);
  const sum = (of: (row: ParameterRow) => number) => found.reduce((all, row) => all + of(row), 0);
  const turn = (column: number) => setSort(sort?.column !== column ? { column, down: columns[column].number ?? false } : { column, down: !sort.down });
  return (
    <div class="parameters">
      <div class="controls">
        <label>Filter <input type="search" value={filter} placeholder="name, stage, layout" onInput={(e) => setFilter(e.currentTarget.value)} /></label>
        <span role="status">{found.length === rows.length ? plural(rows.length, "row") : `${found.length} of ${plural(rows.length, "row")}`}, {bytes(sum((r) => r.local_bytes))} of parameters on a device of each</span>
      </div>
      <div class="scroll tall" tabIndex={0} role="region" aria-label="Table of parameters">
        <table>
          <thead><tr>{columns.map((column, c) => (
            <th key={c} scope="col" class={column.number ? "number" : ""} aria-sort={sort?.column === c ? (sort.down ? "descending" : "ascending") : "none"}>
              <button type="button" class="link" onClick={() => turn(c)}>{column.name}<span aria-hidden="true">{sort?.column === c ? (sort.down ? " \u25be" : " \u25b4") : ""}</span></button>
            </th>))}<th scope="col">why</th></tr></thead>
          <tbody>
            {found.slice(0, most).map((row) => (
              <tr key={`${row.stage} ${row.name}`}>
                {columns.map((column, c) => {
                  const text = column.text ? column.text(row) : `${column.key(row)}`;
                  const title = column.name === "sharding" && trains ? `gradient ${texts[row.gradient]}, optimizer state ${texts[row.state]}` : undefined;
                  return <td key={c} title={title} class={column.number ? "number" : ["parameter", "sharding"].includes(column.name) ? "code" : column.name === "layout" ? "from" : "nowrap"}>{text}</td>;
                })}
                <td>{row.why !== null && <button type="button" class="link" onClick={() => ask(row.why!)} aria-label={`Why ${row.name} is laid out so`}>why?</button>}</td>
              </tr>
            ))}
          </tbody>
        </table>
        {found.length === 0 && <p class="empty">No parameter matches.</p>}
      </div>
      {found.length > most && <button type="button" onClick={() => setMost(Infinity)}>Show all {found.length}</button>}
    </div>
  );
}
