//! A call of an op, as its lowering sees it: arguments by name, with access to the defaults of the op's schema.

use super::convert::{Converter, Environment};
use super::memory::{Tensor, View, behind_autograd};
use super::report::{ProblemKind, Reject, other};
use super::schema::{self, Argument};
use super::table::Lowering;
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::types::TensorType;
use serde::Deserialize;
use serde_json::Value;
use std::rc::Rc;

/// An argument or result.
#[derive(Clone, Debug)]
pub enum Item {
    None,
    Tensor(Tensor),
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    DType(DType),
    List(Vec<Item>),
    Graph(Rc<schema::Graph>),
    /// A complex tensor, stored as a real one with the two parts along a last dimension.
    Complex(Tensor),
    /// The parts of a complex number.
    ComplexNumber([f64; 2]),
    /// A data-dependent number. Holds the tensor with that single element, unless the number is a size.
    Data(Option<Tensor>),
    /// A tensor inside `vmap`, and the number of enclosing maps, whose dimensions come first.
    Mapped(Tensor, usize),
    /// The result of an op that could not be converted, whose type is not known either.
    Missing,
    /// A device, a layout, or another item that does not affect values.
    Opaque,
}

/// The result of a lowering.
pub enum Out {
    Value(ValueId),
    Values(Vec<ValueId>),
    /// Views of the first argument's memory.
    Views(Vec<Vec<View>>),
    /// A value that may share the first argument's memory: the program leaves it open, or a view cannot express
    /// it.
    Maybe(ValueId),
    /// The first argument itself.
    Same,
    Items(Vec<Item>),
    Nothing,
}

/// A number or a tensor, for ops that take both.
#[derive(Clone, Copy, Debug)]
pub enum Operand {
    Tensor(ValueId),
    Int(i64),
    Float(f64),
    Bool(bool),
}

pub struct Call<'c> {
    pub to: &'c mut Converter,
    /// The base name, such as `add` for `torch.ops.aten.add_.Tensor`.
    pub name: &'c str,
    pub arguments: Vec<(&'c str, Item)>,
    /// Types of the results, where the file declares them.
    pub declared: Vec<Option<TensorType>>,
    /// The first result if it is an integer that the file and the given sizes determine.
    pub number: Option<i64>,
    /// True if the memory of `self` is in row-major order.
    pub row_major: bool,
}

