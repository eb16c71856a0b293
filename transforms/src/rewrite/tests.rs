//! Checks each rule against the reference interpreter. Every claimed equality is computed on random sizes and values.

use super::egraph::{Builder, Leaf};
use super::extract::extract;
use super::facts::Fact;
use super::region::{Child, Rewritten};
use super::rules::{RULES, saturate_with};
use super::{Facts, rewrite};
use altiplano_ir::array::{self, Built, RotaryHalves};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::interpret::run;
use altiplano_ir::op::{Binary, Direction, Function, Input, Iota, Op, ReduceWindow, Reducer, Unary, WindowDim};
use altiplano_ir::simplify::simplify;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::testing::numbers::Rng;
use altiplano_ir::types::TensorType;
use egg::Id;
use std::collections::BTreeMap;

/// Writes an expression that a rule changes, with random sizes.
type Example = fn(&mut Writer) -> Built;

/// Appends leaves and ops of an example.
struct Writer {
    g: Graph,
    sizes: Rng,
}

impl Writer {
    /// A norm over `dims` of three dimensions. Its variance is a difference of means, and its factor is folded
    /// beforehand.
    fn norm_by_moments(&mut self, dims: &[usize]) -> Built {
        let shape = [self.size() + 1, self.size() + 1, self.size() + 1];
        let (x, weight) = (self.leaf(&shape), self.leaf(&shape[2..]));
        let centre = array::mean(&mut self.g, x, dims, true)?;
        let square = self.binary(Binary::Multiply, x, x)?;
        let squares = array::mean(&mut self.g, square, dims, true)?;
        let centre_square = self.binary(Binary::Multiply, centre, centre)?;
        let spread = self.binary(Binary::Subtract, squares, centre_square)?;
        let spread = array::relu(&mut self.g, spread)?;
        let safe = array::with_number(&mut self.g, Binary::Add, spread, 0.1)?;
        let root = self.unary(Unary::Rsqrt, safe)?;
        let scale = self.binary(Binary::Multiply, root, weight)?;
        let centred = self.binary(Binary::Subtract, x, centre)?;
        self.binary(Binary::Multiply, centred, scale)
    }

    fn size(&mut self) -> u64 {
        1 + self.sizes.below(4)
    }

    fn even(&mut self) -> u64 {
        2 * self.size()
    }

    fn leaf_of(&mut self, dtype: DType, shape: &[u64]) -> ValueId {
        let ty = TensorType::new(dtype, shape);
        let name = format!("x{}", self.g.len());
        self.g.emit(Op::Input(Input { name, ty }), &[])
    }

    fn leaf(&mut self, shape: &[u64]) -> ValueId {
        self.leaf_of(DType::F32, shape)
    }

    fn binary(&mut self, op: Binary, a: ValueId, b: ValueId) -> Built {
        array::binary(&mut self.g, op, a, b)
    }

    fn unary(&mut self, op: Unary, x: ValueId) -> Built {
        array::unary(&mut self.g, op, x)
    }
}

