//! Reads the collectives out of a compiled program: an `HloModuleProto`, the form in which XLA shows what it made.
//!
//! Field numbers are those of `hlo.proto` and `xla_data.proto` of OpenXLA (Apache-2.0). Fields that say nothing about
//! collectives are skipped.

use prost::Message;
use std::collections::BTreeMap;
use std::fmt;

#[derive(Clone, PartialEq, Message)]
struct ModuleWithConfig {
    #[prost(bytes = "vec", tag = "1")]
    module: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Module {
    #[prost(message, repeated, tag = "3")]
    computations: Vec<Computation>,
}

#[derive(Clone, PartialEq, Message)]
struct Computation {
    #[prost(message, repeated, tag = "2")]
    instructions: Vec<Instruction>,
}

#[derive(Clone, PartialEq, Message)]
struct Instruction {
    #[prost(string, tag = "2")]
    opcode: String,
    #[prost(message, optional, tag = "3")]
    shape: Option<Shape>,
    #[prost(int64, tag = "35")]
    id: i64,
    #[prost(int64, repeated, tag = "36")]
    operands: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct Shape {
    #[prost(int32, tag = "2")]
    element: i32,
    #[prost(int64, repeated, tag = "3")]
    dimensions: Vec<i64>,
    #[prost(message, repeated, tag = "4")]
    parts: Vec<Shape>,
}

/// Kinds of collectives, as programs and compilers have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Permute,
    Broadcast,
}

impl Kind {
    /// The name in XLA's texts.
    pub fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all-reduce",
            Kind::AllGather => "all-gather",
            Kind::ReduceScatter => "reduce-scatter",
            Kind::AllToAll => "all-to-all",
            Kind::Permute => "collective-permute",
            Kind::Broadcast => "collective-broadcast",
        }
    }

    /// The kind that an instruction begins. Its end (`all-reduce-done`) is none.
    fn of(opcode: &str) -> Option<Kind> {
        Some(match opcode.strip_suffix("-start").unwrap_or(opcode) {
            "all-reduce" => Kind::AllReduce,
            "all-gather" => Kind::AllGather,
            "reduce-scatter" => Kind::ReduceScatter,
            "all-to-all" | "ragged-all-to-all" => Kind::AllToAll,
            "collective-permute" => Kind::Permute,
            "collective-broadcast" => Kind::Broadcast,
            _ => return None,
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Collectives of one kind. Bytes are those of a device's operand, and for all-gathers those of its result: the whole
/// that the devices of a group share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub count: u64,
    pub bytes: u64,
}

/// The collectives of a program by kind.
pub type Collectives = BTreeMap<Kind, Traffic>;

/// The module inside an `HloModuleProtoWithConfig`. `None` if the bytes are no such message.
pub fn module_of(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(ModuleWithConfig::decode(bytes).ok()?.module)
}

/// The collectives of a module, each counted once, however often a loop around it runs. `None` if the bytes are no
/// module.
pub fn collectives(module: &[u8]) -> Option<Collectives> {
    let module = Module::decode(module).ok()?;
    let mut all = Collectives::new();
    for computation in &module.computations {
        let shapes: BTreeMap<i64, &Shape> =
            computation.instructions.iter().filter_map(|i| Some((i.id, i.shape.as_ref()?))).collect();
        for instruction in &computation.instructions {
            let Some(kind) = Kind::of(&instruction.opcode) else { continue };
            let operands: u64 = instruction.operands.iter().filter_map(|id| shapes.get(id)).map(|s| s.bytes()).sum();
            let result = instruction.shape.as_ref().map_or(0, Shape::bytes);
            let bytes = match kind {
                // The start of an all-gather has its operands in its result too.
                Kind::AllGather if instruction.opcode.ends_with("-start") => result.saturating_sub(operands),
                Kind::AllGather => result,
                _ => operands,
            };
            let traffic = all.entry(kind).or_default();
            traffic.count += 1;
            traffic.bytes += bytes;
        }
    }
    Some(all)
}

impl Shape {
    /// Bytes of the elements, without padding.
    fn bytes(&self) -> u64 {
        if !self.parts.is_empty() {
            return self.parts.iter().map(Shape::bytes).sum();
        }
        let elements = self.dimensions.iter().fold(1_u64, |n, &d| n.saturating_mul(d.max(0) as u64));
        elements.saturating_mul(bits(self.element)).div_ceil(8)
    }
}

/// The width of an element type of XLA. Tokens and tuples have none.
fn bits(element: i32) -> u64 {
    match element {
        26 | 27 => 2,
        21 | 22 | 32 => 4,
        1 | 2 | 6 | 19 | 20 | 23 | 24 | 25 | 28 | 29 | 33 => 8,
        3 | 7 | 10 | 16 => 16,
        4 | 8 | 11 => 32,
        5 | 9 | 12 | 15 => 64,
        18 => 128,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: i32 = 11;
    const BF16: i32 = 16;

    fn array(element: i32, dimensions: &[i64]) -> Shape {
        Shape { element, dimensions: dimensions.to_vec(), parts: Vec::new() }
    }

    fn instruction(id: i64, opcode: &str, shape: Shape, operands: &[i64]) -> Instruction {
        Instruction { opcode: opcode.into(), shape: Some(shape), id, operands: operands.to_vec() }
    }

    #[test]
    fn collectives_are_counted_where_they_begin_with_the_bytes_that_devices_share() {
        let tuple = |parts: Vec<Shape>| Shape { element: 13, dimensions: Vec::new(), parts };
        let entry = Computation {
            instructions: vec![
                instruction(1, "parameter", array(F32, &[8, 4]), &[]),
                instruction(2, "parameter", array(BF16, &[6]), &[]),
                instruction(3, "all-reduce-start", tuple(vec![array(F32, &[8, 4]), array(BF16, &[6])]), &[1, 2]),
                instruction(4, "all-reduce-done", tuple(vec![array(F32, &[8, 4]), array(BF16, &[6])]), &[3]),
                instruction(5, "all-gather-start", tuple(vec![array(BF16, &[6]), array(BF16, &[24])]), &[2]),
                instruction(6, "all-gather-done", array(BF16, &[24]), &[5]),
                instruction(7, "all-gather", array(F32, &[16, 4]), &[1]),
                instruction(8, "async-start", array(F32, &[2, 4]), &[1]),
            ],
        };
        let wrapped = Computation {
            instructions: vec![
                instruction(1, "parameter", array(F32, &[8, 4]), &[]),
                instruction(2, "reduce-scatter", array(F32, &[2, 4]), &[1]),
            ],
        };
        let bytes = Module { computations: vec![wrapped, entry] }.encode_to_vec();
        let found = collectives(&bytes).expect("a module");
        let of = |kind| found.get(&kind).map(|t| (t.count, t.bytes));
        assert_eq!(of(Kind::AllReduce), Some((1, 8 * 4 * 4 + 6 * 2)));
        assert_eq!(of(Kind::AllGather), Some((2, 24 * 2 + 16 * 4 * 4)));
        assert_eq!(of(Kind::ReduceScatter), Some((1, 8 * 4 * 4)));
        assert_eq!(found.len(), 3);
        let outer = ModuleWithConfig { module: bytes.clone() }.encode_to_vec();
        assert_eq!(module_of(&outer), Some(bytes));
        assert_eq!(collectives(b"\xff\xff no module"), None);
    }
}
