//! The memory of a device over a step, by what a compiler says about each body.

use crate::pjrt::Memory;
use altiplano_ir::program::{BufferId, BufferKind, Call, Program, Transfer};
use std::collections::BTreeMap;

/// The fullest moment of a step. All bytes are those of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    pub bytes: u64,
    /// Parameters, optimizer state, sums of gradients and scalars, which live between steps.
    pub lasting_bytes: u64,
    /// Values that bodies leave for others, inputs and received values, when the fullest body begins.
    pub held_bytes: u64,
    /// Bytes of the fullest body beside its arguments: its results and temporaries, and the padding of its arguments.
    pub body_bytes: u64,
    /// The fullest body.
    pub body: usize,
}

/// An instance of a buffer: its microbatch and its step.
type Instance = (BufferId, Option<u32>, u32);

struct Walk<'a> {
    program: &'a Program,
    held: BTreeMap<Instance, u64>,
    held_bytes: u64,
}

/// Follows the calls of a program. `bodies` has what each body takes.
pub fn peak(program: &Program, transfers: &[Transfer], bodies: &[Memory]) -> Peak {
    let overlap = program.overlap(&program.bodies);
    let lasting: u64 = (0_u32..)
        .map(BufferId)
        .zip(&program.buffers)
        .filter(|(_, buffer)| !buffer.kind.is_of_step())
        .map(|(id, buffer)| {
            let twice = match buffer.kind {
                BufferKind::Parameter { .. } => overlap.stashes_parameters,
                BufferKind::Accumulator { .. } => overlap.doubles_accumulators,
                BufferKind::Scalar { .. } => overlap.steps,
                _ => false,
            };
            bytes(program, id) * if twice { 2 } else { 1 }
        })
        .sum();
    let mut walk = Walk { program, held: BTreeMap::new(), held_bytes: 0 };
    let mut peak = Peak { bytes: lasting, lasting_bytes: lasting, ..Peak::default() };
    // Steps that overlap are in full swing at the third.
    for step in 0..if program.runs_ahead() { 3 } else { 1 } {
        for (position, late) in program.turns() {
            let Some(step) = u32::checked_sub(step, u32::from(late)) else { continue };
            walk.call(&program.schedule[position], transfers, step, bodies, &mut peak);
        }
    }
    peak
}

/// The local bytes of a buffer in the device's memory.
fn bytes(program: &Program, id: BufferId) -> u64 {
    if program.buffer(id).host { 0 } else { program.local_bytes(id) }
}

