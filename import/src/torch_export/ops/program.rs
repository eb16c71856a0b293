//! Lowers ops on values other than tensors: sizes, assertions, and nested graphs.

use super::super::call::Item;
use super::super::convert::Environment;
use super::super::memory::{Tensor, View};
use super::super::schema;
use super::super::sizes::{floor_div, modulo};
use super::*;
use Lowering::{Function, Ignored, Sizes};
use altiplano_ir::literal::Literal;
use std::rc::Rc;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("sym_size", Function(size_of_dim)),
    ("sym_stride", Function(|_| Err(Reject::Unsupported("")))),
    ("sym_numel", Function(elements)),
    ("numel", Function(elements)),
    ("item", Function(item)),
    ("_local_scalar_dense", Function(item)),
    ("sym_constrain_range", Ignored),
    ("sym_constrain_range_for_size", Ignored),
    ("_assert_scalar", Ignored),
    ("_assert_async", Ignored),
    ("_assert_tensor_metadata", Ignored),
    ("_operator.add", Sizes(|x| Some(x.first()? + x.get(1)?))),
    ("_operator.sub", Sizes(|x| Some(x.first()? - x.get(1)?))),
    ("_operator.mul", Sizes(|x| Some(x.first()? * x.get(1)?))),
    ("_operator.truediv", Sizes(|x| Some(x.first()? / x.get(1)?))),
    ("_operator.floordiv", Sizes(|x| whole(x, floor_div))),
    ("_operator.mod", Sizes(|x| whole(x, modulo))),
    ("_operator.pow", Sizes(|x| Some(x.first()?.powf(*x.get(1)?)))),
    ("_operator.neg", Sizes(|x| Some(-*x.first()?))),
    ("_operator.pos", Sizes(|x| x.first().copied())),
    ("_operator.eq", Sizes(|x| truth(x.first()? == x.get(1)?))),
    ("_operator.ne", Sizes(|x| truth(x.first()? != x.get(1)?))),
    ("_operator.lt", Sizes(|x| truth(x.first()? < x.get(1)?))),
    ("_operator.le", Sizes(|x| truth(x.first()? <= x.get(1)?))),
    ("_operator.gt", Sizes(|x| truth(x.first()? > x.get(1)?))),
    ("_operator.ge", Sizes(|x| truth(x.first()? >= x.get(1)?))),
    ("_operator.and", Sizes(|x| whole(x, |a, b| Some(a & b)))),
    ("_operator.or", Sizes(|x| whole(x, |a, b| Some(a | b)))),
    ("_operator.lshift", Sizes(|x| whole(x, |a, b| a.checked_shl(u32::try_from(b).ok()?)))),
    ("_operator.rshift", Sizes(|x| whole(x, |a, b| a.checked_shr(u32::try_from(b).ok()?)))),
    ("math.trunc", Sizes(|x| Some(x.first()?.trunc()))),
    ("math.floor", Sizes(|x| Some(x.first()?.floor()))),
    ("math.ceil", Sizes(|x| Some(x.first()?.ceil()))),
    ("torch.sym_int", Sizes(|x| Some(x.first()?.trunc()))),
    ("torch.sym_float", Sizes(|x| x.first().copied())),
    ("torch.sym_not", Sizes(|x| truth(*x.first()? == 0.0))),
    ("torch.sym_max", Sizes(|x| Some(x.first()?.max(*x.get(1)?)))),
    ("torch.sym_min", Sizes(|x| Some(x.first()?.min(*x.get(1)?)))),
    ("torch.sym_ite", Sizes(|x| if *x.first()? != 0.0 { x.get(1).copied() } else { x.get(2).copied() })),
    ("torch._sym_sqrt", Sizes(|x| Some(x.first()?.sqrt()))),
    ("torch.sym_sum", Function(sum_of_sizes)),
    ("higher_order.wrap_with_set_grad_enabled", Function(inline)),
    ("higher_order.wrap_with_autocast", Function(inline)),
    ("higher_order.wrap", Function(inline)),
    ("higher_order.wrap_activation_checkpoint", Function(inline)),
    ("higher_order.tag_activation_checkpoint", Function(inline)),
    ("higher_order.invoke_subgraph", Function(inline)),
    ("higher_order.hints_wrapper", Function(inline)),
    ("higher_order.strict_mode", Function(inline)),
    ("higher_order.cond", Function(cond)),
    ("higher_order.while_loop", Function(while_loop)),
    ("higher_order.scan", Function(scan)),
    ("higher_order.map_impl", Function(map)),
];

