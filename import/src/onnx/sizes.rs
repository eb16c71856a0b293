//! Sizes that a file leaves open, with a name such as `batch` or `sequence_length`, or without one.

use super::proto;
use super::report::OnnxError;
use super::tensor::{TensorError, dtype_of};
use altiplano_ir::types::TensorType;

/// A size that the file leaves open, with its assumed value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size {
    /// The name in the file, or `INPUT[DIM]` if it has none.
    pub name: String,
    pub value: u64,
    /// True if the user stated the value.
    pub said: bool,
    /// True if the size appears to be the number of samples, i.e. the first dimension of an input.
    pub is_batch: bool,
}

/// The sizes of inputs, in the order in which they are found.
pub(super) struct Sizes<'o> {
    said: &'o [(String, u64)],
    pub found: Vec<Size>,
}

/// The default batch, which can be split several ways.
const BATCH: u64 = 8;
const SEQUENCE: u64 = 128;
const IMAGE: u64 = 224;

impl<'o> Sizes<'o> {
    pub(crate) fn new(said: &'o [(String, u64)]) -> Self {
        Sizes { said, found: Vec::new() }
    }

    /// The type of an input.
    pub(crate) fn type_of(&mut self, input: &proto::ValueInfo) -> Result<TensorType, OnnxError> {
        let name = || input.name.clone();
        let tensor = input.ty.as_ref().and_then(|ty| ty.tensor.as_ref());
        let tensor = tensor.ok_or_else(|| OnnxError::InputKind { name: name() })?;
        let fail = |error| OnnxError::Input { name: name(), error };
        let dtype = dtype_of(tensor.elem_type).map_err(fail)?;
        let dims = &tensor.shape.as_ref().ok_or_else(|| OnnxError::InputShape { name: name() })?.dim;
        let mut shape = Vec::with_capacity(dims.len());
        for (d, dim) in dims.iter().enumerate() {
            let image = dims.len() == 4 && d >= 2 && dtype.is_float();
            shape.push(match (dim.value, dim.param.as_deref().map(str::trim)) {
                (Some(value), _) if value >= 0 => value as u64,
                // Some exporters write -1 for an open size.
                (Some(value), _) if value != -1 => return Err(fail(TensorError::Size(value))),
                (_, Some(param)) if !param.is_empty() => self.named(param, d == 0, image).map_err(fail)?,
                _ => self.value(&format!("{}[{d}]", input.name), d == 0, image),
            });
        }
        let ty = TensorType::new(dtype, shape);
        if ty.check() { Ok(ty) } else { Err(fail(TensorError::TooLarge(ty.shape))) }
    }

    /// A named size, or a sum of several. Exporters use a sum for the length of a sequence with its past.
    fn named(&mut self, param: &str, first: bool, image: bool) -> Result<u64, TensorError> {
        let is_said = self.said.iter().any(|(name, _)| name == param);
        if is_said || !param.contains('+') {
            return Ok(self.value(param, first, image));
        }
        let mut total = 0u64;
        for part in param.split('+').map(str::trim) {
            let size = part.parse().unwrap_or_else(|_| self.value(part, first, image));
            total = total.checked_add(size).ok_or(TensorError::Size(i64::MAX))?;
        }
        Ok(total)
    }

    fn value(&mut self, name: &str, first: bool, image: bool) -> u64 {
        if let Some(known) = self.found.iter().find(|size| size.name == name) {
            return known.value;
        }
        // There is one number of samples. It may have a name in one input and none in others.
        let batch = self.found.iter().find(|size| size.is_batch);
        let is_batch = first && (batch.is_none() || name.ends_with("[0]"));
        let said = self.said.iter().rev().find(|(said, _)| said == name).map(|(_, value)| *value);
        let value = said.unwrap_or(match name {
            _ if is_batch => batch.map_or(BATCH, |batch| batch.value),
            _ if name.contains("batch") => BATCH,
            _ if name.contains("past") => 0,
            _ if image => IMAGE,
            _ => SEQUENCE,
        });
        self.found.push(Size { name: name.to_string(), value, said: said.is_some(), is_batch });
        value
    }

    /// Checks that all stated sizes exist.
    pub(crate) fn finish(self) -> Result<Vec<Size>, OnnxError> {
        let known = || self.found.iter().map(|size| size.name.clone()).collect();
        match self.said.iter().find(|(name, _)| !self.found.iter().any(|size| size.name == *name)) {
            Some((name, _)) => Err(OnnxError::UnknownSize { name: name.clone(), known: known() }),
            None => Ok(self.found),
        }
    }
}
