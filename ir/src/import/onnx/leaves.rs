//! Tensors that a file holds: which are trained, which are given, and which are constants.

use super::convert::{Builder, Scope};
use super::proto;
use super::report::OnnxError;
use super::tensor::{External, TensorError, check_raw, elements_of, external_of, from_raw, has_data, type_of};
use crate::dtype::DType;
use crate::literal::Literal;
use crate::op::{Input, Op, Parameter};
use crate::types::TensorType;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};

/// More integers than this are no constant that a plan should repeat.
const MOST_CONSTANT_ELEMENTS: u64 = 1 << 16;

/// What an operand is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    /// Sets how the op works.
    Setting,
    /// Statistics that training updates, but no gradient.
    Statistic,
    Weight,
}

/// What operand `index` of an op is, if it is a float.
fn role(op: &str, index: usize) -> Role {
    match (op, index) {
        ("BatchNormalization", 3 | 4) => Role::Statistic,
        ("Resize" | "Upsample" | "Clip" | "Pad" | "Dropout" | "OneHot" | "CastLike" | "Range" | "Trilu", 1..) => {
            Role::Setting
        }
        ("Range" | "Shape" | "ConstantOfShape", 0) => Role::Setting,
        ("QuantizeLinear" | "DequantizeLinear" | "QLinearMatMul" | "QLinearConv", 1..) => Role::Setting,
        _ => Role::Weight,
    }
}

/// What a file says and shows of its tensors.
#[derive(Default)]
pub(super) struct Uses<'m> {
    roles: BTreeMap<&'m str, Role>,
    /// Names that PyTorch's exporter lists as parameters, and as buffers.
    parameters: BTreeSet<&'m str>,
    buffers: BTreeSet<&'m str>,
}

impl<'m> Uses<'m> {
    pub fn of(graph: &'m proto::Graph, properties: &'m [proto::Property]) -> Self {
        let mut uses = Uses::default();
        let mut aliases: BTreeMap<&str, &str> = BTreeMap::new();
        uses.read(graph, &mut aliases);
        for output in &graph.output {
            uses.note(&output.name, Role::Weight, &aliases);
        }
        let signature = |p: &&proto::Property| p.key == "pkg.torch.export.ExportedProgram.graph_signature";
        for line in properties.iter().find(signature).into_iter().flat_map(|p| p.value.lines()) {
            let target = line.split_once("target='").and_then(|(_, rest)| rest.split('\'').next());
            match target {
                Some(name) if line.contains(": PARAMETER ") => uses.parameters.insert(name),
                Some(name) if line.contains(": BUFFER ") => uses.buffers.insert(name),
                _ => false,
            };
        }
        uses
    }

    fn read(&mut self, graph: &'m proto::Graph, aliases: &mut BTreeMap<&'m str, &'m str>) {
        for node in &graph.node {
            if let ("Identity", [from], [to]) = (node.op_type.as_str(), node.input.as_slice(), node.output.as_slice()) {
                aliases.insert(to, aliases.get(from.as_str()).copied().unwrap_or(from));
                // Used at all: what for is seen where the copy is used.
                self.roles.entry(from).or_insert(Role::Setting);
                continue;
            }
            for (index, name) in node.input.iter().enumerate() {
                self.note(name, role(&node.op_type, index), aliases);
            }
            for body in node.attribute.iter().filter_map(|a| a.g.as_deref()) {
                self.read(body, aliases);
                body.output.iter().for_each(|output| self.note(&output.name, Role::Weight, aliases));
            }
        }
    }

    fn note(&mut self, name: &'m str, role: Role, aliases: &BTreeMap<&'m str, &'m str>) {
        let name = aliases.get(name).copied().unwrap_or(name);
        let known = self.roles.entry(name).or_insert(role);
        *known = (*known).max(role);
    }

    /// Whether any node or output uses the value.
    pub fn has(&self, name: &str) -> bool {
        self.roles.contains_key(name)
    }

