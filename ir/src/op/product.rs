//! Cotangents of factors: the product of the other factors times the product's cotangent, even if some factors are
//! zero.

use super::*;

/// The factors of products, with zeros set aside. For a zero, the product of the other factors is the product of all
/// nonzero factors, unless there is another zero.
///
/// The cotangent of a nonzero factor divides by it. That differs from the product of the others by rounding. It also
/// differs if the whole product overflows or underflows and that of the others does not.
pub(super) struct Factors {
    is_zero: ValueId,
    /// The factors, with a one in place of each zero.
    pub others: ValueId,
    /// One for each zero factor and zero elsewhere, in the factors' type.
    pub zeros: ValueId,
}

impl Factors {
    pub(crate) fn new(graph: &mut Graph, factors: ValueId) -> Factors {
        let (zero, one) = (graph.splat_like(factors, 0.0), graph.splat_like(factors, 1.0));
        let is_zero = graph.compare(Direction::Eq, factors, zero);
        let others = graph.select(is_zero, one, factors);
        let zeros = graph.select(is_zero, one, zero);
        Factors { is_zero, others, zeros }
    }

    /// The cotangent of the factors. `products` are the products of `others`, and `zeros` counts the zeros among the
    /// factors of each product. `spread` sums, for each factor, over the products that contain it.
    pub(crate) fn cotangent(
        &self,
        graph: &mut Graph,
        cotangent: ValueId,
        products: ValueId,
        zeros: ValueId,
        spread: impl Fn(&mut Graph, ValueId) -> ValueId,
    ) -> ValueId {
        let scaled = graph.mul(cotangent, products);
        let nothing = graph.splat_like(scaled, 0.0);
        let mut where_zeros_are = |count: f64| {
            let count = graph.splat_like(zeros, count);
            let so_many = graph.compare(Direction::Eq, zeros, count);
            let part = graph.select(so_many, scaled, nothing);
            spread(graph, part)
        };
        let (of_all, of_others) = (where_zeros_are(0.0), where_zeros_are(1.0));
        let quotient = graph.div(of_all, self.others);
        graph.select(self.is_zero, of_others, quotient)
    }
}

/// The cotangent of the factors that a reduction along `dims` multiplies. It is exactly the product of the others,
/// computed by running products from both sides. Dimensions are reduced one after the other, so the work is that of one
/// pass.
pub(super) fn products_of_others(graph: &mut Graph, factors: ValueId, cotangent: ValueId, dims: &[usize]) -> ValueId {
    let Some((&dim, rest)) = dims.split_last() else { return cotangent };
    let shape = graph.shape(factors).to_vec();
    if shape.contains(&0) {
        return factors;
    }
    // The product along the last of the dimensions is one factor in the reduction along the others.
    let product = graph.reduce(factors, Reducer::Product, &[dim]);
    let rest: Vec<usize> = rest.iter().map(|&d| if d > dim { d - 1 } else { d }).collect();
    let cotangent = products_of_others(graph, product, cotangent, &rest);
    let kept: Vec<usize> = (0..shape.len()).filter(|&d| d != dim).collect();
    let spread = graph.broadcast(cotangent, &shape, &kept);
    let one = graph.constant(Literal::splat(TensorType::scalar(graph.ty(factors).dtype), 1.0));
    let mut before = |reverse: bool| {
        let running = Op::Cumulative(Cumulative { reducer: Reducer::Product, dim, reverse });
        let running = graph.emit(running, &[factors]);
        let (mut low, mut high) = (vec![0; shape.len()], vec![0; shape.len()]);
        (low[dim], high[dim]) = if reverse { (-1, 1) } else { (1, -1) };
        let shifted = Pad { low, high, interior: vec![0; shape.len()] };
        graph.emit(Op::Pad(shifted), &[running, one])
    };
    let (left, right) = (before(false), before(true));
    let others = graph.mul(left, right);
    graph.mul(spread, others)
}
