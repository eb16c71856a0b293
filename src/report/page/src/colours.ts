// Colours by name, from the style sheet, so that canvases follow the theme; the hues are those of Okabe and Ito (2008), which
// readers with any kind of colour vision tell apart.

let known: Record<string, string> = {};

/** Forgets the colours of another theme. */
export function refresh() {
  known = {};
}

export function colour(name: string): string {
  return (known[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888");
}

export const HUES = 8;

/** The colour of a lane's devices. */
export const laneVariable = (lane: number) => `var(--hue${lane % HUES})`;

export const SHARES = [
  { name: "parameters", colour: "parameters" },
  { name: "gradients", colour: "gradients" },
  { name: "optimizer state", colour: "state" },
  { name: "activations", colour: "activations" },
  { name: "buffers", colour: "buffers" },
];

export const PHASES: Record<string, { name: string; colour: string; ink: string }> = {
  forward: { name: "forward", colour: "forward", ink: "on-forward" },
  backward: { name: "backward", colour: "backward", ink: "on-backward" },
  weights: { name: "gradients of weights", colour: "weights", ink: "on-weights" },
  finish: { name: "reduce and update", colour: "finish", ink: "on-finish" },
};

/** The colour of an op by what it is: collectives by their kind, whatever axes they go over. */
export function opColour(what: string): string {
  const kind = what.split(" ")[0];
  return ["matmul", "attention", "convolution", "elementwise", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "halo"].includes(kind)
    ? `op-${kind}` : "op-other";
}
