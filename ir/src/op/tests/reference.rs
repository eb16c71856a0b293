//! `docs/ops.md`: the name, the operands and the factors of each op, generated from the ops themselves.
//!
//! The page is generated so that it cannot disagree with the code. `UPDATE_GOLDENS=1 cargo test` rewrites it.

use super::*;
use crate::rule::FactorKind;
use std::fmt::Write;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/ops.md");

const HEAD: &str = "\
# Ops

Every op of the IR, written by a test from the ops themselves (`UPDATE_GOLDENS=1 cargo test -p altiplano-ir`).

**Sharding** is the op's rule in the words of einsum, for one example: a letter is a factor, operands stand left of
the arrow. A small letter in the result can be split over devices, and operands with that letter are split alike. A
small letter that is only on the left is reduced: split, it leaves a result that is *partial* over those devices.
`(ab)` is one dimension made of two factors, major first; `-` is a dimension of size one that is repeated.
A capital letter is needed whole on each device; a letter in `[brackets]` can be split into contiguous blocks only.
A window slides over a dimension in `{braces}`: it is split when the factor in them is, and each device gets the edges of
its neighbours' blocks (a halo exchange) where the sizes of both sides allow it.
**Partial** says which operands may be partial sums, so that the result is one (`0`; `0+1`: both together; `0, 1`:
either).
Sums of integers and booleans pass through fewer ops than the sums of floats shown.
**Attributes** are those of the JSON and text forms; `shape` and `dtype` may be left out where the node has a type.
What StableHLO has beyond these is imported as several ops.
**Gradient** is `yes`, `zero` (flat wherever it is defined) or `-` (no float result).

";

/// StableHLO's name of the op, or all names if there are several.
fn stablehlo(op: &Op) -> String {
    match op.name() {
        "parameter" | "input" => "function argument".to_string(),
        "scatter_add" => "`stablehlo.scatter` (add)".to_string(),
        "gather" => "`stablehlo.gather`, `stablehlo.dynamic_slice`".to_string(),
        "scatter" => match op {
            Op::Scatter(Scatter { combine: Combine::Replace, .. }) => {
                "`stablehlo.scatter`, `stablehlo.dynamic_update_slice`".to_string()
            }
            _ => "`stablehlo.scatter`".to_string(),
        },
        "threefry" => "JAX's `@threefry2x32`, `stablehlo.rng_bit_generator`".to_string(),
        "grouped_dot" | "grouped_outer" => "`chlo.ragged_dot`".to_string(),
        "arg_sort" => "`stablehlo.sort`, `chlo.top_k`".to_string(),
        "cumulative" => "`stablehlo.reduce_window` of all that comes before".to_string(),
        "erf" | "erfc" => format!("`chlo.{}`", op.name()),
        "axis_index" => "`stablehlo.partition_id`".to_string(),
        "local_slice" => "`stablehlo.dynamic_slice`".to_string(),
        "shift" => "`stablehlo.collective_permute`".to_string(),
        "keep_first" | "halo" | "roll" | "stop_gradient" | "host_load" | "host_store" => "-".to_string(),
        _ if matches!(op, Op::Microbatches(_)) => "-".to_string(),
        _ if matches!(op, Op::Composite(_)) => "several ops".to_string(),
        name => format!("`stablehlo.{name}`"),
    }
}