/// Forms in which models write the patterns of the rules. The forms of the array functions are added below.
const EXAMPLES: &[Example] = &[
    // Transposes, reshapes and broadcasts of each other.
    |w| {
        let shape = [w.size(), w.size(), w.size() + 1];
        let x = w.leaf(&shape);
        let once = array::permute(&mut w.g, x, &[2, 0, 1])?;
        let scaled = array::with_number(&mut w.g, Binary::Multiply, once, 3.0)?;
        array::permute(&mut w.g, scaled, &[1, 2, 0])
    },
    |w| {
        let shape = [w.size() + 1, 1, w.size() + 1];
        let x = w.leaf(&shape);
        let moved = array::permute(&mut w.g, x, &[1, 0, 2])?;
        let flat = array::flatten(&mut w.g, moved, 0, 2)?;
        array::reshape(&mut w.g, flat, &[shape[2], shape[0]])
    },
    |w| {
        let (a, b, c) = (w.size() + 1, w.size() + 1, w.size() + 1);
        let x = w.leaf(&[b]);
        let column = w.g.broadcast(x, &[b, 1], &[0]);
        let negative = w.unary(Unary::Negate, column)?;
        let halved = array::with_number(&mut w.g, Binary::Divide, negative, 2.0)?;
        let wide = w.g.broadcast(halved, &[b, c], &[0, 1]);
        let more = w.g.broadcast(wide, &[a, b, c], &[1, 2]);
        w.unary(Unary::Sine, more)
    },
    // Heads that are folded into the batch and transposed there, and a transpose of a repeated value.
    |w| {
        let (b, h, g, s, d) = (w.size() + 1, w.size() + 1, w.size() + 1, w.size() + 1, w.size() + 1);
        let x = w.leaf(&[b, h, s, d]);
        let each = w.g.broadcast(x, &[b, h, g, s, d], &[0, 1, 3, 4]);
        let folded = array::reshape(&mut w.g, each, &[b * h * g, s, d])?;
        let turned = array::permute(&mut w.g, folded, &[0, 2, 1])?;
        array::reshape(&mut w.g, turned, &[b, h * g, d, s])
    },
    // Rows that are merged for a matmul and its bias.
    |w| {
        let (a, b, k, n) = (w.size() + 1, w.size() + 1, w.size() + 1, w.size() + 1);
        let (x, y, bias) = (w.leaf(&[a, b, k]), w.leaf(&[k, n]), w.leaf(&[n]));
        let rows = array::reshape(&mut w.g, x, &[a * b, k])?;
        let product = array::matmul(&mut w.g, rows, y)?;
        let sum = w.binary(Binary::Add, product, bias)?;
        let half = array::with_number(&mut w.g, Binary::Multiply, sum, 0.5)?;
        array::reshape(&mut w.g, half, &[a, b, n])
    },
    |w| {
        let (a, b, k, n) = (w.size() + 1, w.size() + 1, w.size() + 1, w.size() + 1);
        let (x, y) = (w.leaf(&[a, b, k]), w.leaf(&[k, n]));
        let rows = array::reshape(&mut w.g, x, &[a * b, k])?;
        let product = array::matmul(&mut w.g, rows, y)?;
        array::reshape(&mut w.g, product, &[a, b, n])
    },
    // Rows looked up in order.
    |w| {
        let (a, n, more, e) = (w.size() + 1, w.size() + 1, w.size() - 1, w.size() + 1);
        let table = w.leaf(&[n + more, e]);
        let positions = array::iota(&mut w.g, &[a, n], 1, DType::I32)?;
        array::embedding(&mut w.g, table, positions)
    },
    // A guard against NaNs from a softmax.
    |w| {
        let (m, n) = (w.size() + 1, w.size() + 1);
        let x = w.leaf(&[m, n]);
        let p = array::softmax(&mut w.g, x, 1)?;
        let nan = array::compare(&mut w.g, Direction::Ne, p, p)?;
        let zero = array::full_like(&mut w.g, p, 0.0)?;
        array::select(&mut w.g, nan, zero, p)
    },
    // Conversions that cancel.
    |w| {
        let size = w.size();
        let x = w.leaf_of(DType::BF16, &[size]);
        let wide = w.g.convert(x, DType::F32);
        let back = w.g.convert(wide, DType::BF16);
        w.unary(Unary::Negate, back)
    },
    // Matmuls of transposed and scaled operands.
    |w| {
        let (m, n, k) = (w.size() + 1, w.size() + 1, w.size() + 1);
        let (x, y) = (w.leaf(&[m, k]), w.leaf(&[n, k]));
        let scaled = array::with_number(&mut w.g, Binary::Multiply, x, 0.25)?;
        let again = array::with_number(&mut w.g, Binary::Divide, scaled, 3.0)?;
        let turned = array::permute(&mut w.g, y, &[1, 0])?;
        array::matmul(&mut w.g, again, turned)
    },
    // One value times several weights, which may be small compared to it or not.
    |w| {
        let (b, k, n) = (w.size() + 1, w.size() + 1, w.size() + 1);
        let x = w.leaf(&[b, 2, k]);
        let mut sum = None;
        for _ in 0..3 {
            let weight = w.leaf(&[n, k]);
            let product = array::linear(&mut w.g, x, weight, None)?;
            let bent = w.unary(Unary::Tanh, product)?;
            sum = Some(match sum {
                Some(sum) => w.binary(Binary::Add, sum, bent)?,
                None => bent,
            });
        }
        sum.ok_or(array::ShapeError::Attribute("nothing to add"))
    },
    // Powers, roots and reciprocals.
    |w| {
        let (m, n) = (w.size() + 1, w.size() + 1);
        let x = w.leaf(&[m, n]);
        let square = array::with_number(&mut w.g, Binary::Power, x, 2.0)?;
        let sum = array::sum(&mut w.g, square, &[1], true)?;
        let safe = array::with_number(&mut w.g, Binary::Add, sum, 1.0)?;
        let root = w.unary(Unary::Sqrt, safe)?;
        let scaled = w.binary(Binary::Divide, x, root)?;
        let one = array::full_like(&mut w.g, safe, 1.0)?;
        let inverse = w.binary(Binary::Divide, one, safe)?;
        w.binary(Binary::Multiply, scaled, inverse)
    },
    // Activations as frameworks write them out.
    |w| {
        let size = w.size();
        let x = w.leaf(&[size]);
        let negative = w.unary(Unary::Negate, x)?;
        let power = w.unary(Unary::Exponential, negative)?;
        let one = array::with_number(&mut w.g, Binary::Add, power, 1.0)?;
        w.binary(Binary::Divide, x, one)
    },
    |w| {
        let size = w.size();
        let x = w.leaf(&[size]);
        let cube = array::with_number(&mut w.g, Binary::Power, x, 3.0)?;
        let small = array::with_number(&mut w.g, Binary::Multiply, cube, 0.044715)?;
        let inner = w.binary(Binary::Add, x, small)?;
        let scaled = array::with_number(&mut w.g, Binary::Multiply, inner, 0.797_884_56)?;
        let tanh = w.unary(Unary::Tanh, scaled)?;
        let one = array::with_number(&mut w.g, Binary::Add, tanh, 1.0)?;
        let half = array::with_number(&mut w.g, Binary::Multiply, one, 0.5)?;
        w.binary(Binary::Multiply, x, half)
    },
    |w| {
        let size = w.size();
        let x = w.leaf(&[size]);
        let negative = w.unary(Unary::Negate, x)?;
        let scaled = array::with_number(&mut w.g, Binary::Multiply, negative, std::f64::consts::FRAC_1_SQRT_2)?;
        let erfc = w.unary(Unary::Erfc, scaled)?;
        let product = w.binary(Binary::Multiply, x, erfc)?;
        array::with_number(&mut w.g, Binary::Multiply, product, 0.5)
    },
    // Means, and norms whose variance is a difference of means.
    |w| w.norm_by_moments(&[2]),
    // Batch norms: with the factor folded beforehand, with the batch's or given statistics, and without bias.
    |w| w.norm_by_moments(&[0, 1]),
    |w| {
        let shape = [w.size() + 1, w.size() + 1, w.size() + 1];
        let [weight, bias, mean, variance] = [0; 4].map(|_| w.leaf(&[shape[1], 1]));
        let x = w.leaf(&shape);
        let centred = w.binary(Binary::Subtract, x, mean)?;
        let safe = array::with_number(&mut w.g, Binary::Add, variance, 4.0)?;
        let root = w.unary(Unary::Sqrt, safe)?;
        let quotient = w.binary(Binary::Divide, centred, root)?;
        let scaled = w.binary(Binary::Multiply, quotient, weight)?;
        w.binary(Binary::Add, scaled, bias)
    },
    // Experts' weights from the softmax, and their positions.
    |w| {
        let (n, experts) = (w.size() + 1, w.size() + 2);
        let x = w.leaf(&[n, experts]);
        let p = array::softmax(&mut w.g, x, 1)?;
        let (values, _) = array::top_k(&mut w.g, p, 1, 2, false)?;
        let total = array::sum(&mut w.g, values, &[1], true)?;
        w.binary(Binary::Divide, values, total)
    },
    |w| {
        let (n, experts) = (w.size() + 1, w.size() + 2);
        let x = w.leaf(&[n, experts]);
        let p = array::softmax(&mut w.g, x, 1)?;
        let chosen = array::among_greatest(&mut w.g, p, 1, 2)?;
        let zero = array::full_like(&mut w.g, p, 0.0)?;
        let kept = array::select(&mut w.g, chosen, p, zero)?;
        let total = array::sum(&mut w.g, kept, &[1], true)?;
        w.binary(Binary::Divide, kept, total)
    },
    // A mean whose reduced dimensions remain with size 1.
    |w| {
        let shape = [w.size() + 1, w.size() + 1, w.size() + 1];
        let x = w.leaf(&shape);
        let sum = array::sum(&mut w.g, x, &[0, 2], true)?;
        array::with_number(&mut w.g, Binary::Divide, sum, (shape[0] * shape[2]) as f64)
    },
    // A loss from a log-sum-exp, and a sign outside the mean.
    |w| {
        let (n, classes) = (w.size() + 1, w.size() + 2);
        let (x, labels) = (w.leaf(&[n, classes]), w.leaf_of(DType::I32, &[n]));
        let lse = array::log_sum_exp(&mut w.g, x, &[1], false)?;
        let labels = array::unsqueeze(&mut w.g, labels, 1)?;
        let hit = array::take_along(&mut w.g, x, 1, labels, false)?;
        let hit = array::squeeze(&mut w.g, hit, &[1])?;
        w.binary(Binary::Subtract, lse, hit)
    },
    |w| {
        let (n, classes) = (w.size() + 1, w.size() + 2);
        let (x, labels) = (w.leaf(&[n, classes]), w.leaf_of(DType::I32, &[n]));
        let p = array::softmax(&mut w.g, x, 1)?;
        let log = w.unary(Unary::Log, p)?;
        let labels = array::unsqueeze(&mut w.g, labels, 1)?;
        let hit = array::take_along(&mut w.g, log, 1, labels, false)?;
        let negative = w.unary(Unary::Negate, hit)?;
        let loss = array::mean(&mut w.g, negative, &[0, 1], false)?;
        w.unary(Unary::Negate, loss)
    },
    // Attention with heads first, repeated keys, an added mask, and a mask that hides scores.
    |w| {
        let (b, h, s, t, d) = (w.size(), w.even(), w.size() + 1, w.size() + 1, w.size() + 1);
        let (q, k, v) = (w.leaf(&[b, h, s, d]), w.leaf(&[b, h / 2, t, d]), w.leaf(&[b, h / 2, t, d]));
        let (k, v) = (array::repeat_heads(&mut w.g, k, h)?, array::repeat_heads(&mut w.g, v, h)?);
        let turned = array::swap_dims(&mut w.g, k, 2, 3)?;
        let scores = array::matmul(&mut w.g, q, turned)?;
        let scores = array::with_number(&mut w.g, Binary::Divide, scores, 1.5)?;
        let mask = w.leaf(&[b, 1, 1, t]);
        let scores = w.binary(Binary::Add, scores, mask)?;
        let weights = array::softmax(&mut w.g, scores, 3)?;
        array::matmul(&mut w.g, weights, v)
    },
    |w| {
        let (n, s, d) = (w.size(), w.size() + 1, w.size() + 1);
        let (q, k, v) = (w.leaf(&[n, s, d]), w.leaf(&[n, s, d]), w.leaf(&[n, s, d]));
        let q = array::with_number(&mut w.g, Binary::Multiply, q, 0.5)?;
        let turned = array::swap_dims(&mut w.g, k, 1, 2)?;
        let scores = array::matmul(&mut w.g, q, turned)?;
        let seen = array::causal_mask(&mut w.g, s, s, 0)?;
        let hidden = array::full_like(&mut w.g, scores, -1e9)?;
        let scores = array::select(&mut w.g, seen, scores, hidden)?;
        let weights = array::softmax(&mut w.g, scores, 2)?;
        array::matmul(&mut w.g, weights, v)
    },
    // Rotary positions, with rotated halves, and with separate halves.
    |w| {
        let (b, s, h, d) = (w.size(), w.size() + 1, w.size() + 1, 2 * w.even());
        let (x, cosine, sine) = (w.leaf(&[b, s, h, d]), w.leaf(&[s, d]), w.leaf(&[s, d]));
        let x = array::permute(&mut w.g, x, &[0, 2, 1, 3])?;
        let turned = array::rotary(&mut w.g, x, cosine, sine, RotaryHalves::Split)?;
        array::permute(&mut w.g, turned, &[0, 2, 1, 3])
    },
    |w| {
        let (s, d) = (w.size() + 1, w.even());
        let (x, cosine, sine) = (w.leaf(&[s, 2 * d]), w.leaf(&[s, d]), w.leaf(&[s, d]));
        let parts = array::split(&mut w.g, x, 1, &[d, d])?;
        let [fc, ss, sc, fs] = [(parts[0], cosine), (parts[1], sine), (parts[1], cosine), (parts[0], sine)]
            .map(|(x, angle)| array::binary(&mut w.g, Binary::Multiply, x, angle));
        let low = w.binary(Binary::Subtract, fc?, ss?)?;
        let high = w.binary(Binary::Add, sc?, fs?)?;
        array::concat(&mut w.g, &[low, high], 1)
    },
];