/// The maximum number of iterations of a loop. More would make a graph that is too large to plan.
const MOST_TURNS: usize = 4096;

/// Beyond this bound, an `f64` does not represent every integer.
const EXACT: f64 = 9_007_199_254_740_992.0;

fn whole(x: &[f64], f: fn(i64, i64) -> Option<i64>) -> Option<f64> {
    let [a, b] = [*x.first()?, *x.get(1)?];
    (a.fract() == 0.0 && b.fract() == 0.0).then(|| f(a as i64, b as i64))?.map(|n| n as f64)
}

fn truth(b: bool) -> Option<f64> {
    Some(f64::from(u8::from(b)))
}

fn plain(item: &Item) -> Option<f64> {
    match item {
        Item::Int(n) => Some(*n as f64),
        Item::Float(x) => Some(*x),
        Item::Bool(b) => Some(f64::from(u8::from(*b))),
        _ => None,
    }
}

/// Evaluates a function of numbers. The result is an integer unless an argument is a float or the function
/// divides. Comparisons give a boolean.
pub fn sizes(c: &mut Call<'_>, f: fn(&[f64]) -> Option<f64>) -> Lowered {
    if c.arguments.iter().any(|(_, item)| matches!(item, Item::Data(_))) {
        return of_data(c);
    }
    let given: Option<Vec<f64>> = c.arguments.iter().map(|(_, item)| plain(item)).collect();
    let Some(given) = given else { return problem("computes with what is no number") };
    let result = f(&given).filter(|x| x.abs() < EXACT);
    let Some(x) = result else { return problem("gives no number of a sensible size") };
    let comparison = matches!(c.name, "_operator.eq" | "_operator.ne" | "_operator.lt" | "_operator.le")
        || matches!(c.name, "_operator.gt" | "_operator.ge" | "torch.sym_not");
    let divides = matches!(c.name, "_operator.truediv" | "torch.sym_float" | "torch._sym_sqrt");
    let floats = c.arguments.iter().any(|(_, item)| matches!(item, Item::Float(_)));
    let rounds = c.name.starts_with("math.") || c.name == "torch.sym_int";
    Ok(Out::Items(vec![match () {
        _ if comparison => Item::Bool(x != 0.0),
        _ if divides || (floats && !rounds) => Item::Float(x),
        _ => Item::Int(x as i64),
    }]))
}

/// Evaluates a function with a data-dependent argument, which is the only element of a tensor if it may be used
/// as a value.
fn of_data(c: &mut Call<'_>) -> Lowered {
    let op = match c.name {
        "_operator.add" => Binary::Add,
        "_operator.sub" => Binary::Subtract,
        "_operator.mul" => Binary::Multiply,
        "_operator.truediv" => Binary::Divide,
        _ => return Ok(Out::Items(vec![Item::Data(None)])),
    };
    let names: Vec<&str> = c.arguments.iter().map(|(name, _)| *name).collect();
    if c.arguments.iter().any(|(_, item)| matches!(item, Item::Data(None))) || names.len() != 2 {
        return Ok(Out::Items(vec![Item::Data(None)]));
    }
    let both = c.promoted(&names, op == Binary::Divide)?;
    let result = two(c, op, both[0], both[1])?;
    let result = c.to.memory.fresh(result);
    Ok(Out::Items(vec![Item::Data(Some(result))]))
}

fn sum_of_sizes(c: &mut Call<'_>) -> Lowered {
    let Some((_, Item::List(items))) = c.arguments.first() else { return problem("adds what is no list") };
    let given: Option<Vec<f64>> = items.iter().map(plain).collect();
    let total: Option<f64> = given.map(|all| all.iter().sum());
    match total.filter(|x| x.abs() < EXACT) {
        Some(total) => Ok(Out::Items(vec![Item::Int(total as i64)])),
        None => problem("adds what are no numbers"),
    }
}

fn size_of_dim(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let dim = c.dim("dim", 0, shape.len())?;
    match shape.get(dim) {
        Some(&size) => Ok(Out::Items(vec![Item::Int(size as i64)])),
        None => problem("asks for a size of a scalar"),
    }
}