/// The element types for which the case is defined if they replace its main type.
fn dtypes(case: &Case) -> String {
    let main = match case.operands.iter().find(|t| t.dtype == case.result.dtype) {
        Some(_) => case.result.dtype,
        None => case.operands.first().map_or(case.result.dtype, |t| t.dtype),
    };
    let defined = |dtype: DType| {
        let replace = |ty: &TensorType| if ty.dtype == main { ty.with_dtype(dtype) } else { ty.clone() };
        let operands: Vec<TensorType> = case.operands.iter().map(replace).collect();
        let op = match &case.op {
            Op::Parameter(p) => Op::Parameter(Parameter { ty: replace(&p.ty), ..p.clone() }),
            Op::Input(p) => Op::Input(Input { ty: replace(&p.ty), ..p.clone() }),
            Op::Iota(p) => Op::Iota(Iota { ty: replace(&p.ty), ..p.clone() }),
            Op::Constant(p) => Op::Constant(Literal { ty: replace(&p.ty), ..p.clone() }),
            Op::BitcastConvert(_) => Op::BitcastConvert(BitcastConvert { dtype }),
            Op::AxisIndex(p) => Op::AxisIndex(AxisIndex { dtype, ..p.clone() }),
            op => op.clone(),
        };
        op.infer(&operands.iter().collect::<Vec<_>>()).is_ok()
    };
    type Kind = (&'static str, fn(DType) -> bool);
    let kinds: [Kind; 4] = [
        ("float", DType::is_float),
        ("signed", DType::is_signed_integer),
        ("unsigned", DType::is_unsigned_integer),
        ("bool", |d| d == DType::Bool),
    ];
    let mut found = Vec::new();
    for (name, is_kind) in kinds {
        let (some, others): (Vec<DType>, Vec<DType>) =
            DType::ALL.into_iter().filter(|&d| is_kind(d)).partition(|&d| defined(d));
        match others.as_slice() {
            [] => found.push(name),
            _ => found.extend(some.iter().map(|d| d.name())),
        }
    }
    match found.len() {
        4 if found == kinds.map(|k| k.0) => "all".to_string(),
        _ => found.join(", "),
    }
}

/// The rule in einsum notation.
fn words(case: &Case) -> (String, String) {
    let rule = case.op.rule(&case.types(), &case.result);
    let letter = |f: u8| {
        let kind = rule.factors[f as usize].kind;
        let name = |f: u8| (b'a' + (8 + f) % 26) as char;
        if let Some(window) = rule.windows.iter().find(|w| w.factor == f) {
            return format!("{{{}}}", window.followers.iter().map(|&f| name(f)).collect::<String>());
        }
        let small = name(f);
        match (kind == FactorKind::Whole, rule.contiguous.contains(&f)) {
            (true, _) => small.to_ascii_uppercase().to_string(),
            (false, true) => format!("[{small}]"),
            (false, false) => small.to_string(),
        }
    };
    let tensor = |dims: &Vec<Vec<u8>>| {
        let dim = |factors: &Vec<u8>| match factors.as_slice() {
            [] => "-".to_string(),
            [one] => letter(*one),
            many => format!("({})", many.iter().map(|&f| letter(f)).collect::<String>()),
        };
        let text: String = dims.iter().map(dim).collect();
        if text.is_empty() { "scalar".to_string() } else { text }
    };
    let operands: Vec<String> = rule.operands.iter().map(tensor).collect();
    let mut words = format!("`{} -> {}`", operands.join(", "), tensor(&rule.result)).replace("` ->", "`->");
    let mut kinds: Vec<String> = Vec::new();
    for (f, factor) in rule.factors.iter().enumerate() {
        if let FactorKind::Reduction(reducer) = factor.kind {
            kinds.push(format!("{}: {}", letter(f as u8), reducer.name()));
        }
    }
    if !kinds.is_empty() {
        let _ = write!(words, " ({})", kinds.join(", "));
    }
    let set = |set: &Vec<u8>| set.iter().map(|o| o.to_string()).collect::<Vec<_>>().join("+");
    let sets: Vec<String> = rule.linear.iter().map(set).collect();
    (words, if sets.is_empty() { "-".to_string() } else { sets.join(", ") })
}

/// The attributes in any case of this op, as if its type implied none.
fn attribute_names(name: &str) -> String {
    let other = TensorType::new(DType::U16, [9, 9, 9, 9, 9]);
    let mut keys: Vec<&str> = Vec::new();
    for case in cases().iter().filter(|c| c.op.name() == name) {
        for (key, _) in crate::text::attributes::attributes(&case.op, &other) {
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
    }
    if keys.is_empty() { "-".to_string() } else { keys.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ") }
}

fn gradient(case: &Case) -> &'static str {
    if !case.result.dtype.is_float() || !case.operands.iter().any(|t| t.dtype.is_float()) {
        return "-";
    }
    let mut graph = Graph::new("gradient");
    for (i, ty) in case.operands.iter().enumerate() {
        graph.emit(Op::Input(Input { name: format!("x{i}"), ty: ty.clone() }), &[]);
    }
    let operands: Vec<ValueId> = graph.values().collect();
    let result = graph.emit(case.op.clone(), &operands);
    let cotangent = graph.splat_like(result, 1.0);
    let wanted = vec![true; operands.len()];
    let mut cx =
        Gradient { graph: &mut graph, operands: &operands, result, cotangent, wanted: &wanted, fused_loss: true };
    let found = case.op.gradient(&mut cx);
    if found.iter().any(|g| g.is_some()) { "yes" } else { "zero" }
}

fn page() -> String {
    let mut page = HEAD.to_string();
    page.push_str("| op | StableHLO | element types | sharding | partial | gradient | attributes |\n");
    page.push_str("| --- | --- | --- | --- | --- | --- | --- |\n");
    let mut done = BTreeSet::new();
    for case in cases() {
        // If rules differ by an attribute, each value has a row. Otherwise the op's first case has one.
        let name = match &case.op {
            Op::Reduce(r) => format!("`reduce` {}", r.reducer.name()),
            Op::Cumulative(r) => format!("`cumulative` {}", r.reducer.name()),
            Op::Scatter(s) => format!("`scatter` {}", s.combine.name()),
            op => format!("`{}`", op.name()),
        };
        if !done.insert(name.clone()) {
            continue;
        }
        let local = matches!(case.op, Op::Collective(_) | Op::AxisIndex(_) | Op::HostCopy(_));
        let (sharding, partial) = if local { ("local graphs only".to_string(), "-".to_string()) } else { words(&case) };
        let gradient = if local { "-" } else { gradient(&case) };
        let (stablehlo, dtypes, attributes) = (stablehlo(&case.op), dtypes(&case), attribute_names(case.op.name()));
        let _ =
            writeln!(page, "| {name} | {stablehlo} | {dtypes} | {sharding} | {partial} | {gradient} | {attributes} |");
    }
    page
}

#[test]
fn the_page_of_ops_is_up_to_date() {
    let page = page();
    if std::env::var_os("UPDATE_GOLDENS").is_some_and(|v| v == "1") {
        std::fs::write(PATH, &page).expect("docs/ops.md is written");
    }
    let found = std::fs::read_to_string(PATH).unwrap_or_default();
    assert!(found == page, "docs/ops.md is stale; UPDATE_GOLDENS=1 cargo test -p altiplano-ir rewrites it");
}