/// The decomposition of every composite, which rewriting must recognise.
fn decompositions() -> Vec<(Function, Vec<TensorType>)> {
    let composites = altiplano_ir::testing::cases().into_iter().filter_map(|case| match case.op {
        // Models have undivided attention and losses. Only plans divide them into blocks and chunks.
        Op::Composite(composite) if matches!(composite.function, Function::Attention { blocks: 2.., .. }) => None,
        Op::Composite(composite) if composite.function.recomputes_inside() => None,
        Op::Composite(composite) => Some((composite.function, case.operands)),
        _ => None,
    });
    composites.collect()
}

fn decomposed(function: &Function, operands: &[TensorType]) -> Graph {
    let mut w = Writer { g: Graph::new("decomposition"), sizes: Rng::new(1) };
    let leaves: Vec<ValueId> = operands.iter().map(|ty| w.leaf_of(ty.dtype, &ty.shape)).collect();
    let result = function.build(&mut w.g, &leaves).expect("operands that fit");
    w.g.outputs = vec![result];
    w.g
}

fn examples() -> Vec<Graph> {
    let mut graphs: Vec<Graph> = decompositions().iter().map(|(f, operands)| decomposed(f, operands)).collect();
    for round in 0..3 {
        for (i, example) in EXAMPLES.iter().enumerate() {
            let mut w = Writer { g: Graph::new("example"), sizes: Rng::new(round * 1000 + i as u64) };
            let result = example(&mut w).expect("an example that fits");
            w.g.outputs = vec![result];
            graphs.push(w.g);
        }
    }
    graphs
}

