//! Constants of a graph: one number for all elements, or one for each.

use crate::tensor::Tensor;
use crate::types::TensorType;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A constant tensor. `batch_power` is the power of the batch with which it scales. A constant that counts summed
/// samples has power 1 (its value at batch `b'` is `value * (b'/b)`), and a reciprocal has -1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Literal {
    pub ty: TensorType,
    pub values: Values,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub batch_power: i8,
}

fn is_zero(power: &i8) -> bool {
    *power == 0
}

/// The elements of a literal, as in the reference semantics (`f64`, row major). Infinities and NaN are written `"inf"`,
/// `"-inf"` and `"nan"` in JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Values {
    Splat(Real),
    Dense(Arc<Vec<Real>>),
}

/// An `f64` whose JSON form includes infinities and NaN. Two are equal if their bits are, and all NaNs are equal.
#[derive(Clone, Copy, Debug)]
pub struct Real(pub f64);

impl PartialEq for Real {
    fn eq(&self, other: &Real) -> bool {
        self.0.to_bits() == other.0.to_bits() || self.0.is_nan() && other.0.is_nan()
    }
}

impl Serialize for Real {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            v if v.is_nan() => s.serialize_str("nan"),
            f64::INFINITY => s.serialize_str("inf"),
            f64::NEG_INFINITY => s.serialize_str("-inf"),
            v => s.serialize_f64(v),
        }
    }
}

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Real, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(f64),
            Word(String),
        }
        match Form::deserialize(d)? {
            Form::Number(v) => Ok(Real(v)),
            Form::Word(w) => match w.as_str() {
                "inf" => Ok(Real(f64::INFINITY)),
                "-inf" => Ok(Real(f64::NEG_INFINITY)),
                "nan" => Ok(Real(f64::NAN)),
                _ => Err(serde::de::Error::custom(format!("'{w}' is not a number"))),
            },
        }
    }
}

impl Literal {
    /// A literal with `value` in every element.
    pub fn splat(ty: TensorType, value: f64) -> Self {
        Literal { ty, values: Values::Splat(Real(value)), batch_power: 0 }
    }

    /// A literal with one value per element, row major. It becomes a splat if all are equal.
    pub fn dense(ty: TensorType, data: Vec<f64>) -> Self {
        match data.first() {
            Some(&first) if data.iter().all(|v| v.to_bits() == first.to_bits()) => Literal::splat(ty, first),
            _ => Literal { ty, values: Values::Dense(Arc::new(data.into_iter().map(Real).collect())), batch_power: 0 },
        }
    }

    /// The number of all elements, if there is just one.
    pub fn as_splat(&self) -> Option<f64> {
        match &self.values {
            Values::Splat(v) => Some(v.0),
            Values::Dense(_) => None,
        }
    }

    pub fn to_tensor(&self) -> Tensor {
        match &self.values {
            Values::Splat(v) => Tensor::splat(self.ty.clone(), v.0),
            Values::Dense(v) => Tensor::new(self.ty.clone(), v.iter().map(|r| r.0).collect()),
        }
    }
}
