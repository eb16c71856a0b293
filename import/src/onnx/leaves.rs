//! Tensors that a file holds: which are trained, which are inputs, and which are constants.

use super::convert::{Builder, Scope};
use super::files::{Files, is_of_one_value};
use super::listed::Listed;
use super::prepare::prepare;
use super::proto;
use super::report::OnnxError;
use super::tensor::{External, TensorError, check_raw, elements_of, external_of, from_raw, has_data, type_of};
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{BroadcastInDim, Input, Iota, Op, Parameter};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// The largest number of elements of a constant. A plan should not repeat longer lists of integers.
pub(super) const MOST_CONSTANT_ELEMENTS: u64 = 1 << 16;

/// The purpose of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    /// A setting of the op.
    Setting,
    /// The initial state of a recurrent layer, with a value for each sample.
    State,
    /// Statistics that training updates, but not by gradients.
    Statistic,
    Weight,
}

/// The role of operand `index` of an op, if it is a float.
fn role(op: &str, index: usize) -> Role {
    match (op, index) {
        ("BatchNormalization", 3 | 4) => Role::Statistic,
        ("LSTM" | "GRU" | "RNN", 5) | ("LSTM", 6) => Role::State,
        ("Resize" | "Upsample" | "Clip" | "Pad" | "Dropout" | "OneHot" | "CastLike" | "Range" | "Trilu", 1..) => {
            Role::Setting
        }
        ("Range" | "Shape" | "ConstantOfShape", 0) => Role::Setting,
        ("QuantizeLinear" | "DequantizeLinear" | "QLinearMatMul" | "QLinearConv", 1..) => Role::Setting,
        _ => Role::Weight,
    }
}

/// The file's statements about its tensors, and their uses.
#[derive(Default)]
pub(super) struct Uses<'m> {
    roles: BTreeMap<&'m str, Role>,
    /// The names that PyTorch's exporter lists as parameters.
    parameters: BTreeSet<&'m str>,
    /// The names of floats that are not trained.
    untrained: BTreeSet<&'m str>,
}

impl<'m> Uses<'m> {
    pub(crate) fn of(graph: &'m proto::Graph) -> Self {
        let mut uses = Uses::default();
        let mut aliases: BTreeMap<&str, &str> = BTreeMap::new();
        uses.read(graph, &mut aliases);
        for output in &graph.output {
            uses.note(&output.name, Role::Weight, &aliases);
        }
        uses
    }

    /// Adds the exporter's list, and the tensors that were identified as tables.
    pub(crate) fn with(mut self, listed: &'m Listed, tables: &'m BTreeSet<String>) -> Self {
        self.parameters = listed.parameters.iter().map(String::as_str).collect();
        self.untrained = listed.buffers.iter().chain(tables).map(String::as_str).collect();
        self
    }

