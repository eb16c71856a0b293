use super::*;
use altiplano_ir::array::{Attention, attention, binary, compare, full_like, iota, linear};
use altiplano_ir::literal::Real;
use altiplano_ir::op::{Binary, Direction, Function, Input, Parameter};

fn leaf(g: &mut Graph, shape: &[u64], is_parameter: bool) -> ValueId {
    let (name, ty) = (format!("x{}", g.len()), TensorType::new(DType::BF16, shape.to_vec()));
    let op = if is_parameter { Op::Parameter(Parameter::new(name, ty)) } else { Op::Input(Input { name, ty }) };
    g.push(op, &[]).unwrap()
}

/// Operations of attention over 64 positions, in units of one product (2 x 2 x 4 x 64 x 64 x 8). The forward pass has
/// two products.
fn of_attention(causal: bool, window: Option<f64>, composite: bool, trains: bool, counts: MfuConvention) -> f64 {
    let mut g = Graph::new("attention");
    // In the composite, positions come before heads.
    let shape = if composite { [2, 64, 4, 8] } else { [2, 4, 64, 8] };
    let [q, k, v] = [0; 3].map(|_| leaf(&mut g, &shape, true));
    let mask = window.map(|window| {
        let query = iota(&mut g, &[64, 64], 0, DType::I32).unwrap();
        let key = iota(&mut g, &[64, 64], 1, DType::I32).unwrap();
        let distance = binary(&mut g, Binary::Subtract, query, key).unwrap();
        let (zero, most) = (full_like(&mut g, distance, 0.0).unwrap(), full_like(&mut g, distance, window).unwrap());
        let behind = compare(&mut g, Direction::Ge, distance, zero).unwrap();
        let near = compare(&mut g, Direction::Lt, distance, most).unwrap();
        binary(&mut g, Binary::And, behind, near).unwrap()
    });
    match composite {
        true => {
            let function = Function::Attention { scale: Real(1.0), causal, blocks: 1 };
            let operands: Vec<ValueId> = [q, k, v].into_iter().chain(mask).collect();
            g.push(function.into(), &operands).unwrap();
        }
        false => {
            attention(&mut g, q, k, v, &Attention { scale: None, causal, mask }).unwrap();
        }
    }
    step_work(&g, &[], trains, 1, counts).flop() / (2.0 * 2.0 * 4.0 * 64.0 * 64.0 * 8.0)
}

#[test]
fn attention_counts_what_its_masks_leave() {
    use MfuConvention::{Computed, Full};
    let causal = 65.0 / 128.0;
    // A window of 8 leaves each query 8 of 64 positions, except for the first seven.
    let window = (64.0 * 8.0 - 28.0) / 4096.0;
    for composite in [false, true] {
        let of = |is_causal, window, trains, counts| of_attention(is_causal, window, composite, trains, counts);
        assert_eq!(of(false, None, false, Computed), 2.0);
        assert_eq!(of(true, None, false, Computed), 2.0 * causal);
        assert_eq!(of(true, None, false, Full), 2.0);
        assert_eq!(of(true, None, true, Computed), 6.0 * causal);
        assert_eq!(of(false, Some(8.0), false, Computed), 2.0 * window);
        assert_eq!(of(false, Some(8.0), true, Computed), 6.0 * window);
        assert_eq!(of(false, Some(8.0), true, Full), 6.0);
    }
}

#[test]
fn the_backward_pass_counts_operands_that_have_a_gradient() {
    let mut g = Graph::new("linear");
    let x = leaf(&mut g, &[16, 32], false);
    let [first, second] = [0; 2].map(|_| leaf(&mut g, &[32, 32], true));
    let hidden = linear(&mut g, x, first, None).unwrap();
    linear(&mut g, hidden, second, None).unwrap();
    let product = 2.0 * 16.0 * 32.0 * 32.0;
    let flop = |trains| step_work(&g, &[], trains, 3, MfuConvention::Computed).flop();
    assert_eq!(flop(false), 3.0 * 2.0 * product);
    // The first product needs no gradient of its input.
    assert_eq!(flop(true), 3.0 * (2.0 + 3.0) * product);
    // Nor does the second one, if no cotangent passes from it to the first.
    let stopped = step_work(&g, &[hidden], true, 3, MfuConvention::Computed).flop();
    assert_eq!(stopped, 3.0 * (1.0 + 2.0) * product);
}