/// Random values for a graph's leaves, by name. Integers are small enough to be indices.
fn leaves(graph: &Graph, seed: u64) -> BTreeMap<String, Tensor> {
    let mut rng = Rng::new(seed);
    let value = |(v, name): (ValueId, &str)| {
        let tensor = altiplano_ir::testing::numbers::random(graph.ty(v), (-2.0, 2.0), (0, 2), &mut rng);
        (name.to_string(), tensor)
    };
    graph.inputs().map(value).collect()
}

fn computed(graph: &Graph, leaves: &BTreeMap<String, Tensor>) -> Tensor {
    let leaf = |v: ValueId| match &graph.node(v).op {
        Op::Input(input) => leaves[&input.name].clone(),
        _ => unreachable!("a leaf of an example is an input"),
    };
    run(graph, leaf).remove(0)
}

fn assert_close(a: &Tensor, b: &Tensor, what: &str) {
    assert_eq!(a.ty, b.ty, "{what}");
    for (i, (x, y)) in a.data.iter().zip(&b.data).enumerate() {
        // Constants, such as those of gelu, are written in single precision.
        assert!((x - y).abs() <= 2e-6 * (1.0 + y.abs()), "{what}: element {i} is {x} and {y}");
    }
}

/// The e-graph of a whole graph. Its leaves are the inputs and the constants that are not splats.
fn builder_of(graph: &Graph) -> (Builder, Vec<ValueId>) {
    let facts = Facts::new(graph);
    let mut builder = Builder::new();
    let mut outside = Vec::new();
    let mut ids: Vec<Id> = Vec::new();
    for v in graph.values() {
        let node = graph.node(v);
        let number = matches!(&node.op, Op::Constant(l) if l.as_splat().is_some());
        let id = if node.op.is_leaf() || facts.is_constant(v) && !number {
            outside.push(v);
            let leaf = Leaf { ty: node.ty.clone(), batch_dims: 0, fact: facts.of(v).cloned() };
            builder.leaf(leaf)
        } else {
            let children: Vec<Id> = node.operands.iter().map(|o| ids[o.index()]).collect();
            builder.original(node, &children, Some(v.index()), facts.of(v))
        };
        ids.push(id);
    }
    (builder, outside)
}

