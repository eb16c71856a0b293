//! One node, as seen by the function that lowers it: operands, attributes with their defaults, and known values.

use super::convert::{Builder, Scope};
use super::proto::{self, kind};
use super::report::{ProblemKind, Reject};
use super::tensor::elements_of;
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::tensor::Tensor;
use std::rc::Rc;

pub(super) type One = Result<ValueId, Reject>;
pub(super) type Many = Result<Vec<ValueId>, Reject>;

pub(super) struct Call<'c, 'm> {
    pub builder: &'c mut Builder<'m>,
    pub node: &'m proto::Node,
    pub scope: &'c Scope<'c, 'm>,
    /// The operands. `None` if the name is empty.
    pub operands: Vec<Option<ValueId>>,
    /// The version of the ops' domain that the model uses.
    pub opset: i64,
}

impl<'m> Call<'_, 'm> {
    pub fn g(&mut self) -> &mut Graph {
        &mut self.builder.graph
    }

    /// A required operand.
    pub fn x(&self, index: usize) -> One {
        self.opt(index).ok_or(Reject::Invalid(ProblemKind::Operand { index }))
    }

    pub(crate) fn opt(&self, index: usize) -> Option<ValueId> {
        self.operands.get(index).copied().flatten()
    }

    /// All operands, each of which is required.
    pub fn all(&self) -> Many {
        (0..self.operands.len()).map(|i| self.x(i)).collect()
    }

    pub fn shape(&self, value: ValueId) -> Vec<u64> {
        self.builder.graph.shape(value).to_vec()
    }

    pub fn rank(&self, value: ValueId) -> usize {
        self.builder.graph.shape(value).len()
    }

    pub fn dtype(&self, value: ValueId) -> DType {
        self.builder.graph.ty(value).dtype
    }

    /// Returns true if result `index` is used.
    pub(crate) fn wants(&self, index: usize) -> bool {
        self.node.output.get(index).is_some_and(|name| !name.is_empty())
    }

    /// The attribute of this name. Inside a function, references to attributes of the call are resolved.
    pub fn attribute(&self, name: &str) -> Option<&'m proto::Attribute> {
        let found = self.node.attribute.iter().find(|a| a.name == name)?;
        self.scope.resolved(found)
    }

    pub(crate) fn int_opt(&self, name: &'static str) -> Result<Option<i64>, Reject> {
        let value = |a: &proto::Attribute| a.i.filter(|_| a.kind == kind::INT || a.kind == 0);
        self.attribute(name).map(|a| value(a).ok_or(attribute(name))).transpose()
    }

    pub(crate) fn int(&self, name: &'static str, default: i64) -> Result<i64, Reject> {
        Ok(self.int_opt(name)?.unwrap_or(default))
    }

    pub fn flag(&self, name: &'static str, default: bool) -> Result<bool, Reject> {
        Ok(self.int(name, i64::from(default))? != 0)
    }

    pub(crate) fn float_opt(&self, name: &'static str) -> Result<Option<f64>, Reject> {
        let value = |a: &proto::Attribute| a.f.filter(|_| a.kind == kind::FLOAT || a.kind == 0);
        let short = self.attribute(name).map(|a| value(a).ok_or(attribute(name))).transpose()?;
        // Attributes have f32 precision. Recover the decimal number, such as 1e-5.
        Ok(short.map(|f| f.to_string().parse().unwrap_or(f64::from(f))))
    }

    pub fn float(&self, name: &'static str, default: f64) -> Result<f64, Reject> {
        Ok(self.float_opt(name)?.unwrap_or(default))
    }

    pub(crate) fn ints_opt(&self, name: &'static str) -> Result<Option<&'m [i64]>, Reject> {
        let value = |a: &'m proto::Attribute| (a.kind == kind::INTS || a.kind == 0).then_some(a.ints.as_slice());
        self.attribute(name).map(|a| value(a).ok_or(attribute(name))).transpose()
    }

    pub(crate) fn floats_opt(&self, name: &'static str) -> Result<Option<Vec<f64>>, Reject> {
        let value = |a: &proto::Attribute| {
            (a.kind == kind::FLOATS || a.kind == 0).then(|| a.floats.iter().map(|&f| f64::from(f)).collect())
        };
        self.attribute(name).map(|a| value(a).ok_or(attribute(name))).transpose()
    }

    pub fn text(&self, name: &'static str, default: &'static str) -> Result<&'m str, Reject> {
        let Some(a) = self.attribute(name) else { return Ok(default) };
        let bytes = a.s.as_deref().ok_or(attribute(name))?;
        std::str::from_utf8(bytes).map_err(|_| attribute(name))
    }

    pub fn texts(&self, name: &'static str) -> Result<Option<Vec<&'m str>>, Reject> {
        let Some(a) = self.attribute(name) else { return Ok(None) };
        let text = |bytes: &'m Vec<u8>| std::str::from_utf8(bytes).map_err(|_| attribute(name));
        a.strings.iter().map(text).collect::<Result<Vec<_>, _>>().map(Some)
    }

    pub(crate) fn subgraph(&self, name: &'static str) -> Result<&'m proto::Graph, Reject> {
        self.attribute(name).and_then(|a| a.g.as_deref()).ok_or(attribute(name))
    }

    pub fn tensor(&self, name: &'static str) -> Result<Option<Tensor>, Reject> {
        let Some(a) = self.attribute(name) else { return Ok(None) };
        let tensor = a.t.as_ref().ok_or(attribute(name))?;
        Ok(Some(elements_of(tensor)?))
    }

    /// The dimension of `value` that an attribute gives.
    pub fn axis(&self, name: &'static str, default: i64, value: ValueId) -> Result<usize, Reject> {
        Ok(array::axis(self.int(name, default)?, self.rank(value))?)
    }

    /// The elements of an operand, if they follow from constants.
    pub fn known(&mut self, index: usize) -> Option<Rc<Tensor>> {
        let value = self.opt(index)?;
        self.builder.known.elements(&self.builder.graph, value)
    }

    /// The elements of an operand, which must follow from constants.
    pub fn elements(&mut self, index: usize) -> Result<Rc<Tensor>, Reject> {
        self.x(index)?;
        self.known(index).ok_or(Reject::Invalid(ProblemKind::NotConstant { index }))
    }

    /// The integers of an operand, which must follow from constants.
    pub(crate) fn ints_of(&mut self, index: usize) -> Result<Vec<i64>, Reject> {
        let tensor = self.elements(index)?;
        if tensor.ty.dtype.is_float() || tensor.ty.rank() > 1 {
            return Err(Reject::Invalid(ProblemKind::Value { index }));
        }
        Ok(tensor.data.iter().map(|&x| x as i64).collect())
    }

    /// The numbers of an optional operand.
    pub(crate) fn numbers_of(&mut self, index: usize) -> Result<Option<Vec<f64>>, Reject> {
        if self.opt(index).is_none() {
            return Ok(None);
        }
        Ok(Some(self.elements(index)?.data.clone()))
    }

    /// The only number of an operand, which must follow from constants.
    pub(crate) fn number_of(&mut self, index: usize) -> Result<f64, Reject> {
        match self.elements(index)?.data.as_slice() {
            [only] => Ok(*only),
            _ => Err(Reject::Invalid(ProblemKind::Value { index })),
        }
    }

    /// Integers from an attribute that became an operand in later opsets.
    pub(crate) fn ints_either(&mut self, name: &'static str, index: usize) -> Result<Option<Vec<i64>>, Reject> {
        if let Some(ints) = self.ints_opt(name)? {
            return Ok(Some(ints.to_vec()));
        }
        if self.opt(index).is_none() {
            return Ok(None);
        }
        self.ints_of(index).map(Some)
    }

    /// A number from an attribute that became an operand in later opsets.
    pub(crate) fn number_either(&mut self, name: &'static str, index: usize) -> Result<Option<f64>, Reject> {
        if let Some(number) = self.float_opt(name)? {
            return Ok(Some(number));
        }
        if self.opt(index).is_none() {
            return Ok(None);
        }
        self.number_of(index).map(Some)
    }
}

pub(super) fn attribute(name: &'static str) -> Reject {
    Reject::Invalid(ProblemKind::Attribute { name })
}

pub(super) fn bad_value(index: usize) -> Reject {
    Reject::Invalid(ProblemKind::Value { index })
}

/// Converts integers of a file to sizes.
pub(super) fn sizes(ints: &[i64], name: &'static str) -> Result<Vec<u64>, Reject> {
    ints.iter().map(|&i| u64::try_from(i).map_err(|_| attribute(name))).collect()
}