impl Call<'_> {
    /// Converts an argument of the file to an item.
    pub(crate) fn item(argument: &Argument, environment: &Environment) -> Result<Item, Reject> {
        let malformed = || Reject::from(ProblemKind::Other("has an argument that cannot be read"));
        let Some((kind, value)) = argument.parts() else { return Ok(Item::None) };
        item(kind, value, environment)?.ok_or_else(malformed)
    }

    pub fn g(&mut self) -> &mut Graph {
        &mut self.to.graph
    }

    /// The results as the program names them, with changes in place applied.
    pub fn results(&mut self, lowering: Lowering) -> Result<Vec<Item>, Reject> {
        let out = lowering.apply(self)?;
        if self.in_place() {
            let target = self.handle(0)?;
            let new = match out {
                Out::Value(value) => value,
                Out::Same => return Ok(vec![Item::Tensor(target)]),
                _ => return Err(Reject::Unsupported("in place")),
            };
            let old = self.read(target)?;
            let ty = self.g().ty(old).clone();
            let new = array::convert(self.g(), new, ty.dtype)?;
            let mut new = array::broadcast_to(self.g(), new, &ty.shape)?;
            if self.to.no_grad && ty.dtype.is_float() {
                new = match (self.to.is_trained(old), self.to.is_trained(new)) {
                    (true, _) => behind_autograd(self.g(), old, new)?,
                    (false, true) => array::stop_gradient(self.g(), new)?,
                    (false, false) => new,
                };
            }
            self.to.memory.write(&mut self.to.graph, target, new)?;
            return Ok(vec![Item::Tensor(target)]);
        }
        Ok(match out {
            Out::Value(value) => vec![Item::Tensor(self.to.memory.fresh(value))],
            Out::Values(values) => values.into_iter().map(|v| Item::Tensor(self.to.memory.fresh(v))).collect(),
            Out::Views(all) => {
                let source = self.handle(0)?;
                let mut items = Vec::with_capacity(all.len());
                for views in all {
                    let mut tensor = source;
                    for view in views {
                        tensor = self.to.memory.view(&mut self.to.graph, tensor, view)?;
                    }
                    items.push(Item::Tensor(tensor));
                }
                items
            }
            Out::Maybe(value) => {
                let source = self.handle(0)?;
                vec![Item::Tensor(self.to.memory.maybe_view(source, value))]
            }
            Out::Same => vec![Item::Tensor(self.handle(0)?)],
            Out::Items(items) => items,
            Out::Nothing => Vec::new(),
        })
    }

    /// `add_` changes its first argument; `__and__` does not.
    pub fn in_place(&self) -> bool {
        self.name.ends_with('_') && !self.name.ends_with("__")
    }

    pub fn read(&mut self, tensor: Tensor) -> Result<ValueId, Reject> {
        self.to.memory.read(&mut self.to.graph, tensor)
    }

    /// The tensor at argument `position`.
    pub fn handle(&self, position: usize) -> Result<Tensor, Reject> {
        match self.arguments.get(position) {
            Some((_, Item::Tensor(tensor) | Item::Complex(tensor))) => Ok(*tensor),
            _ => Err(self.missing("self", "a tensor")),
        }
    }

    /// The first argument.
    pub fn first_item(&self) -> Result<&Item, Reject> {
        self.arguments.first().map(|(_, item)| item).ok_or_else(|| self.missing("self", "a tensor"))
    }

    fn missing(&self, name: &str, expected: &'static str) -> Reject {
        if matches!(self.get(name), Some(Item::Data(_))) {
            return data_dependent();
        }
        ProblemKind::Argument { name: name.into(), expected }.into()
    }

    /// The argument with this name; `None` if it is omitted or `None`.
    pub fn get(&self, name: &str) -> Option<&Item> {
        let found = self.arguments.iter().find(|(known, _)| *known == name).map(|(_, item)| item);
        found.filter(|item| !matches!(item, Item::None))
    }

    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(crate) fn is_tensor(&self, name: &str) -> bool {
        matches!(self.get(name), Some(Item::Tensor(_)))
    }

    pub fn tensor(&mut self, name: &str) -> Result<ValueId, Reject> {
        match self.get(name) {
            Some(Item::Tensor(tensor)) => {
                let tensor = *tensor;
                self.read(tensor)
            }
            _ => Err(self.missing(name, "a tensor")),
        }
    }

    /// The op's first argument, under any name.
    pub fn first(&mut self) -> Result<ValueId, Reject> {
        let tensor = self.handle(0)?;
        self.read(tensor)
    }

    pub(crate) fn maybe_tensor(&mut self, name: &str) -> Result<Option<ValueId>, Reject> {
        if self.has(name) { self.tensor(name).map(Some) } else { Ok(None) }
    }

    pub fn tensors(&mut self, name: &str) -> Result<Vec<ValueId>, Reject> {
        let all = self.maybe_tensors(name)?;
        all.into_iter().map(|v| v.ok_or_else(|| self.missing(name, "a list of tensors"))).collect()
    }

    /// A list of tensors with optional entries.
    pub(crate) fn maybe_tensors(&mut self, name: &str) -> Result<Vec<Option<ValueId>>, Reject> {
        let Some(Item::List(items)) = self.get(name) else { return Err(self.missing(name, "a list of tensors")) };
        let items = items.clone();
        let mut values = Vec::with_capacity(items.len());
        for item in items {
            values.push(match item {
                Item::Tensor(tensor) => Some(self.read(tensor)?),
                Item::None => None,
                _ => return Err(self.missing(name, "a list of tensors")),
            });
        }
        Ok(values)
    }

    pub fn operand(&mut self, name: &str) -> Result<Operand, Reject> {
        Ok(match self.get(name) {
            Some(Item::Int(n)) => Operand::Int(*n),
            Some(Item::Float(x)) => Operand::Float(*x),
            Some(Item::Bool(b)) => Operand::Bool(*b),
            Some(Item::Tensor(_)) => Operand::Tensor(self.tensor(name)?),
            Some(&Item::Data(Some(tensor))) => Operand::Tensor(self.read(tensor)?),
            _ => return Err(self.missing(name, "a tensor or a number")),
        })
    }

    pub(crate) fn maybe_int(&self, name: &str) -> Result<Option<i64>, Reject> {
        match self.get(name) {
            None => Ok(None),
            Some(Item::Int(n)) => Ok(Some(*n)),
            Some(Item::Bool(b)) => Ok(Some(i64::from(*b))),
            Some(Item::Float(x)) if x.fract() == 0.0 && x.abs() < 1e15 => Ok(Some(*x as i64)),
            Some(_) => Err(self.missing(name, "a whole number")),
        }
    }

    pub(crate) fn int(&self, name: &str, default: i64) -> Result<i64, Reject> {
        Ok(self.maybe_int(name)?.unwrap_or(default))
    }

    /// An integer argument without a default in the schema.
    pub(crate) fn needed_int(&self, name: &str) -> Result<i64, Reject> {
        self.maybe_int(name)?.ok_or_else(|| self.missing(name, "a whole number"))
    }

    pub fn size(&self, name: &str) -> Result<u64, Reject> {
        u64::try_from(self.needed_int(name)?).map_err(|_| self.missing(name, "a size"))
    }

    pub(crate) fn maybe_float(&self, name: &str) -> Result<Option<f64>, Reject> {
        match self.get(name) {
            None => Ok(None),
            Some(Item::Float(x)) => Ok(Some(*x)),
            Some(Item::Int(n)) => Ok(Some(*n as f64)),
            Some(Item::Bool(b)) => Ok(Some(f64::from(u8::from(*b)))),
            Some(_) => Err(self.missing(name, "a number")),
        }
    }

    pub fn float(&self, name: &str, default: f64) -> Result<f64, Reject> {
        Ok(self.maybe_float(name)?.unwrap_or(default))
    }

    pub fn bool(&self, name: &str, default: bool) -> Result<bool, Reject> {
        match self.get(name) {
            None => Ok(default),
            Some(Item::Bool(b)) => Ok(*b),
            Some(Item::Int(n)) => Ok(*n != 0),
            Some(_) => Err(self.missing(name, "true or false")),
        }
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        match self.get(name) {
            Some(Item::Text(text)) => Some(text),
            _ => None,
        }
    }

    pub fn dtype(&self, name: &str) -> Result<Option<DType>, Reject> {
        match self.get(name) {
            None => Ok(None),
            Some(Item::DType(dtype)) => Ok(Some(*dtype)),
            Some(_) => Err(Reject::Unsupported("of an element type that tensors here cannot have")),
        }
    }

    pub(crate) fn maybe_ints(&self, name: &str) -> Result<Option<Vec<i64>>, Reject> {
        let number = |item: &Item| match item {
            Item::Int(n) => Some(*n),
            _ => None,
        };
        match self.get(name) {
            None => Ok(None),
            Some(Item::Int(n)) => Ok(Some(vec![*n])),
            Some(Item::List(items)) => {
                if items.iter().any(|item| matches!(item, Item::Data(_))) {
                    return Err(data_dependent());
                }
                let all: Option<Vec<i64>> = items.iter().map(number).collect();
                all.map(Some).ok_or_else(|| self.missing(name, "a list of whole numbers"))
            }
            Some(_) => Err(self.missing(name, "a list of whole numbers")),
        }
    }

    pub fn ints(&self, name: &str) -> Result<Vec<i64>, Reject> {
        self.maybe_ints(name)?.ok_or_else(|| self.missing(name, "a list of whole numbers"))
    }

    pub fn shape(&self, name: &str) -> Result<Vec<u64>, Reject> {
        let sizes: Option<Vec<u64>> = self.ints(name)?.into_iter().map(|n| u64::try_from(n).ok()).collect();
        sizes.ok_or_else(|| self.missing(name, "a list of sizes"))
    }

    /// One number for each of `n` dimensions. A single number applies to all of them.
    pub(crate) fn per_dim(&self, name: &str, n: usize, default: i64) -> Result<Vec<i64>, Reject> {
        match self.maybe_ints(name)?.unwrap_or_default().as_slice() {
            [] => Ok(vec![default; n]),
            [one] => Ok(vec![*one; n]),
            all if all.len() == n => Ok(all.to_vec()),
            _ => Err(self.missing(name, "a number for each dimension")),
        }
    }

    /// [`Self::per_dim`] for numbers that must not be negative.
    pub(crate) fn sizes_per_dim(&self, name: &str, n: usize, default: i64) -> Result<Vec<u64>, Reject> {
        let all: Option<Vec<u64>> =
            self.per_dim(name, n, default)?.into_iter().map(|v| u64::try_from(v).ok()).collect();
        all.ok_or_else(|| self.missing(name, "a size for each dimension"))
    }

    /// The dimension that an argument names in a tensor of `rank`. A scalar accepts 0 and -1.
    pub fn dim(&self, name: &str, default: i64, rank: usize) -> Result<usize, Reject> {
        Ok(array::axis(self.int(name, default)?, rank.max(1))?)
    }

    /// The dimensions that an argument names; all dimensions if it is omitted or empty.
    pub fn dims(&self, name: &str, rank: usize) -> Result<Vec<usize>, Reject> {
        match self.maybe_ints(name)? {
            Some(dims) if !dims.is_empty() && rank == 0 => {
                array::axes(&dims, 1)?;
                Ok(Vec::new())
            }
            Some(dims) if !dims.is_empty() => Ok(array::axes(&dims, rank)?),
            _ => Ok((0..rank).collect()),
        }
    }

    pub fn rank(&mut self, x: ValueId) -> usize {
        self.to.graph.shape(x).len()
    }

    pub(crate) fn shape_of(&self, x: ValueId) -> Vec<u64> {
        self.to.graph.shape(x).to_vec()
    }

    pub fn dtype_of(&self, x: ValueId) -> DType {
        self.to.graph.ty(x).dtype
    }

    /// The declared element type of the first result, or `default`.
    pub(crate) fn declared_dtype(&self, default: DType) -> DType {
        self.declared.first().and_then(|ty| ty.as_ref()).map_or(default, |ty| ty.dtype)
    }

    /// All elements of a value that depends on no leaf; `None` if it does, or if evaluating it is expensive.
    pub fn constant(&self, value: ValueId) -> Option<Vec<f64>> {
        super::fold::constant(&self.to.graph, value)
    }
}

