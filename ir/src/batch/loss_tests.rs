use super::*;
use crate::batch::{Batched, find_batch, rebatch};
use crate::simplify::simplify;
use crate::text::parse;

/// Weights `w` of 4, samples `x` of `[8, 4]` and a mask `m` of 8. `%4` is the loss per sample, `%5` the masked losses,
/// `%6` their sum, and `%7` the number of kept samples.
const START: &str = r#"
%0: f32[4] = parameter "w"
%1: f32[8,4] = input "x"
%2: f32[8] = input "m"
%3: f32[8] = dot_general(%1, %0) {"lhs_contract":[1],"rhs_contract":[0]}
%4: f32[8] = tanh(%3)
%5: f32[8] = multiply(%4, %2)
%6: f32[] = reduce(%5) {"reducer":"sum","dims":[0]}
%7: f32[] = reduce(%2) {"reducer":"sum","dims":[0]}
%8: f32[] = constant {"value":1.0}
%9: f32[] = constant {"value":0.0}
%10: f32[] = constant {"value":8.0}
%11: f32[] = reduce(%4) {"reducer":"sum","dims":[0]}
"#;

fn batched(body: &str) -> Batched {
    let last = body.trim().lines().last().expect("a node").split(':').next().expect("a value");
    let text = format!("graph \"g\" batch=0 {{{START}{body}\n}} -> ({last})");
    let graph = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let batched = find_batch(&graph, &[Some(0), Some(0)]);
    assert_eq!(batched.doubt, None, "{text}");
    assert_eq!(batched.graph.verify(), [], "{text}");
    batched
}

/// The number of each kind of op over microbatches: sums, means, multiples.
fn ops(graph: &Graph) -> [usize; 3] {
    let graph = simplify(graph);
    Microbatches::ALL.map(|op| graph.nodes.iter().filter(|n| n.op == Op::Microbatches(op)).count())
}

#[test]
fn weighted_means_are_divided_by_totals() {
    for (body, expected) in [
        ("%12: f32[] = divide(%6, %7)", [1, 0, 1]),
        // A count with a positive minimum.
        ("%12: f32[] = maximum(%7, %8)\n%13: f32[] = divide(%6, %12)", [1, 0, 1]),
        ("%12: f32[] = divide(%8, %7)\n%13: f32[] = multiply(%12, %6)", [1, 0, 1]),
        // Weights that are normalised before they are applied.
        (
            "%12: f32[8] = broadcast_in_dim(%7) {\"dims\":[]}\n%13: f32[8] = divide(%2, %12)\n%14: f32[8] = multiply(%4, %13)\n%15: f32[] = reduce(%14) {\"reducer\":\"sum\",\"dims\":[0]}",
            [1, 0, 1],
        ),
        // Sums of products.
        (
            "%12: f32[] = dot_general(%4, %2) {\"lhs_contract\":[0],\"rhs_contract\":[0]}\n%13: f32[] = divide(%12, %7)",
            [1, 0, 1],
        ),
        // One mean divided by another.
        (
            "%12: f32[] = divide(%6, %10)\n%13: f32[] = constant {\"value\":8.0}\n%14: f32[] = divide(%7, %13)\n%15: f32[] = divide(%12, %14)",
            [0, 1, 0],
        ),
        // Zero if nothing is kept.
        (
            "%12: bool[] = compare(%7, %9) {\"direction\":\"GT\"}\n%13: f32[] = divide(%6, %7)\n%14: f32[] = select(%12, %13, %9)",
            [1, 0, 1],
        ),
        // Combined with a plain mean, with a mean of another count, and with a penalty.
        ("%12: f32[] = divide(%6, %7)\n%13: f32[] = divide(%11, %10)\n%14: f32[] = add(%12, %13)", [1, 0, 1]),
        (
            "%12: f32[8] = multiply(%2, %2)\n%13: f32[] = reduce(%12) {\"reducer\":\"sum\",\"dims\":[0]}\n%14: f32[] = divide(%6, %7)\n%15: f32[] = divide(%11, %13)\n%16: f32[] = subtract(%14, %15)",
            [2, 0, 1],
        ),
        (
            "%12: f32[] = reduce(%0) {\"reducer\":\"sum\",\"dims\":[0]}\n%13: f32[] = divide(%6, %7)\n%14: f32[] = add(%12, %13)",
            [1, 0, 1],
        ),
    ] {
        let batched = batched(body);
        assert_eq!((batched.loss, ops(&batched.graph)), (LossKind::Mean, expected), "{body}");
        // A graph that already has these ops has the same kind, also at another size.
        let other = rebatch(&batched.graph, 2).expect("another size");
        let again = find_batch(&other, &[Some(0), Some(0)]);
        assert_eq!((again.loss, &again.graph), (LossKind::Mean, &other), "{body}");
    }
}

#[test]
fn other_losses_have_no_totals() {
    for (body, loss) in [
        ("%12: f32[] = divide(%11, %10)", LossKind::Mean),
        ("%12: f32[] = divide(%6, %8)", LossKind::Sum),
        // Divided by a trained value, or another function of the whole batch.
        ("%12: f32[] = divide(%6, %11)", LossKind::Other),
        ("%12: f32[] = divide(%6, %7)\n%13: f32[] = tanh(%12)", LossKind::Other),
        // A count that needs a total itself: the spread of the mask.
        (
            "%12: f32[8] = broadcast_in_dim(%7) {\"dims\":[]}\n%13: f32[8] = subtract(%2, %12)\n%14: f32[] = reduce(%13) {\"reducer\":\"sum\",\"dims\":[0]}\n%15: f32[] = divide(%6, %14)",
            LossKind::Other,
        ),
    ] {
        let batched = batched(body);
        assert_eq!((batched.loss, ops(&batched.graph)), (loss, [0, 0, 0]), "{body}");
    }
}

#[test]
fn totals_of_what_is_not_known_in_time_are_refused() {
    for (operand, what) in [("%6", "a parameter"), ("%12", "another total")] {
        let body = format!("%12: f32[] = sum_of_microbatches(%7)\n%13: f32[] = mean_of_microbatches({operand})");
        let text = format!("graph \"g\" batch=0 {{{START}{body}\n}} -> (%13)");
        let errors = parse(&text).expect("a graph").verify();
        let message = errors.first().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(message.contains(&format!("%13 depends on {what}")), "{message}");
    }
}