/// The extracted expression of a class, as a graph that extends the original's leaves and constants.
fn graph_of(original: &Graph, outside: &[ValueId], rewritten: &Rewritten) -> Graph {
    let mut graph = Graph { outputs: Vec::new(), ..original.clone() };
    let mut values: Vec<ValueId> = Vec::new();
    let at = |child: &Child, values: &[ValueId]| match *child {
        Child::Leaf(i) => outside[i],
        Child::Node(i) => values[i],
    };
    for node in &rewritten.nodes {
        let operands = node.children.iter().map(|c| at(c, &values)).collect();
        let (op, ty) = (node.op.clone(), node.ty.clone());
        values.push(graph.append(Node { op, operands, ty, batch_dims: 0, name: String::new() }));
    }
    graph.outputs = vec![at(&rewritten.outputs[0], &values)];
    assert_eq!(graph.verify(), []);
    graph
}

#[test]
fn what_rules_say_is_equal_is() {
    let mut proved: BTreeMap<&str, usize> = BTreeMap::new();
    for (number, graph) in examples().into_iter().enumerate() {
        let graph = simplify(&graph);
        let (mut builder, outside) = builder_of(&graph);
        let leaves = leaves(&graph, number as u64);
        saturate_with(&mut builder, graph.len(), |builder, rule, a, b| {
            let [before, after] = [a, b].map(|id| graph_of(&graph, &outside, &extract(builder, &[id])));
            let what = format!("{}\n{before}\n{after}", rule.name);
            assert_close(&computed(&before, &leaves), &computed(&after, &leaves), &what);
            *proved.entry(rule.name).or_default() += 1;
        });
    }
    for rule in RULES {
        assert!(proved.contains_key(rule.name), "no example has anything for '{}'", rule.name);
    }
}