fn elements(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    Ok(Out::Items(vec![Item::Int(c.to.graph.ty(x).elements() as i64)]))
}

/// A tensor's value as a number. If it does not follow from the program alone, it can be used as a value but
/// not as a size.
fn item(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let Some(data) = c.constant(x) else {
        if let Some(n) = c.number {
            return Ok(Out::Items(vec![Item::Int(n)]));
        }
        if c.to.graph.ty(x).elements() != 1 {
            return problem("takes the number of a tensor of several");
        }
        let scalar = a::reshape(c.g(), x, &[])?;
        let scalar = c.to.memory.fresh(scalar);
        return Ok(Out::Items(vec![Item::Data(Some(scalar))]));
    };
    let [only] = data[..] else { return problem("takes the number of a tensor of several") };
    Ok(Out::Items(vec![match c.dtype_of(x) {
        DType::Bool => Item::Bool(only != 0.0),
        dtype if dtype.is_float() => Item::Float(only),
        _ => Item::Int(only as i64),
    }]))
}

/// Inlines the nodes of a graph that an op wraps.
fn inline(c: &mut Call<'_>) -> Lowered {
    let at = c.arguments.iter().position(|(_, item)| matches!(item, Item::Graph(_)));
    let Some(at) = at else { return problem("wraps no graph") };
    let Item::Graph(graph) = c.arguments[at].1.clone() else { return problem("wraps no graph") };
    let mut given: Vec<Item> = c.arguments[at + 1..].iter().map(|(_, item)| item.clone()).collect();
    if c.name == "higher_order.invoke_subgraph" {
        given.retain(|item| !matches!(item, Item::Text(_)));
    }
    // Operands may come as one list.
    if let ([Item::List(all), ..], true) = (given.as_slice(), graph.inputs.len() != given.len()) {
        given = all.clone();
    }
    if given.len() < graph.inputs.len() {
        return problem("gives a graph fewer values than it takes");
    }
    let names = graph.inputs.iter().map(|input| input.name().unwrap_or_default().to_string());
    let own = given_tensors(&given);
    let environment: Environment = names.zip(given).collect();
    let flag = |position: usize| match c.arguments.get(position) {
        Some((_, Item::Bool(b))) => Some(*b),
        _ => None,
    };
    let stops = c.name == "higher_order.wrap_with_set_grad_enabled" && flag(0) == Some(false);
    let outer = (c.to.autocast, c.to.no_grad);
    if c.name == "higher_order.wrap_with_set_grad_enabled" {
        c.to.no_grad = stops;
    }
    if c.name == "higher_order.wrap_with_autocast" {
        let enabled = flag(2).unwrap_or(true);
        let dtype = match c.arguments.get(1) {
            Some((_, Item::DType(dtype))) => *dtype,
            _ => DType::BF16,
        };
        c.to.autocast = enabled.then_some(dtype);
    }
    let results = c.to.run(&graph, environment).map_err(Reject::Stop);
    (c.to.autocast, c.to.no_grad) = outer;
    let mut results = results?;
    if stops {
        for item in &mut results {
            let Item::Tensor(tensor) = item else { continue };
            // A tensor that was changed in place is returned as itself, without a new view.
            if own.contains(tensor) {
                continue;
            }
            let x = c.to.memory.read(&mut c.to.graph, *tensor)?;
            if c.dtype_of(x).is_float() && c.to.is_trained(x) {
                *item = Item::Tensor(c.to.memory.view(&mut c.to.graph, *tensor, View::Stop)?);
            }
        }
    }
    Ok(Out::Items(results))
}

fn given_tensors(items: &[Item]) -> Vec<Tensor> {
    let tensor = |item: &Item| match item {
        Item::Tensor(tensor) => Some(*tensor),
        _ => None,
    };
    items.iter().filter_map(tensor).collect()
}

/// Runs a nested graph on these values.
fn run(c: &mut Call<'_>, graph: &schema::Graph, given: &[Item]) -> Result<Vec<Item>, Reject> {
    if given.len() != graph.inputs.len() {
        return problem("gives a graph another number of values than it takes");
    }
    let names = graph.inputs.iter().map(|input| input.name().unwrap_or_default().to_string());
    let environment: Environment = names.zip(given.iter().cloned()).collect();
    c.to.run(graph, environment).map_err(Reject::Stop)
}