    fn read(&mut self, graph: &'m proto::Graph, aliases: &mut BTreeMap<&'m str, &'m str>) {
        for node in &graph.node {
            if let ("Identity", [from], [to]) = (node.op_type.as_str(), node.input.as_slice(), node.output.as_slice()) {
                aliases.insert(to, aliases.get(from.as_str()).copied().unwrap_or(from));
                // It is used. The uses of the copy determine its role.
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

    /// Returns true if any node or output uses the value.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.roles.contains_key(name)
    }

    fn is_constant(&self, tensor: &proto::Tensor, dtype: DType, elements: u64) -> bool {
        let name = tensor.name.as_str();
        if !has_data(tensor) || elements > MOST_CONSTANT_ELEMENTS {
            return false;
        }
        let role = self.roles.get(name).copied();
        let weight = self.parameters.contains(name) || name.ends_with(".weight") || name.ends_with(".bias");
        let fixed = role == Some(Role::State) || self.untrained.contains(name) && role != Some(Role::Statistic);
        let of_one_value = || fixed && is_of_one_value(tensor) == Some(true);
        let setting = role == Some(Role::Setting);
        !dtype.is_float() || setting || elements <= 1 && !weight && role != Some(Role::Statistic) || of_one_value()
    }

    fn is_trained(&self, name: &str, dtype: DType) -> bool {
        let role = self.roles.get(name);
        dtype.is_float() && !self.untrained.contains(name) && !matches!(role, Some(Role::Statistic | Role::State))
    }
}

/// A tensor that a file holds or refers to.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    pub name: String,
    pub ty: TensorType,
    pub data: HeldData,
}

#[derive(Clone, Debug, PartialEq)]
pub enum HeldData {
    /// The elements in the file itself, row major.
    Inline(Vec<f64>),
    /// Little-endian bytes in another file, which [`decode`] reads.
    External(External),
    /// Data that was stripped from the file.
    Missing,
}

/// The tensors of a file, by the names of the graph's leaves.
pub fn held(bytes: &[u8], files: Files) -> Result<Vec<Held>, OnnxError> {
    let graph = prepare(bytes, files)?.model.graph.ok_or(OnnxError::NoGraph)?;
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

/// Decodes the elements of a tensor whose data is in another file.
pub fn decode(ty: &TensorType, bytes: &[u8]) -> Result<Vec<f64>, TensorError> {
    Ok(from_raw(ty.clone(), bytes)?.data)
}

/// A constant. Integers that count from 0 along one dimension become an iota, because counts can scale with the batch
/// and masks are computed from them. Equal slices become a broadcast of one.
pub(super) fn counted(graph: &mut Graph, tensor: Tensor) -> ValueId {
    let Tensor { ty, data } = tensor;
    let mut stride = 1;
    for (dim, &size) in ty.shape.iter().enumerate().rev() {
        let counts = |(at, &x): (usize, &f64)| x == ((at / stride) as u64 % size) as f64;
        if size > 1 && !ty.dtype.is_float() && ty.dtype != DType::Bool && data.iter().enumerate().all(counts) {
            return graph.emit(Op::Iota(Iota { dim, ty }), &[]);
        }
        stride = stride.saturating_mul(size.max(1) as usize);
    }
    if let [count, _, ..] = ty.shape[..]
        && count > 1
        && let width = data.len() / count as usize
        && data.chunks(width.max(1)).all(|slice| slice == &data[..width])
    {
        let mut one = ty.clone();
        one.shape[0] = 1;
        let slice = graph.constant(Literal::dense(one, data[..width].to_vec()));
        let dims = (0..ty.rank()).collect();
        return graph.emit(Op::BroadcastInDim(BroadcastInDim { shape: ty.shape, dims }), &[slice]);
    }
    graph.constant(Literal::dense(ty, data))
}

impl<'m> Builder<'m> {
    /// Defines a tensor of the file. Names of leaves are unique in a graph, so tensors of the same name in several
    /// bodies are numbered.
    pub(crate) fn initializer(
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
            counted(&mut self.graph, elements)
        } else {
            if has_data(tensor) && !tensor.raw_data.is_empty() {
                // The elements are checked when the weights are read. Only the length is checked here, which costs
                // nothing.
                check_raw(&ty, &tensor.raw_data).map_err(fail)?;
            }
            let trained = uses.is_trained(name, ty.dtype);
            let leaf = self.leaf_name(name);
            if !trained {
                self.buffers.push(leaf.clone());
            }
            let op = match trained {
                true => Op::Parameter(Parameter::new(leaf, ty)),
                false => Op::Input(Input { name: leaf, ty }),
            };
            self.leaf(op).map_err(|_| fail(TensorError::TooLarge(Vec::new())))?
        };
        let value = match self.repeated.get(name) {
            Some(&samples) if self.graph.shape(value).first() == Some(&1) => {
                let mut shape = self.graph.shape(value).to_vec();
                shape[0] = samples;
                array::broadcast_to(&mut self.graph, value, &shape).map_err(|_| fail(TensorError::TooLarge(shape)))?
            }
            _ => value,
        };
        scope.define(name, Some(value))
    }

    /// `name`, or `name#2` and so on if a leaf already has that name.
    fn leaf_name(&mut self, name: &str) -> String {
        let count = self.leaf_names.entry(name.to_string()).or_insert(0);
        *count += 1;
        if *count == 1 { name.to_string() } else { format!("{name}#{count}") }
    }
}