impl Walk<'_> {
    fn keep(&mut self, id: BufferId, microbatch: Option<u32>, step: u32) {
        if self.program.buffer(id).kind.is_of_step() {
            let bytes = bytes(self.program, id);
            if self.held.insert((id, microbatch, step), bytes).is_none() {
                self.held_bytes += bytes;
            }
        }
    }

    fn free(&mut self, id: BufferId, microbatch: Option<u32>, step: u32) {
        self.held_bytes -= self.held.remove(&(id, microbatch, step)).unwrap_or(0);
    }

    fn call(&mut self, call: &Call, transfers: &[Transfer], step: u32, bodies: &[Memory], peak: &mut Peak) {
        let program = self.program;
        match *call {
            Call::Send { transfer, microbatch, free } => {
                if free {
                    self.free(transfers[transfer.0 as usize].source.1, microbatch, step);
                }
            }
            Call::Receive { transfer, microbatch } => {
                self.keep(transfers[transfer.0 as usize].target.1, microbatch, step);
                peak.bytes = peak.bytes.max(peak.lasting_bytes + self.held_bytes);
            }
            Call::Run { body: index, microbatch } => {
                let body = &program.bodies[index as usize];
                // An input arrives when a body first reads it.
                for &(_, id) in &body.reads {
                    if matches!(program.buffer(id).kind, BufferKind::Input { .. }) {
                        self.keep(id, microbatch, step);
                    }
                }
                let memory = &bodies[index as usize];
                let ours: u64 = body.reads.iter().map(|&(_, id)| bytes(program, id)).sum();
                let takes = memory.beside_arguments() + memory.arguments.saturating_sub(ours);
                let total = peak.lasting_bytes + self.held_bytes + takes;
                if total > peak.bytes {
                    peak.bytes = total;
                    peak.held_bytes = self.held_bytes;
                    peak.body_bytes = takes;
                    peak.body = index as usize;
                }
                body.writes.iter().for_each(|&(id, _)| self.keep(id, microbatch, step));
                body.frees.iter().for_each(|&id| self.free(id, microbatch, step));
                // The host takes losses and results as they come.
                let taken =
                    |id: BufferId| matches!(program.buffer(id).kind, BufferKind::Loss | BufferKind::Output { .. });
                let gone: Vec<BufferId> = body.writes.iter().map(|&(id, _)| id).filter(|&id| taken(id)).collect();
                gone.into_iter().for_each(|id| self.free(id, microbatch, step));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::graph::Graph;
    use altiplano_ir::mesh::Mesh;
    use altiplano_ir::program::{Body, Buffer, Phase};
    use altiplano_ir::sharding::Sharding;
    use altiplano_ir::types::TensorType;

    fn buffer(kind: BufferKind, elements: u64) -> Buffer {
        let ty = TensorType::new(DType::F32, [elements]);
        let sharding = Sharding::replicated(&[elements]);
        Buffer { name: String::new(), stage: 0, kind, ty, sharding, extents: None, host: false }
    }

    fn body(phase: Phase, reads: &[u32], writes: &[u32], frees: &[u32]) -> Body {
        let mut graph = Graph::new("body");
        let ty = TensorType::new(DType::F32, [1]);
        let leaf = altiplano_ir::op::Op::Input(altiplano_ir::op::Input { name: "x".into(), ty });
        let value = graph.emit(leaf, &[]);
        Body {
            name: String::new(),
            stage: 0,
            phase,
            graph,
            reads: reads.iter().map(|&id| (value, BufferId(id))).collect(),
            writes: writes.iter().map(|&id| (BufferId(id), value)).collect(),
            frees: frees.iter().map(|&id| BufferId(id)).collect(),
        }
    }

    fn memory(arguments: u64, outputs: u64, aliased: u64, temporary: u64) -> Memory {
        Memory { arguments, outputs, aliased, temporary, code: 0 }
    }

    #[test]
    fn values_of_all_microbatches_in_flight_are_held_while_the_fullest_body_runs() {
        let run = |body: u32, microbatch: u32| Call::Run { body, microbatch: Some(microbatch) };
        let program = Program {
            devices: vec![0],
            mesh: Mesh::new(&[("data", 1)]),
            buffers: vec![
                buffer(BufferKind::Parameter { name: "w".into() }, 100),
                buffer(BufferKind::Accumulator { parameter: "w".into() }, 100),
                buffer(BufferKind::Input { name: "x".into() }, 10),
                buffer(BufferKind::Value, 50),
                buffer(BufferKind::Loss, 1),
            ],
            bodies: vec![body(Phase::Forward, &[0, 2], &[3, 4], &[2]), body(Phase::Backward, &[0, 1, 3], &[1], &[3])],
            schedule: vec![run(0, 0), run(0, 1), run(1, 0), run(1, 1)],
            late: Vec::new(),
            flush: Vec::new(),
            fused_attention: false,
        };
        // The gradient's sum takes the memory of the old one, and the arguments are padded by 8 bytes.
        let bodies = [memory(440, 204, 0, 40), memory(1008, 400, 400, 600)];
        let peak = peak(&program, &[], &bodies);
        let expected = Peak { bytes: 800 + 400 + 608, lasting_bytes: 800, held_bytes: 400, body_bytes: 608, body: 1 };
        assert_eq!(peak, expected);
        // With a fuller forward pass the second one counts, which holds the first's value and its own input.
        let peak = super::peak(&program, &[], &[memory(440, 204, 0, 4000), bodies[1]]);
        assert_eq!((peak.body, peak.held_bytes, peak.bytes), (0, 240, 800 + 240 + 4204));
    }
}