/// The graphs of an op, and the values after them.
fn graphs(c: &Call<'_>) -> Result<([Rc<schema::Graph>; 2], Vec<Item>), Reject> {
    let mut graphs = Vec::new();
    let mut values = Vec::new();
    for (_, item) in &c.arguments {
        match item {
            Item::Graph(graph) => graphs.push(graph.clone()),
            Item::List(all) => values.extend(all.iter().cloned()),
            _ => {}
        }
    }
    match <[_; 2]>::try_from(graphs) {
        Ok(graphs) => Ok((graphs, values)),
        Err(_) => problem("needs two graphs"),
    }
}

/// A truth value, if it follows from the program alone.
fn known(c: &mut Call<'_>, truth: &Item) -> Result<Option<bool>, Reject> {
    Ok(match truth {
        Item::Bool(b) => Some(*b),
        Item::Int(n) => Some(*n != 0),
        Item::Tensor(tensor) | Item::Data(Some(tensor)) => {
            let value = c.to.memory.read(&mut c.to.graph, *tensor)?;
            c.constant(value).and_then(|data| data.first().map(|&x| x != 0.0))
        }
        _ => None,
    })
}

/// Selects one of two graphs. If the condition depends on data, both are computed and one result is selected,
/// since a graph has no branches.
fn cond(c: &mut Call<'_>) -> Lowered {
    let ([on_true, on_false], given) = graphs(c)?;
    let Some((_, predicate)) = c.arguments.first().cloned() else { return problem("has no condition") };
    if let Some(truth) = known(c, &predicate)? {
        return Ok(Out::Items(run(c, if truth { &on_true } else { &on_false }, &given)?));
    }
    let (Item::Tensor(predicate) | Item::Data(Some(predicate))) = predicate else {
        return problem("has a condition that is no truth value");
    };
    let (ours, others) = (run(c, &on_true, &given)?, run(c, &on_false, &given)?);
    let predicate = c.to.memory.read(&mut c.to.graph, predicate)?;
    let predicate = a::reshape(c.g(), predicate, &[])?;
    let mut chosen = Vec::new();
    for pair in ours.iter().zip(&others) {
        chosen.push(match pair {
            (Item::Tensor(x), Item::Tensor(y)) => {
                let (x, y) = (c.to.memory.read(&mut c.to.graph, *x)?, c.to.memory.read(&mut c.to.graph, *y)?);
                let selected = a::select(c.g(), predicate, x, y)?;
                Item::Tensor(c.to.memory.fresh(selected))
            }
            (Item::None, Item::None) => Item::None,
            _ => return Err(Reject::Unsupported("with results that are no tensors")),
        });
    }
    Ok(Out::Items(chosen))
}

/// Unrolls a loop whose number of iterations follows from the program alone.
fn while_loop(c: &mut Call<'_>) -> Lowered {
    let ([condition, body], _) = graphs(c)?;
    let lists = lists(c);
    let (mut carried, others) = match lists.as_slice() {
        [carried] => (carried.clone(), Vec::new()),
        [carried, others] => (carried.clone(), others.clone()),
        _ => return problem("carries no values"),
    };
    for _ in 0..MOST_TURNS {
        let given = [carried.as_slice(), others.as_slice()].concat();
        let again = run(c, &condition, &given)?;
        let Some(again) = again.first().map(|item| known(c, item)).transpose()?.flatten() else {
            return Err(Reject::Unsupported("whose number of turns depends on data"));
        };
        if !again {
            return Ok(Out::Items(carried));
        }
        carried = run(c, &body, &given)?;
        for item in &mut carried {
            counted(c, item)?;
        }
    }
    Err(Reject::Unsupported("of more than 4096 turns"))
}

/// The items of each list among the arguments.
fn lists(c: &Call<'_>) -> Vec<Vec<Item>> {
    let list = |item: &Item| match item {
        Item::List(all) => Some(all.clone()),
        _ => None,
    };
    c.arguments.iter().filter_map(|(_, item)| list(item)).collect()
}