fn item(kind: &str, value: &Value, environment: &Environment) -> Result<Option<Item>, Reject> {
    let lookup = |name: Option<&Value>| -> Result<Option<Item>, Reject> {
        let Some(name) = name.and_then(Value::as_str) else { return Ok(None) };
        let found = environment.get(name).cloned();
        found.map(Some).ok_or_else(|| ProblemKind::Undefined { name: name.into() }.into())
    };
    let list = |kind: &str| -> Result<Option<Item>, Reject> {
        let Value::Array(all) = value else { return Ok(None) };
        let items: Result<Option<Vec<Item>>, Reject> = all.iter().map(|v| item(kind, v, environment)).collect();
        Ok(items?.map(Item::List))
    };
    Ok(match kind {
        "as_none" => Some(Item::None),
        "as_tensor" => lookup(value.get("name"))?,
        "as_tensors" => list("as_tensor")?,
        "as_nested_tensors" => list("as_tensors")?,
        "as_int" => value.as_i64().map(Item::Int),
        "as_ints" => list("as_int")?,
        "as_int_lists" => list("as_ints")?,
        "as_float" => float(value).map(Item::Float),
        "as_floats" => list("as_float")?,
        "as_bool" => value.as_bool().map(Item::Bool),
        "as_bools" => list("as_bool")?,
        "as_complex" => match (value.get("real").and_then(float), value.get("imag").and_then(float)) {
            (Some(re), Some(im)) => Some(Item::ComplexNumber([re, im])),
            _ => None,
        },
        "as_string" => value.as_str().map(|text| Item::Text(text.to_string())),
        "as_strings" => list("as_string")?,
        "as_scalar_type" => Some(value.as_u64().and_then(schema::dtype).map_or(Item::Opaque, Item::DType)),
        "as_sym_int" | "as_sym_float" | "as_sym_bool" | "as_optional_tensor" => match value.as_object() {
            Some(inner) => match inner.iter().find(|(_, v)| !v.is_null()) {
                Some((kind, name)) if kind == "as_name" => lookup(Some(name))?,
                Some((kind, inner)) => item(kind, inner, environment)?,
                None => Some(Item::None),
            },
            None => None,
        },
        "as_sym_ints" => list("as_sym_int")?,
        "as_sym_floats" => list("as_sym_float")?,
        "as_optional_tensors" => list("as_optional_tensor")?,
        "as_graph" => {
            let graph = value.get("graph").map(schema::Graph::deserialize);
            graph.and_then(Result::ok).map(|graph| Item::Graph(Rc::new(graph)))
        }
        _ => Some(Item::Opaque),
    })
}

/// Parses a float. JSON has no syntax for infinities and NaN, so files spell them in several ways.
fn float(value: &Value) -> Option<f64> {
    match value {
        Value::String(text) => match text.to_lowercase().trim_start_matches('+') {
            "inf" | "infinity" => Some(f64::INFINITY),
            "-inf" | "-infinity" => Some(f64::NEG_INFINITY),
            "nan" => Some(f64::NAN),
            _ => None,
        },
        value => value.as_f64(),
    }
}

/// The detail for an op whose result size depends on values of its operands.
pub(crate) const SIZE_OF_DATA: &str = "whose result has a size that depends on data";

/// The error for an op whose result depends on values that are only known at run time.
pub(crate) fn data_dependent() -> Reject {
    Reject::Unsupported(SIZE_OF_DATA)
}

/// The error for an invalid op, with a message.
pub(crate) fn problem<T>(text: &'static str) -> Result<T, Reject> {
    Err(other(text))
}
