//! The memory that the messages of a file will take, found before they are read. An empty message of two bytes becomes a
//! struct of hundreds.

use super::proto::{
    Attribute, Dimension, Function, Graph, Node, OperatorSet, Property, Shape, SparseTensor, Tensor, Type,
    TypeOfTensor, ValueInfo,
};
use crate::budget::{Budget, OutOfProportion};

/// The kind of a message in [`super::proto`].
#[derive(Clone, Copy)]
enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    SparseTensor,
    ValueInfo,
    Type,
    TypeOfTensor,
    Shape,
    Function,
    /// One without messages inside.
    Plain(usize),
}

/// A list is moved when it grows, and has room for twice its elements.
const GROWTH: u64 = 2;

/// Bytes of a number of a list.
const NUMBER: u64 = 8;

impl Kind {
    /// The message of a field; `None` for numbers, text and fields that are skipped.
    fn field(self, tag: u64) -> Option<Kind> {
        let property = Kind::Plain(size_of::<Property>());
        let opset = Kind::Plain(size_of::<OperatorSet>());
        Some(match (self, tag) {
            (Kind::Model, 7) => Kind::Graph,
            (Kind::Model, 8) | (Kind::Function, 9) => opset,
            (Kind::Model, 14) | (Kind::Graph, 16) | (Kind::Node, 9) | (Kind::Tensor, 13) => property,
            (Kind::Model, 25) => Kind::Function,
            (Kind::Graph, 1) | (Kind::Function, 7) => Kind::Node,
            (Kind::Graph, 5) | (Kind::Attribute, 5) | (Kind::SparseTensor, 1) => Kind::Tensor,
            (Kind::Graph, 11 | 12) => Kind::ValueInfo,
            (Kind::Graph, 15) | (Kind::Attribute, 22) => Kind::SparseTensor,
            (Kind::Node, 5) | (Kind::Function, 11) => Kind::Attribute,
            (Kind::Attribute, 6) => Kind::Graph,
            (Kind::ValueInfo, 2) => Kind::Type,
            (Kind::Type, 1) => Kind::TypeOfTensor,
            (Kind::TypeOfTensor, 2) => Kind::Shape,
            (Kind::Shape, 1) => Kind::Plain(size_of::<Dimension>()),
            _ => return None,
        })
    }

    /// Returns whether a field without messages holds a list of numbers, packed into bytes.
    fn is_packed(self, tag: u64) -> bool {
        matches!((self, tag), (Kind::Attribute, 7 | 8) | (Kind::Tensor, 1 | 4 | 5 | 7 | 10 | 11))
    }

    fn size(self) -> u64 {
        let size = match self {
            Kind::Model => 0,
            Kind::Graph => size_of::<Graph>(),
            Kind::Node => size_of::<Node>(),
            Kind::Attribute => size_of::<Attribute>(),
            Kind::Tensor => size_of::<Tensor>(),
            Kind::SparseTensor => size_of::<SparseTensor>(),
            Kind::ValueInfo => size_of::<ValueInfo>(),
            Kind::Type => size_of::<Type>(),
            Kind::TypeOfTensor => size_of::<TypeOfTensor>(),
            Kind::Shape => size_of::<Shape>(),
            Kind::Function => size_of::<Function>(),
            Kind::Plain(size) => size,
        };
        size as u64
    }
}

/// Charges what a model in the wire format takes once it is read. Damaged parts are not charged; reading reports them.
pub(super) fn charge(bytes: &[u8], budget: &mut Budget) -> Result<(), OutOfProportion> {
    let mut pending = vec![(Kind::Model, bytes)];
    while let Some((kind, mut rest)) = pending.pop() {
        while let Some(key) = varint(&mut rest) {
            let tag = key >> 3;
            let length = match key & 7 {
                0 => {
                    budget.charge(NUMBER * GROWTH)?;
                    if varint(&mut rest).is_none() { break } else { 0 }
                }
                1 => 8,
                5 => 4,
                2 => match varint(&mut rest) {
                    Some(length) => length,
                    None => break,
                },
                // The ends of a group, whose fields are skipped. They are charged as if they were not.
                _ => 0,
            };
            let Some((inside, after)) = usize::try_from(length).ok().and_then(|n| rest.split_at_checked(n)) else {
                break;
            };
            rest = after;
            match kind.field(tag) {
                Some(message) if key & 7 == 2 => {
                    budget.charge(message.size() * GROWTH)?;
                    pending.push((message, inside));
                }
                _ if kind.is_packed(tag) => budget.charge(length.saturating_mul(NUMBER))?,
                _ => budget.charge(length.saturating_add(size_of::<String>() as u64 * GROWTH))?,
            }
        }
    }
    Ok(())
}

/// Takes a number of at most ten bytes.
fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for i in 0..10 {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << (7 * i);
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::proto::{Graph, Model, Node};
    use super::*;
    use prost::Message;

    #[test]
    fn empty_messages_are_charged_as_what_they_become() {
        let graph = Graph { node: vec![Node::default(); 1_000_000], ..Graph::default() };
        let bytes = Model { graph: Some(graph), ..Model::default() }.encode_to_vec();
        assert!(bytes.len() < 2_000_100, "{}", bytes.len());
        let least = 1_000_000 * size_of::<Node>() as u64;
        let spent = |bytes: &[u8]| {
            let mut budget = Budget::of(1 << 40);
            charge(bytes, &mut budget).map(|()| budget.spent())
        };
        let found = spent(&bytes).expect("a large budget");
        assert!(found >= least && found < 3 * least, "{found} for {least}");
        // More than 64 bytes for each byte of a file, and than any small file may take.
        assert!(found > 64 * bytes.len() as u64 && charge(&bytes, &mut Budget::of(0)).is_err(), "{found}");
        // A cut-off file is charged as far as it goes, and reading it fails.
        assert!(spent(&bytes[..bytes.len() / 2]).is_ok() && Model::decode(&bytes[..bytes.len() / 2]).is_err());
        assert!(spent(&[0xff; 40]).is_ok());
    }
}