/// The number of slices of the first of these tensors, within the limit of iterations.
fn steps(c: &mut Call<'_>, all: &[Item]) -> Result<u64, Reject> {
    let Some(Item::Tensor(first)) = all.first() else { return problem("runs over no tensor") };
    let x = c.to.memory.read(&mut c.to.graph, *first)?;
    match c.shape_of(x).first() {
        Some(&n) if n as usize <= MOST_TURNS => Ok(n),
        Some(_) => Err(Reject::Unsupported("of more than 4096 turns")),
        None => problem("runs over a scalar"),
    }
}

fn slice_at(c: &mut Call<'_>, item: &Item, at: u64) -> Result<Item, Reject> {
    let Item::Tensor(tensor) = item else { return problem("runs over what is no tensor") };
    let x = c.to.memory.read(&mut c.to.graph, *tensor)?;
    let slice = a::select_dim(c.g(), x, 0, at as i64)?;
    Ok(Item::Tensor(c.to.memory.fresh(slice)))
}

/// Stacks the results of all iterations along a new first dimension.
fn stacked(c: &mut Call<'_>, turns: &[Vec<Item>]) -> Result<Vec<Item>, Reject> {
    let mut all = Vec::new();
    for at in 0..turns.first().map_or(0, Vec::len) {
        let mut parts = Vec::with_capacity(turns.len());
        for turn in turns {
            let Some(Item::Tensor(tensor)) = turn.get(at) else {
                return Err(Reject::Unsupported("with results that are no tensors"));
            };
            parts.push(c.to.memory.read(&mut c.to.graph, *tensor)?);
        }
        let whole = a::stack(c.g(), &parts, 0)?;
        all.push(Item::Tensor(c.to.memory.fresh(whole)));
    }
    Ok(all)
}

fn only_graph(c: &Call<'_>) -> Result<Rc<schema::Graph>, Reject> {
    let graph = c.arguments.iter().find_map(|(_, item)| match item {
        Item::Graph(graph) => Some(graph.clone()),
        _ => None,
    });
    graph.ok_or_else(|| other("needs a graph"))
}

/// Unrolls a loop over slices with carried values.
fn scan(c: &mut Call<'_>) -> Lowered {
    let graph = only_graph(c)?;
    let lists = lists(c);
    let (mut carried, slices, others) = match lists.as_slice() {
        [carried, slices] => (carried.clone(), slices.clone(), Vec::new()),
        [carried, slices, others] => (carried.clone(), slices.clone(), others.clone()),
        _ => return problem("runs over nothing"),
    };
    let mut turns = Vec::new();
    for at in 0..steps(c, &slices)? {
        let mut given = carried.clone();
        for item in &slices {
            given.push(slice_at(c, item, at)?);
        }
        given.extend(others.iter().cloned());
        let mut results = run(c, &graph, &given)?;
        if results.len() < carried.len() {
            return problem("carries other values than it starts with");
        }
        let gives = results.split_off(carried.len());
        carried = results;
        turns.push(gives);
    }
    carried.extend(stacked(c, &turns)?);
    Ok(Out::Items(carried))
}

/// Unrolls a graph that is applied to each slice.
fn map(c: &mut Call<'_>) -> Lowered {
    let graph = only_graph(c)?;
    let lists = lists(c);
    let (slices, others) = match lists.as_slice() {
        [slices] => (slices.clone(), Vec::new()),
        [slices, others] => (slices.clone(), others.clone()),
        _ => return problem("runs over nothing"),
    };
    let mut turns = Vec::new();
    for at in 0..steps(c, &slices)? {
        let mut given = Vec::new();
        for item in &slices {
            given.push(slice_at(c, item, at)?);
        }
        given.extend(others.iter().cloned());
        turns.push(run(c, &graph, &given)?);
    }
    Ok(Out::Items(stacked(c, &turns)?))
}

/// Replaces a counter with its constant, so that later iterations need not evaluate the earlier ones.
fn counted(c: &mut Call<'_>, item: &mut Item) -> Result<(), Reject> {
    let Item::Tensor(tensor) = item else { return Ok(()) };
    let value = c.to.memory.read(&mut c.to.graph, *tensor)?;
    let ty = c.g().ty(value).clone();
    if ty.elements() != 1 || ty.dtype.is_float() {
        return Ok(());
    }
    if let Some(data) = c.constant(value) {
        let constant = c.g().constant(Literal::dense(ty, data));
        *item = Item::Tensor(c.to.memory.fresh(constant));
    }
    Ok(())
}
