// Quantities as the text report writes them (src/units.rs): three significant digits and a unit.

export function digits(value: number): string {
  if (!Number.isFinite(value)) return "-";
  const magnitude = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
  return (value === 0 ? 0 : value).toFixed(Math.min(6, Math.max(0, 2 - magnitude)));
}

export function seconds(value: number): string {
  if (!Number.isFinite(value)) return "-";
  if (Math.abs(value) < 1e-12) return "0 s";
  if (value < 1e-3) return `${digits(value * 1e6)} us`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  return `${digits(value)} s`;
}

function scaled(value: number, units: [number, string][], least: string): string {
  for (const [size, unit] of units) if (value >= size) return `${digits(value / size)} ${unit}`;
  return `${value}${least}`;
}

export const bytes = (value: number) =>
  scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]], " B");

export const count = (value: number) =>
  value >= 1e4 && value < 1e6 ? `${digits(value / 1e3)} k` : scaled(value, [[1e9, "G"], [1e6, "M"]], "");

export const percent = (part: number) => `${digits(part * 100)} %`;

export const rate = (bytesPerSecond: number) => `${bytes(bytesPerSecond)}/s`;

export const plural = (n: number, what: string) => (n === 1 ? `1 ${what}` : `${n} ${what}${what.endsWith("ch") ? "es" : "s"}`);

/** `0-3, 6` of numbers in any order. */
export function ranges(numbers: number[]): string {
  const parts: [number, number][] = [];
  for (const n of numbers) {
    const last = parts[parts.length - 1];
    if (last && last[1] + 1 === n) last[1] = n;
    else parts.push([n, n]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}\u2013${b}`)).join(", ");
}
