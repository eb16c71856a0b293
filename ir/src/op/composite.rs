//! Composites: functions that models are made of, each one op to the planner.
//!
//! A composite has the semantics of its decomposition, a small graph of other ops that [`crate::array`] builds.
//! Everything else follows from that graph: the rule (which loops can be split, and the collectives inside), the
//! gradient, the local program and the reference semantics. Plans contain composites, and programs contain their
//! decompositions.

use super::decomposition::Decomposition;
use super::*;
use crate::array::{self, Built, RotaryHalves};
use crate::literal::Real;
use std::sync::{Arc, Mutex};

/// The function that a composite computes. Its numbers do not depend on sizes.
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
    /// `gelu(x)` by the error function, and its tanh approximation.
    GeluErf,
    GeluTanh,
    /// `x logistic(x)`
    Silu,
    /// `mean(x)` over dimensions, which are removed.
    Mean {
        dims: Vec<usize>,
    },
    /// `layer_norm(x, weight, bias)` over the weight's dimensions.
    LayerNorm {
        eps: Real,
    },
    /// `rms_norm(x, weight)` over the weight's dimensions.
    RmsNorm {
        eps: Real,
    },
    /// `batch_norm(x, weight, bias)` normalises each feature (along dimension `dim`) by its mean and variance over all
    /// other dimensions. `batch_norm(x, weight, bias, mean, variance)` uses the given statistics.
    BatchNorm {
        dim: usize,
        eps: Real,
    },
    /// `attention(q, k, v)` or `attention(q, k, v, mask)`: see [`array::attention_of_heads`]. With several blocks, keys
    /// and values go around a ring: see [`array::ring_attention`].
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
    /// `gates(logits)`: the softmax along the last dimension for the `chosen` greatest values, and zero elsewhere. See
    /// [`array::gates`].
    Gates {
        chosen: u64,
        normalised: bool,
    },
    /// `cross_entropy(logits, labels)`: `-log softmax(logits)` along a dimension at each label, one value per label.
    CrossEntropy {
        dim: usize,
    },
    /// `linear_cross_entropy(x, weight, labels)`: cross-entropy that computes logits one chunk of positions at a time
    /// and never keeps them. See [`array::linear_label_losses`].
    LinearCrossEntropy {
        contract: usize,
        chunks: u64,
    },
    /// `selective_scan(x, step, rate, taken, asked)`: see [`array::selective_scan`].
    SelectiveScan,
}

/// Attention in one block.
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
    /// The decomposition for the operand types that were asked for last. A node asks for the same types again and
    /// again.
    #[serde(skip)]
    known: Known,
}

/// A cache, which is not part of the op's value.
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
            Function::SelectiveScan => "selective_scan",
        }
    }

    /// Returns true if the backward pass always recomputes the values inside, whatever else a plan recomputes. Only the
    /// operands are kept.
    pub fn recomputes_inside(&self) -> bool {
        matches!(self, Function::LinearCrossEntropy { .. } | Function::SelectiveScan)
    }

    /// The smallest and the largest number of operands.
    fn operands(&self) -> (usize, usize) {
        match self {
            Function::LayerNorm { .. } | Function::Rotary { .. } | Function::LinearCrossEntropy { .. } => (3, 3),
            Function::RmsNorm { .. } | Function::CrossEntropy { .. } => (2, 2),
            Function::Attention { .. } => (3, 4),
            Function::BatchNorm { .. } => (3, 5),
            Function::SelectiveScan => (5, 5),
            _ => (1, 1),
        }
    }

    /// Appends the decomposition to a graph.
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
            Function::SelectiveScan => array::selective_scan(g, [x[0], x[1], x[2], x[3], x[4]]),
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

    /// Returns true if [`Composite::body`] for operands of these types is cached.
    pub(crate) fn is_built_for(&self, operands: &[&TensorType]) -> bool {
        let known = self.known.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        known.as_ref().is_some_and(|body| body.takes(operands))
    }

    /// [`Composite::body`] for a node of a verified graph.
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

    fn work(&self, operands: &[&TensorType], _: &TensorType) -> u64 {
        let body = self.verified(operands);
        body.graph.values().map(|v| body.graph.work(v)).fold(0, u64::saturating_add)
    }
}