#[test]
fn rewritten_graphs_compute_the_same() {
    for (number, graph) in examples().into_iter().enumerate() {
        let graph = simplify(&graph);
        let rewritten = rewrite(&graph, &[]);
        let leaves = leaves(&graph, number as u64);
        assert_close(&computed(&rewritten, &leaves), &computed(&graph, &leaves), &format!("{graph}\n{rewritten}"));
        assert!(rewritten.len() <= graph.len(), "{graph}\n{rewritten}");
        assert_eq!(rewrite(&graph, &[]), rewritten, "rewriting is deterministic");
    }
}

/// Each composite, as written by the functions that importers use, becomes one op again.
#[test]
fn every_composite_is_found_in_its_decomposition() {
    for (function, operands) in decompositions() {
        let graph = simplify(&decomposed(&function, &operands));
        let rewritten = rewrite(&graph, &[]);
        let found: Vec<&str> = rewritten.nodes.iter().map(|n| n.op.name()).collect();
        assert!(found.contains(&function.name()), "{}\n{graph}\n{rewritten}", function.name());
        let work = rewritten.values().filter(|v| !rewritten.node(*v).op.is_leaf());
        let moving = ["reshape", "transpose", "constant", "concatenate"];
        let others: Vec<&str> = work.map(|v| rewritten.node(v).op.name()).filter(|n| !moving.contains(n)).collect();
        assert_eq!(others, [function.name()], "{graph}\n{rewritten}");
    }
}