    fn is_constant(&self, tensor: &proto::Tensor, dtype: DType, elements: u64) -> bool {
        let name = tensor.name.as_str();
        if !has_data(tensor) || elements > MOST_CONSTANT_ELEMENTS {
            return false;
        }
        let setting = self.roles.get(name) == Some(&Role::Setting);
        let weight = self.parameters.contains(name) || name.ends_with(".weight") || name.ends_with(".bias");
        !dtype.is_float() || setting || elements <= 1 && !weight && self.roles.get(name) != Some(&Role::Statistic)
    }

    fn is_trained(&self, name: &str, dtype: DType) -> bool {
        dtype.is_float() && !self.buffers.contains(name) && self.roles.get(name) != Some(&Role::Statistic)
    }
}

/// A tensor that a file holds or names.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    pub name: String,
    pub ty: TensorType,
    pub data: HeldData,
}

#[derive(Clone, Debug, PartialEq)]
pub enum HeldData {
    /// Row major, in the file itself.
    Inline(Vec<f64>),
    /// Little-endian bytes of another file, which [`decode`] reads.
    External(External),
    /// Stripped from the file.
    Missing,
}

/// The tensors of a file by the names that its graph's leaves have.
pub fn held(bytes: &[u8]) -> Result<Vec<Held>, OnnxError> {
    let model = proto::Model::decode(bytes)?;
    let graph = model.graph.ok_or(OnnxError::NoGraph)?;
    let one = |tensor: &proto::Tensor| -> Result<Held, TensorError> {
        let data = match external_of(tensor)? {
            Some(external) => HeldData::External(external),
            None if has_data(tensor) => HeldData::Inline(elements_of(tensor)?.data),
            None => HeldData::Missing,
        };
        Ok(Held { name: tensor.name.clone(), ty: type_of(tensor)?, data })
    };
    let all = graph.initializer.iter();
    all.map(|t| one(t).map_err(|error| OnnxError::Initializer { name: t.name.clone(), error })).collect()
}

/// The elements of a tensor whose data is in another file.
pub fn decode(ty: &TensorType, bytes: &[u8]) -> Result<Vec<f64>, TensorError> {
    Ok(from_raw(ty.clone(), bytes)?.data)
}

impl<'m> Builder<'m> {
    /// Defines a tensor of the file. Names of leaves are unique in a graph, so bodies that hold tensors of one name number them.
    pub fn initializer(
        &mut self,
        tensor: &'m proto::Tensor,
        uses: &Uses,
        scope: &mut Scope<'_, 'm>,
    ) -> Result<(), OnnxError> {
        let name = tensor.name.as_str();
        let fail = |error| OnnxError::Initializer { name: name.to_string(), error };
        let ty = type_of(tensor).map_err(fail)?;
        let value = if uses.is_constant(tensor, ty.dtype, ty.elements()) {
            let elements = elements_of(tensor).map_err(fail)?;
            self.graph.constant(Literal::dense(elements.ty, elements.data))
        } else {
            if has_data(tensor) && !tensor.raw_data.is_empty() {
                // What is read with the weights is checked with them, but for its length, which costs nothing.
                check_raw(&ty, &tensor.raw_data).map_err(fail)?;
            }
            let trained = uses.is_trained(name, ty.dtype);
            let leaf = self.leaf_name(name);
            if !trained {
                self.buffers.push(leaf.clone());
            }
            let op = match trained {
                true => Op::Parameter(Parameter { name: leaf, ty }),
                false => Op::Input(Input { name: leaf, ty }),
            };
            self.leaf(op).map_err(|_| fail(TensorError::TooLarge(Vec::new())))?
        };
        scope.define(name, Some(value))
    }

    /// `name`, or where a leaf is called so already, `name#2`.
    fn leaf_name(&mut self, name: &str) -> String {
        let count = self.leaf_names.entry(name.to_string()).or_insert(0);
        *count += 1;
        if *count == 1 { name.to_string() } else { format!("{name}#{count}") }
    }
}
