//! Composites: functions that models are made of, each one op to the planner.
//!
//! A composite means what its decomposition means, a small graph of other ops that [`crate::array`] writes. Everything else
//! follows from that graph: its rule (which of its loops can be split, and what has to be exchanged inside), its gradient,
//! its local program and its reference semantics. Plans are made of composites and programs of their decompositions.

use super::decomposition::Decomposition;
use super::*;
use crate::array::{self, Built, RotaryHalves};
use crate::literal::Real;
use std::sync::{Arc, Mutex};

/// What a composite computes. Numbers in it do not depend on sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Function {
    /// `softmax(x)` along a dimension.
    Softmax {
        dim: usize,
    },
    LogSoftmax {
        dim: usize,
    },
    /// `gelu(x)` by the error function, and its approximation by a hyperbolic tangent.
    GeluErf,
    GeluTanh,
    /// `x logistic(x)`
    Silu,
    /// `mean(x)` over dimensions, which go.
    Mean {
        dims: Vec<usize>,
    },
    /// `layer_norm(x, weight, bias)` over the dimensions that the weight has.
    LayerNorm {
        eps: Real,
    },
    /// `rms_norm(x, weight)` over the dimensions that the weight has.
    RmsNorm {
        eps: Real,
    },
    /// `batch_norm(x, weight, bias)` by the mean and variance of each feature (dimension `dim`) over all else, and
    /// `batch_norm(x, weight, bias, mean, variance)` by given ones.
    BatchNorm {
        dim: usize,
        eps: Real,
    },
    /// `attention(q, k, v)` or `attention(q, k, v, mask)`: see [`array::attention_of_heads`], and for several blocks, of which keys
    /// and values go around a ring, [`array::ring_attention`].
    Attention {
        scale: Real,
        causal: bool,
        #[serde(default = "whole", skip_serializing_if = "is_whole")]
        blocks: u64,
    },
    /// `rotary(x, cosine, sine)`: see [`array::rotary`].
    Rotary {
        halves: RotaryHalves,
    },
    /// `gates(logits)`: the softmax along the last dimension where it is among the greatest, and zero elsewhere: see
    /// [`array::gates`].
    Gates {
        chosen: u64,
        normalised: bool,
    },
    /// `cross_entropy(logits, labels)`: `-log softmax(logits)` along a dimension at each label, a value for each label.
    CrossEntropy {
        dim: usize,
    },
    /// `linear_cross_entropy(x, weight, labels)`: the losses of logits that are made a chunk of positions at a time and never kept:
    /// see [`array::linear_label_losses`].
    LinearCrossEntropy {
        contract: usize,
        chunks: u64,
    },
}

/// Attention as one block.
fn whole() -> u64 {
    1
}

fn is_whole(blocks: &u64) -> bool {
    *blocks == whole()
}

/// A [`Function`] of a node's operands.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Composite {
    pub function: Function,
    /// The decomposition for the types that were asked for last: a node asks for the same ones again and again.
    #[serde(skip)]
    known: Known,
}

/// Not a part of the op's value.
#[derive(Clone, Default)]
struct Known(Arc<Mutex<Option<Arc<Decomposition>>>>);

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("_")
    }
}

impl PartialEq for Composite {
    fn eq(&self, other: &Composite) -> bool {
        self.function == other.function
    }
}

impl From<Function> for Op {
    fn from(function: Function) -> Op {
        Op::Composite(Composite { function, known: Known::default() })
    }
}