/// A function of an argument without gradient flow is a different function.
#[test]
fn stopped_gradients_stay_stopped() {
    let mut w = Writer { g: Graph::new("stopped"), sizes: Rng::new(5) };
    let x = w.leaf(&[4, 6]);
    let s = w.unary(Unary::Logistic, x).unwrap();
    let stopped = w.unary(Unary::StopGradient, s).unwrap();
    let y = w.binary(Binary::Multiply, x, stopped).unwrap();
    w.g.outputs = vec![y];
    let rewritten = rewrite(&w.g, &[]);
    assert!(rewritten.nodes.iter().any(|n| n.op == Op::Unary(Unary::StopGradient)), "{rewritten}");
}

/// Values that the user names or that a model pins are preserved.
#[test]
fn kept_values_stay() {
    let mut w = Writer { g: Graph::new("kept"), sizes: Rng::new(5) };
    let x = w.leaf(&[4, 6]);
    let y = array::softmax(&mut w.g, x, 1).unwrap();
    w.g.outputs = vec![y];
    let powers = w.g.values().find(|v| w.g.node(*v).op == Op::Unary(Unary::Exponential)).unwrap();
    w.g.nodes[powers.index()].name = "powers".to_string();
    let kept = rewrite(&w.g, &[powers]);
    assert!(kept.nodes.iter().any(|n| n.name == "powers" && n.op == Op::Unary(Unary::Exponential)), "{kept}");
    let free = rewrite(&w.g, &[]);
    assert!(free.nodes.iter().any(|n| n.op.name() == "softmax") && free.len() == 2, "{free}");
}

/// Narrow weights of one long value are stacked, so that it is read once. Wide weights stay apart: copying them and
/// slicing their products would cost more than reading the value again. The weights themselves stay unchanged.
#[test]
fn matmuls_are_stacked_where_that_moves_fewer_bytes() {
    for (width, matmuls) in [(2, 1), (256, 3)] {
        let mut w = Writer { g: Graph::new("parallel"), sizes: Rng::new(5) };
        let x = w.leaf(&[4096, 64]);
        let weights = [0; 3].map(|_| w.leaf(&[64, width]));
        w.g.outputs = weights.map(|weight| array::matmul(&mut w.g, x, weight).unwrap()).to_vec();
        let rewritten = rewrite(&w.g, &[]);
        let found = rewritten.nodes.iter().filter(|n| n.op.name() == "dot_general").count();
        assert_eq!(found, matmuls, "{rewritten}");
        assert_eq!(rewritten.inputs().count(), 4, "{rewritten}");
    }
    // The second matmul's result is not a weight that can be stacked with the first.
    let mut w = Writer { g: Graph::new("chain"), sizes: Rng::new(5) };
    let (x, first) = (w.leaf(&[2, 2]), w.leaf(&[2, 2]));
    let second = array::matmul(&mut w.g, x, first).unwrap();
    let third = array::matmul(&mut w.g, x, second).unwrap();
    w.g.outputs = vec![third];
    let rewritten = rewrite(&w.g, &[]);
    assert_eq!(rewritten.nodes.iter().filter(|n| n.op.name() == "dot_general").count(), 2, "{rewritten}");
}

