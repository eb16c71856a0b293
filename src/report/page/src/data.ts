// What the page is told, as src/report/html.rs writes it. Seconds and bytes are numbers; they become words in format.ts.

export type Bytes = [number, number, number, number, number];

export interface Headline {
  model: string; cluster: string; one_line: string; schedule: string; target: string; trains: boolean;
  virtual_stages: number; num_microbatches: number; microbatch: number; global_batch: number; optimizer: string;
  elements: number; parameter_bytes: number; num_devices: number; devices_used: number;
  step_s: number; lower_bound_s: number; samples_per_s: number; mfu: number; profile: string | null; gap: number | null;
}
export interface Group {
  nodes: number; devices_per_node: number; device: string; memory_bytes: number; inside: string; inside_bytes_per_s: number;
  between: string; between_bytes_per_s: number; nics: number;
}
export interface Axis { name: string; size: number; nodes: number; bytes_per_s: number }
export interface Stage {
  lane: number; layers: [number, number]; mesh: string; axes: Axis[]; recompute: string; zero: number;
  forward_s: number; backward_s: number; weights_s: number; step_s: number; compute_s: number; communication_s: number; bubble_s: number;
  transfer_forward_s: number; transfer_backward_s: number;
  parameters_bytes: number; gradients_bytes: number; optimizer_bytes: number; activations_bytes: number; peak_bytes: number;
}
export type Phase = "forward" | "backward" | "weights" | "finish";
export interface Kind { stage: number; phase: Phase; seconds: number; body: number; first_number: number; memory: [number, Bytes][] }
export interface Lane {
  name: string; group: number; submesh: [number, number]; devices: number[]; stages: number[]; limit_bytes: number; peak_bytes: number;
  busy_s: number; bubble_s: number; lasting: Bytes; kinds: Kind[]; calls: [number, number, number][];
}
export interface Op { name: string; ops: string; what: string; sends: boolean; seconds: number; bytes: number }
export interface Reshard { value: string; from: string; to: string; collective: string; bytes: number; seconds: number }
export interface OpRow {
  name: string; op: string; ty: string; sharding: string; axes: string[]; is_partial: boolean; seconds: number; reads: number[];
  parameters: string[]; reshards: Reshard[]; why: number | null; fact: number | null;
}
export interface Fact { op: string; rule: string; of: string; layout: string; from: number[] }
export interface Class { ops: OpRow[]; compute_s: number; reshards_s: number; parameter_elements: number; facts: Fact[] }
export interface ParameterRow {
  name: string; stage: number; shape: number[]; dtype: number; layout: number; sharding: number; gradient: number; state: number;
  zero: number | null; local_bytes: number; gradient_bytes: number; state_bytes: number; why: number | null;
}
export interface Choice {
  layout: string; chosen: boolean; in_place_s: number | null; whole_s: number | null; others: number; over_bytes: number;
}
export interface Answer {
  name: string; is_parameter: boolean; alike: number; stage: number; ty: string; microbatch_s: number; peak_bytes: number;
  device_bytes: number; layouts: Choice[]; more_layouts: number;
}
export interface Alternative {
  name: string; step_s: number | null; samples_per_s: number | null; mfu: number | null; peak_bytes: number | null; fits: boolean;
  detail: string;
}
export interface Traffic { count: number; bytes: number }
export interface CertifiedStage {
  stages: number[]; peak_bytes: number; lasting_bytes: number; held_bytes: number; body_bytes: number; fullest: string;
  predicted_bytes: number; collectives: { kind: string; planned: Traffic; compiled: Traffic }[]; seconds: number;
}
export interface Certificate { compiler: string; target: string; device_bytes: number; plan_hash: string; stages: CertifiedStage[] }
export interface Page {
  format: string; version: number; plan: Headline; groups: Group[]; between_groups_bytes_per_s: number | null; stages: Stage[]; lanes: Lane[]; ops: Op[];
  bodies: [number, number, number][][];
  layers: { class_of: number[]; classes: Class[] };
  parameters: { texts: string[]; rows: ParameterRow[] };
  questions: { answers: Answer[]; left_out: number };
  alternatives: Alternative[];
  certificate: Certificate | null;
}