impl Function {
    pub fn name(&self) -> &'static str {
        match self {
            Function::Softmax { .. } => "softmax",
            Function::LogSoftmax { .. } => "log_softmax",
            Function::GeluErf => "gelu_erf",
            Function::GeluTanh => "gelu_tanh",
            Function::Silu => "silu",
            Function::Mean { .. } => "mean",
            Function::LayerNorm { .. } => "layer_norm",
            Function::RmsNorm { .. } => "rms_norm",
            Function::BatchNorm { .. } => "batch_norm",
            Function::Attention { .. } => "attention",
            Function::Rotary { .. } => "rotary",
            Function::Gates { .. } => "gates",
            Function::CrossEntropy { .. } => "cross_entropy",
            Function::LinearCrossEntropy { .. } => "linear_cross_entropy",
        }
    }

    /// True if the backward pass computes the values inside again, whatever else a plan recomputes. Only the operands are kept.
    pub fn recomputes_inside(&self) -> bool {
        matches!(self, Function::LinearCrossEntropy { .. })
    }

    /// The least and the greatest number of operands.
    fn operands(&self) -> (usize, usize) {
        match self {
            Function::LayerNorm { .. } | Function::Rotary { .. } | Function::LinearCrossEntropy { .. } => (3, 3),
            Function::RmsNorm { .. } | Function::CrossEntropy { .. } => (2, 2),
            Function::Attention { .. } => (3, 4),
            Function::BatchNorm { .. } => (3, 5),
            _ => (1, 1),
        }
    }

    /// Appends the decomposition.
    pub fn build(&self, g: &mut Graph, x: &[ValueId]) -> Built {
        let (least, most) = self.operands();
        if !(least..=most).contains(&x.len()) {
            return Err(ShapeError::OperandCount { expected: least, found: x.len() });
        }
        if !g.ty(x[0]).dtype.is_float() {
            return Err(ShapeError::DType { dtype: g.ty(x[0]).dtype });
        }
        match self {
            Function::Softmax { dim } => array::softmax(g, x[0], *dim),
            Function::LogSoftmax { dim } => array::log_softmax(g, x[0], *dim),
            Function::GeluErf => array::gelu_erf(g, x[0]),
            Function::GeluTanh => array::gelu_tanh(g, x[0]),
            Function::Silu => array::silu(g, x[0]),
            Function::Mean { dims } => array::mean(g, x[0], dims, false),
            Function::LayerNorm { eps } => {
                array::layer_norm(g, x[0], g.shape(x[1]).len(), Some(x[1]), Some(x[2]), eps.0)
            }
            Function::RmsNorm { eps } => array::rms_norm(g, x[0], g.shape(x[1]).len(), Some(x[1]), eps.0),
            Function::BatchNorm { dim, eps } => match *x {
                [x, weight, bias] => array::batch_norm_training(g, x, *dim, Some(weight), Some(bias), eps.0),
                [x, weight, bias, mean, variance] => {
                    array::batch_norm(g, x, *dim, Some(weight), Some(bias), mean, variance, eps.0)
                }
                _ => Err(ShapeError::OperandCount { expected: most, found: x.len() }),
            },
            Function::Gates { chosen, normalised } => array::gates(g, x[0], *chosen, *normalised),
            Function::Attention { scale, causal, blocks: 1 } => {
                array::attention_of_heads(g, x[0], x[1], x[2], x.get(3).copied(), scale.0, *causal)
            }
            Function::Attention { scale, causal, blocks } => {
                array::ring_attention(g, [x[0], x[1], x[2]], x.get(3).copied(), scale.0, *causal, *blocks)
            }
            Function::Rotary { halves } => array::rotary(g, x[0], x[1], x[2], *halves),
            Function::CrossEntropy { dim } => array::label_losses(g, x[0], x[1], *dim),
            Function::LinearCrossEntropy { contract, chunks } => {
                array::linear_label_losses(g, [x[0], x[1], x[2]], *contract, *chunks)
            }
        }
    }
}

impl Composite {
    /// The decomposition for operands of these types.
    pub fn body(&self, operands: &[&TensorType]) -> Result<Arc<Decomposition>, ShapeError> {
        let mut known = self.known.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(body) = known.as_ref().filter(|body| body.takes(operands)) {
            return Ok(body.clone());
        }
        let body = Arc::new(Decomposition::new(&self.function, operands)?);
        *known = Some(body.clone());
        Ok(body)
    }

    /// Whether [`Composite::body`] for operands of these types is there already.
    pub fn is_built_for(&self, operands: &[&TensorType]) -> bool {
        let known = self.known.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        known.as_ref().is_some_and(|body| body.takes(operands))
    }

    /// [`Composite::body`] of a node of a verified graph.
    fn verified(&self, operands: &[&TensorType]) -> Arc<Decomposition> {
        match self.body(operands) {
            Ok(body) => body,
            Err(error) => panic!("{} of a verified graph {error}", self.function.name()),
        }
    }
}

impl Operator for Composite {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        Ok(self.body(operands)?.result().clone())
    }

    fn rule(&self, operands: &[&TensorType], _: &TensorType) -> ShardingRule {
        self.verified(operands).rule.clone()
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        self.function.clone().into()
    }

    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let types: Vec<&TensorType> = cx.operand_types.iter().collect();
        self.verified(&types).local(cx)
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let types: Vec<TensorType> = cx.operands.iter().map(|&o| cx.graph.ty(o).clone()).collect();
        self.verified(&types.iter().collect::<Vec<_>>()).gradient(cx)
    }

    fn eval(&self, operands: &[&Tensor], _: &TensorType) -> Tensor {
        let types: Vec<&TensorType> = operands.iter().map(|t| &t.ty).collect();
        let body = self.verified(&types);
        let mut leaves = operands.iter();
        let leaf = |_| leaves.next().map(|t| (*t).clone()).unwrap_or_else(|| Tensor::scalar(DType::F32, f64::NAN));
        crate::interpret::run(&body.graph, leaf).remove(0)
    }

    fn flop(&self, operands: &[&TensorType], _: &TensorType) -> u64 {
        let body = self.verified(operands);
        body.graph.values().map(|v| body.graph.flop(v)).fold(0, u64::saturating_add)
    }
}