/// A batch of one sample is moved like any batch. A reshape instead would not work for other batch sizes.
#[test]
fn one_sample_is_moved_like_many() {
    let mut w = Writer { g: Graph::new("experts"), sizes: Rng::new(5) };
    let x = w.leaf(&[1, 3, 4]);
    let moved = array::permute(&mut w.g, x, &[1, 0, 2]).unwrap();
    let p = array::softmax(&mut w.g, moved, 2).unwrap();
    w.g.outputs = vec![p];
    let graph = altiplano_ir::batch::find_batch(&w.g, &[Some(0)]).graph;
    let rewritten = rewrite(&graph, &[]);
    assert!(rewritten.nodes.iter().any(|n| n.op.name() == "softmax"), "{rewritten}");
    assert!(altiplano_ir::batch::rebatch(&rewritten, 4).is_ok(), "{rewritten}");
}

/// `x` where a constant mask is true, and zeros elsewhere. The mask follows from the positions along both dimensions.
fn masked(mask: impl FnOnce(&mut Graph, [ValueId; 2]) -> ValueId) -> (Graph, ValueId) {
    let mut w = Writer { g: Graph::new("masked"), sizes: Rng::new(5) };
    let x = w.leaf(&[8, 8]);
    let ty = TensorType::new(DType::I32, [8, 8]);
    let positions = [0, 1].map(|dim| w.g.emit(Op::Iota(Iota { ty: ty.clone(), dim }), &[]));
    let mask = mask(&mut w.g, positions);
    let zero = w.g.splat_like(x, 0.0);
    w.g.outputs = vec![w.g.select(mask, x, zero)];
    (w.g, mask)
}

/// A small mask may be computed by a window of any size. Beyond the limit, it stays as it is.
#[test]
fn masks_are_computed_up_to_a_limit_of_work() {
    for (size, fact) in [(4, Some(Fact::Open)), (1 << 32, None)] {
        let (pad_low, pad_high) = (size / 2, (size - 1) / 2);
        let rows = WindowDim { size: size as u64, pad_low, pad_high, ..WindowDim::one() };
        let window = vec![rows, WindowDim::one()];
        let (graph, mask) = masked(|g, [row, _]| {
            let all = g.compare(Direction::Ge, row, row);
            g.emit(Op::ReduceWindow(ReduceWindow { reducer: Reducer::And, window }), &[all])
        });
        assert_eq!(Facts::new(&graph).of(mask), fact.as_ref(), "a window of {size} rows");
        let kept = rewrite(&graph, &[]);
        assert!(kept.nodes.iter().any(|n| n.op.name() == "reduce_window"), "{kept}");
    }
}

/// Each of these masks could be computed, but all together would take a quarter of a million evaluations of each op, and
/// their depth more stack than there is.
#[test]
fn long_chains_of_masks_are_bounded_too() {
    let (graph, _) = masked(|g, [row, column]| {
        let sum = (0..20_000).fold(row, |sum, _| g.add(sum, column));
        g.compare(Direction::Ge, sum, column)
    });
    Facts::new(&graph);
    let (graph, _) = masked(|g, [row, column]| {
        let causal = g.compare(Direction::Ge, row, column);
        (0..20_000).fold(causal, |mask, _| {
            let turned = g.broadcast(mask, &[8, 8], &[1, 0]);
            g.emit(Op::Binary(Binary::And), &[mask, turned])
        })
    });
    Facts::new(&graph);
}
