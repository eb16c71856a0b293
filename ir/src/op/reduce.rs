//! Reduce: combines all elements along some dimensions.

use super::elementwise::Running;
use super::product::products_of_others;
use super::*;
use crate::rule::FactorKind;

/// An associative and commutative way to combine elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reducer {
    Sum,
    Product,
    Max,
    Min,
    And,
    Or,
}

impl Reducer {
    pub const ALL: [Reducer; 6] =
        [Reducer::Sum, Reducer::Product, Reducer::Max, Reducer::Min, Reducer::And, Reducer::Or];

    pub fn name(self) -> &'static str {
        match self {
            Reducer::Sum => "sum",
            Reducer::Product => "product",
            Reducer::Max => "max",
            Reducer::Min => "min",
            Reducer::And => "and",
            Reducer::Or => "or",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Reducer> {
        Reducer::ALL.into_iter().find(|r| r.name() == text)
    }

    /// The elementwise op that combines two values.
    pub fn combine(self) -> Binary {
        match self {
            Reducer::Sum => Binary::Add,
            Reducer::Product => Binary::Multiply,
            Reducer::Max => Binary::Maximum,
            Reducer::Min => Binary::Minimum,
            Reducer::And => Binary::And,
            Reducer::Or => Binary::Or,
        }
    }

    /// The value that leaves any other unchanged, for elements of type `dtype`.
    pub fn neutral(self, dtype: DType) -> f64 {
        let steps = f64::powi(2.0, dtype.width() as i32);
        let (least, greatest) = match dtype.float_format() {
            Some(format) => (format.least(), format.most()),
            None if dtype == DType::Bool => (0.0, 1.0),
            None if dtype.is_signed_integer() => (-steps / 2.0, steps / 2.0 - 1.0),
            None => (0.0, steps - 1.0),
        };
        match self {
            Reducer::Sum | Reducer::Or => 0.0,
            Reducer::Product => 1.0,
            Reducer::Max => least,
            Reducer::Min => greatest,
            Reducer::And if dtype == DType::Bool => 1.0,
            Reducer::And => dtype.wrap(-1.0),
        }
    }
}

/// Combines all elements along `dims`, which disappear from the shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reduce {
    pub reducer: Reducer,
    pub dims: Vec<usize>,
}

impl Reduce {
    fn kept(&self, rank: usize) -> Vec<usize> {
        (0..rank).filter(|d| !self.dims.contains(d)).collect()
    }
}

impl Operator for Reduce {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        expect_dims(&self.dims, operands[0].rank())?;
        let dtype = operands[0].dtype;
        if matches!(self.reducer, Reducer::And | Reducer::Or) && dtype.is_float() {
            return Err(ShapeError::DType { dtype });
        }
        let shape: Vec<u64> = self.kept(operands[0].rank()).iter().map(|&d| operands[0].shape[d]).collect();
        Ok(operands[0].with_shape(shape))
    }

    fn rule(&self, operands: &[&TensorType], _: &TensorType) -> ShardingRule {
        let linear = if self.reducer == Reducer::Sum { vec![vec![0]] } else { Vec::new() };
        let mut rule = ShardingRule { linear, ..Default::default() };
        let mut dims = Vec::new();
        for (d, &size) in operands[0].shape.iter().enumerate() {
            let reduced = self.dims.contains(&d);
            let kind = if reduced { FactorKind::Reduction(self.reducer) } else { FactorKind::Parallel };
            let f = rule.factor(size, kind);
            dims.push(vec![f]);
            if !reduced {
                rule.result.push(vec![f]);
            }
        }
        rule.operands = vec![dims];
        rule
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Reduce(self.clone())
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let x = cx.operands[0];
        let shape = cx.graph.shape(x).to_vec();
        let kept = self.kept(shape.len());
        let spread = |graph: &mut Graph, v: ValueId| graph.broadcast(v, &shape, &kept);
        let dx = match self.reducer {
            Reducer::Sum => spread(cx.graph, cx.cotangent),
            Reducer::Product => products_of_others(cx.graph, x, cx.cotangent, &self.dims),
            // Equal extrema share the cotangent, as in JAX.
            Reducer::Max | Reducer::Min => {
                let extremum = spread(cx.graph, cx.result);
                let at = cx.graph.compare(Direction::Eq, x, extremum);
                let dtype = cx.graph.ty(x).dtype;
                let mask = cx.graph.convert(at, dtype);
                let count = cx.graph.reduce(mask, Reducer::Sum, &self.dims);
                let share = cx.graph.div(cx.cotangent, count);
                let share = spread(cx.graph, share);
                cx.graph.mul(share, mask)
            }
            Reducer::And | Reducer::Or => return vec![None],
        };
        vec![Some(dx)]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let kept = self.kept(operands[0].ty.rank());
        let mut running = vec![Running::new(self.reducer, result.dtype); result.elements() as usize];
        let strides = crate::types::strides(&result.shape);
        crate::tensor::for_each_index(operands[0].shape(), |index| {
            let at: u64 = kept.iter().zip(&strides).map(|(&d, stride)| index[d] * stride).sum();
            running[at as usize].add(operands[0].at(index));
        });
        Tensor::new(result.clone(), running.iter().map(Running::value).collect())
    }

    fn flop(&self, operands: &[&TensorType], _: &TensorType) -> u64 {
        operands[0].elements()
    }
}
