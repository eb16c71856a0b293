//! Every named way of training in parallel is found where it is known to be best, from the graph and the cluster alone.
//! The same layout written by hand, as pins of values and parameters, gets the same prediction.

use altiplano_cost_models::preset;
use altiplano_ir::array;
use altiplano_ir::batch::{LossKind, find_batch};
use altiplano_ir::cluster::Cluster;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Pin, PinnedDim, ValueId};
use altiplano_ir::literal::Real;
use altiplano_ir::op::{Cumulative, Direction, DotGeneral, Function, Input, Op, Parameter, Reducer, Unary};
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Plan, Storage};
use altiplano_ir::program::{Phase, Programs};
use altiplano_ir::recompute::Recompute;
use altiplano_ir::reshard::Collective;
use altiplano_ir::sharding::Sharding;
use altiplano_ir::types::TensorType;
use altiplano_planner::features::chunked_loss::LossChunks;
use altiplano_planner::features::rings::Ring;
use altiplano_planner::{Request, Silent, plan, programs};
use std::sync::Arc;

const DEVICES: u64 = 4;

fn input(g: &mut Graph, name: &str, shape: &[u64]) -> ValueId {
    g.emit(Op::Input(Input { name: name.into(), ty: TensorType::new(DType::F32, shape) }), &[])
}

fn labels(g: &mut Graph, name: &str, shape: &[u64]) -> ValueId {
    g.emit(Op::Input(Input { name: name.into(), ty: TensorType::new(DType::I32, shape) }), &[])
}

fn weight(g: &mut Graph, name: &str, shape: &[u64]) -> ValueId {
    g.emit(Op::Parameter(Parameter::new(name, TensorType::new(DType::F32, shape))), &[])
}

fn dot(g: &mut Graph, lhs: ValueId, rhs: ValueId, batch: [&[usize]; 2], contract: [&[usize]; 2]) -> ValueId {
    let [lhs_batch, rhs_batch] = batch.map(<[usize]>::to_vec);
    let [lhs_contract, rhs_contract] = contract.map(<[usize]>::to_vec);
    g.emit(Op::DotGeneral(DotGeneral { lhs_batch, rhs_batch, lhs_contract, rhs_contract }), &[lhs, rhs])
}

/// `x w` over the last dimension of `x`.
fn project(g: &mut Graph, x: ValueId, w: ValueId) -> ValueId {
    let last = g.shape(x).len() - 1;
    dot(g, x, w, [&[], &[]], [&[last], &[0]])
}

/// The mean of all squared elements.
fn mean_square(g: &mut Graph, x: ValueId) -> ValueId {
    let square = g.mul(x, x);
    let all: Vec<usize> = (0..g.shape(x).len()).collect();
    array::mean(g, square, &all, false).expect("a mean of everything")
}

/// A graph with its batch, dimension 0 of every input.
fn batched(mut g: Graph, loss: ValueId) -> Graph {
    g.outputs = vec![loss];
    let inputs = g.inputs().count();
    find_batch(&g, &vec![Some(0); inputs]).graph
}

/// Four H100 with NVLink in one node.
fn cluster() -> Cluster {
    let mut cluster = preset("dgx-h100:1").expect("a preset");
    cluster.groups[0].devices_per_node = DEVICES as u32;
    // All memory is available for tensors.
    cluster.groups[0].device.reserved = None;
    cluster
}

fn request(graph: &Graph, cluster: Cluster) -> Request {
    let mut request = Request::new("scheme", graph.clone(), LossKind::Mean, cluster);
    request.batch.num_microbatches = Some(1);
    request.recompute = Some(Recompute::None);
    request
}

/// The plan that the search chooses, and its programs.
fn chosen(request: &Request) -> (Plan, Programs) {
    let plan = plan(request, &Silent).expect("a plan");
    let programs = programs(&plan).expect("programs");
    (plan, programs)
}

/// The number of parts into which each dimension of a layout is split.
fn parts(sharding: &Sharding, plan: &Plan) -> Vec<u64> {
    let mesh = &plan.stages[0].mesh;
    sharding.dims.iter().map(|d| mesh.product(&d.axes().collect::<Vec<_>>())).collect()
}

/// The parts of a value of the forward graph.
fn parts_of(plan: &Plan, value: ValueId) -> Vec<u64> {
    let stage = &plan.stages[0];
    let shardings = plan.graph.rule(value).shardings(&stage.shardings[&value].strategy, &stage.mesh);
    parts(&shardings.result, plan)
}

fn storage<'a>(plan: &'a Plan, name: &str) -> &'a Storage {
    &plan.stages[0].parameters[name]
}

/// Collectives of a phase: names, and elements that each device has afterwards.
fn sent(programs: &Programs, phase: Phase) -> Vec<(&'static str, u64)> {
    let bodies = programs.programs[0].bodies.iter().filter(|b| b.phase == phase);
    let of_body = |body: &altiplano_ir::program::Body| {
        let graph = body.graph.clone();
        let nodes = graph.values().filter_map(|v| match &graph.node(v).op {
            Op::Collective(c) if c.collective.communicates() => Some((c.collective.name(), graph.ty(v).elements())),
            _ => None,
        });
        nodes.collect::<Vec<_>>()
    };
    bodies.flat_map(of_body).collect()
}

fn count(sent: &[(&'static str, u64)], name: &str, elements: u64) -> usize {
    sent.iter().filter(|(n, e)| *n == name && *e >= elements).count()
}

/// A pin of a value in `parts` along each dimension.
fn pin(value: ValueId, parts: &[u64]) -> Pin {
    let dim = |&n: &u64| PinnedDim { axes: if n > 1 { vec!["all".into()] } else { vec![] }, open: false };
    Pin { value, mesh: vec![("all".into(), DEVICES)], dims: parts.iter().map(dim).collect() }
}

/// Asserts that the layout written by hand costs what the chosen one costs.
fn assert_priced_alike(request: &Request, plan: &Plan, pins: &[(ValueId, &[u64])]) {
    let mut by_hand = request.clone();
    pins.iter().for_each(|(value, parts)| Arc::make_mut(&mut by_hand.graph).pin(pin(*value, parts)));
    let (pinned, _) = chosen(&by_hand);
    let (a, b) = (plan.predicted.step_time_s, pinned.predicted.step_time_s);
    assert!((a - b).abs() <= 1e-6 * a, "chosen {a} s, by hand {b} s");
}

/// `layers` matrices of `width` with a tanh between them, and the ids of the products.
fn perceptron(batch: u64, width: u64, layers: usize) -> (Graph, Vec<ValueId>) {
    let mut g = Graph::new("perceptron");
    let mut x = input(&mut g, "x", &[batch, width]);
    let mut products = Vec::new();
    for i in 0..layers {
        let w = weight(&mut g, &format!("w{i}"), &[width, width]);
        x = project(&mut g, x, w);
        products.push(x);
        x = g.unary(Unary::Tanh, x);
    }
    let loss = mean_square(&mut g, x);
    (batched(g, loss), products)
}

/// Many samples and small weights: each device has samples of its own, and gradients are summed once a step.
#[test]
fn plain_data_parallelism() {
    let (graph, products) = perceptron(1 << 18, 256, 8);
    let mut request = request(&graph, cluster());
    request.training.optimizer = Optimizer::sgd();
    let (plan, programs) = chosen(&request);
    for &x in &products {
        assert_eq!(parts_of(&plan, x), [DEVICES, 1]);
    }
    for i in 0..products.len() {
        let storage = storage(&plan, &format!("w{i}"));
        assert!([&storage.parameter, &storage.state].iter().all(|s| s.split_axes().count() == 0), "w{i}");
    }
    assert_eq!(count(&sent(&programs, Phase::Forward), "all_reduce", 2), 0);
    assert_eq!(sent(&programs, Phase::Backward), []);
    assert_eq!(count(&sent(&programs, Phase::Update), "all_reduce", 256 * 256), products.len());
    let pins: Vec<(ValueId, &[u64])> = products.iter().map(|&x| (x, &[DEVICES, 1][..])).collect();
    assert_priced_alike(&request, &plan, &pins);
}

/// Peak bytes of a device under a baseline, by its name in the table of alternatives.
fn peak(plan: &Plan, name: &str) -> u64 {
    let found = plan.alternatives.iter().find(|a| a.name == name).expect("a baseline");
    found.predicted.as_ref().expect("a predicted baseline").peak_bytes[0]
}

/// Bytes between the peaks of two baselines: above the leaner one by a `parts`-th of the difference.
fn between(plan: &Plan, less: &str, more: &str, parts: u64) -> u64 {
    let (less, more) = (peak(plan, less), peak(plan, more));
    assert!(less < more);
    less + (more - less) / parts
}

/// If parameters fit on each device but their optimizer state does not, the state is sharded (Rajbhandari et al. 2020).
#[test]
fn zero_1() {
    let (graph, products) = perceptron(1 << 15, 2048, 8);
    // Over a slower link and with several microbatches, sending more than once a step is noticeable.
    let several = |cluster| {
        let mut request = request(&graph, cluster);
        request.batch.num_microbatches = Some(8);
        request
    };
    let mut slow = cluster();
    slow.groups[0].intra_node.bytes_per_s /= 8.0;
    let (roomy, _) = chosen(&several(slow.clone()));
    slow.groups[0].device.memory_bytes = between(&roomy, "ZeRO-1", "data parallel", 10);
    let request = several(slow);
    let (plan, programs) = chosen(&request);
    for (i, &x) in products.iter().enumerate() {
        assert_eq!(parts_of(&plan, x), [DEVICES, 1]);
        let storage = storage(&plan, &format!("w{i}"));
        assert!(storage.parameter.split_axes().count() == 0, "w{i}");
        assert_eq!(parts(&storage.state, &plan).iter().product::<u64>(), DEVICES, "w{i}");
    }
    let update = sent(&programs, Phase::Update);
    assert_eq!(count(&update, "reduce_scatter", 1), products.len());
    assert_eq!(count(&update, "all_gather", 1), products.len());
    assert_eq!(sent(&programs, Phase::Backward), []);
    let pins: Vec<(ValueId, &[u64])> = products.iter().map(|&x| (x, &[DEVICES, 1][..])).collect();
    assert_priced_alike(&request, &plan, &pins);
}

/// If parameters do not fit either, they are sharded too and gathered where they are used.
#[test]
fn zero_3() {
    let (graph, products) = perceptron(1 << 17, 2048, 8);
    let (roomy, _) = chosen(&request(&graph, cluster()));
    let mut small = cluster();
    // With room for one parameter more, one would be whole.
    small.groups[0].device.memory_bytes = between(&roomy, "FSDP", "ZeRO-1", 50);
    let request = request(&graph, small);
    let (plan, programs) = chosen(&request);
    for (i, &x) in products.iter().enumerate() {
        assert_eq!(parts_of(&plan, x), [DEVICES, 1]);
        let storage = storage(&plan, &format!("w{i}"));
        for sharding in [&storage.parameter, &storage.gradient, &storage.state] {
            assert_eq!(parts(sharding, &plan).iter().product::<u64>(), DEVICES, "w{i}");
        }
    }
    assert_eq!(count(&sent(&programs, Phase::Forward), "all_gather", 2048 * 2048), products.len());
    assert_eq!(count(&sent(&programs, Phase::Backward), "reduce_scatter", 1), products.len());
    let pins: Vec<(ValueId, &[u64])> = products.iter().map(|&x| (x, &[DEVICES, 1][..])).collect();
    assert_priced_alike(&request, &plan, &pins);
}

/// If each device has room for one whole parameter but not for all, one is whole and the others are sharded.
#[test]
fn storage_of_each_parameter_for_itself() {
    let (graph, products) = perceptron(1 << 17, 2048, 8);
    let (roomy, _) = chosen(&request(&graph, cluster()));
    let mut small = cluster();
    let limit = between(&roomy, "FSDP", "ZeRO-1", 10);
    small.groups[0].device.memory_bytes = limit;
    let (plan, _) = chosen(&request(&graph, small));
    let whole = |i: &usize| storage(&plan, &format!("w{i}")).parameter.split_axes().count() == 0;
    let count = (0..products.len()).filter(whole).count();
    assert!(count > 0 && count < products.len(), "{count} parameters are whole");
    assert!(plan.predicted.peak_bytes[0] <= limit);
    let solved = plan.stages[0].solved.expect("a stage that was solved as a whole");
    assert!(solved.lower_bound_s <= solved.cost_s);
}

/// Few samples and large weights: the first matrix of a pair is split by columns, the second by rows. Each pair has one
/// all-reduce in the forward pass (Shoeybi et al. 2019).
#[test]
fn tensor_parallelism() {
    let (batch, width, pairs) = (16, 4096, 4);
    let mut g = Graph::new("pairs");
    let mut x = input(&mut g, "x", &[batch, width]);
    let mut hidden = Vec::new();
    for i in 0..pairs {
        let up = weight(&mut g, &format!("up{i}"), &[width, 4 * width]);
        let down = weight(&mut g, &format!("down{i}"), &[4 * width, width]);
        let h = project(&mut g, x, up);
        hidden.push(h);
        let h = g.unary(Unary::Tanh, h);
        x = project(&mut g, h, down);
        x = g.unary(Unary::Tanh, x);
    }
    let loss = mean_square(&mut g, x);
    let request = request(&batched(g, loss), cluster());
    let (plan, programs) = chosen(&request);
    for (i, &h) in hidden.iter().enumerate() {
        assert_eq!(parts_of(&plan, h), [1, DEVICES]);
        assert_eq!(parts(&storage(&plan, &format!("up{i}")).parameter, &plan), [1, DEVICES]);
        assert_eq!(parts(&storage(&plan, &format!("down{i}")).parameter, &plan), [DEVICES, 1]);
    }
    let forward = sent(&programs, Phase::Forward);
    assert_eq!(count(&forward, "all_reduce", batch * width), pairs, "{forward:?}");
    let backward = sent(&programs, Phase::Backward);
    // Nothing needs the gradient of the input.
    assert_eq!(count(&backward, "all_reduce", batch * width), pairs - 1, "{backward:?}");
    let pins: Vec<(ValueId, &[u64])> = hidden.iter().map(|&h| (h, &[1, DEVICES][..])).collect();
    assert_priced_alike(&request, &plan, &pins);
}

/// Around norms the tokens are split: a reduce-scatter and an all-gather replace the all-reduce (Korthikanti et al.
/// 2022). Norms lie before and after a pair of products here, as in sandwich norm. Replicated values there would cost
/// more than one more gather for the backward pass.
#[test]
fn sequence_parallelism() {
    let (tokens, width, blocks) = (4096, 4096, 3);
    let mut g = Graph::new("blocks");
    let mut x = input(&mut g, "x", &[1, tokens, width]);
    let (mut hidden, mut sums) = (Vec::new(), Vec::new());
    for i in 0..blocks {
        let gain = weight(&mut g, &format!("gain{i}"), &[width]);
        let after = weight(&mut g, &format!("after{i}"), &[width]);
        let up = weight(&mut g, &format!("up{i}"), &[width, 4 * width]);
        let down = weight(&mut g, &format!("down{i}"), &[4 * width, width]);
        let normal = array::layer_norm(&mut g, x, 1, Some(gain), None, 1e-5).expect("a norm");
        let h = project(&mut g, normal, up);
        hidden.push(h);
        let h = g.unary(Unary::Tanh, h);
        let y = project(&mut g, h, down);
        let y = array::layer_norm(&mut g, y, 1, Some(after), None, 1e-5).expect("a norm");
        let y = array::gelu_tanh(&mut g, y).expect("an activation");
        let y = array::layer_norm(&mut g, y, 1, None, None, 1e-5).expect("a norm");
        x = g.add(x, y);
        sums.push(x);
    }
    let loss = mean_square(&mut g, x);
    let request = request(&batched(g, loss), cluster());
    let (plan, programs) = chosen(&request);
    for (&h, &x) in hidden.iter().zip(&sums) {
        assert_eq!(parts_of(&plan, h), [1, 1, DEVICES]);
        assert_eq!(parts_of(&plan, x), [1, DEVICES, 1]);
    }
    for phase in [Phase::Forward, Phase::Backward] {
        let sent = sent(&programs, phase);
        assert_eq!(count(&sent, "reduce_scatter", tokens * width / DEVICES), blocks, "{phase:?} {sent:?}");
        assert!(count(&sent, "all_gather", tokens * width) >= blocks, "{phase:?} {sent:?}");
        assert_eq!(count(&sent, "all_reduce", tokens * width), 0, "{phase:?} {sent:?}");
    }
    let of_hidden = hidden.iter().map(|&h| (h, &[1, 1, DEVICES][..]));
    let pins: Vec<(ValueId, &[u64])> = of_hidden.chain(sums.iter().map(|&x| (x, &[1, DEVICES, 1][..]))).collect();
    assert_priced_alike(&request, &plan, &pins);
}

/// One long sample and fewer heads than devices: queries are split, keys and values gathered.
#[test]
fn context_parallelism() {
    let (tokens, heads, size) = (16384, 3, 128);
    let width = heads * size;
    let mut g = Graph::new("attention");
    let mut x = input(&mut g, "x", &[1, tokens, width]);
    let mut scores = Vec::new();
    let mut kept = Vec::new();
    for i in 0..2 {
        let weights = ["q", "k", "v", "o"].map(|n| {
            let out = if n == "k" || n == "v" { size } else { width };
            weight(&mut g, &format!("{n}{i}"), &[width, out])
        });
        let q = project(&mut g, x, weights[0]);
        let q = g.reshape(q, &[1, tokens, heads, size]);
        let [k, v] = [project(&mut g, x, weights[1]), project(&mut g, x, weights[2])];
        // One head of keys and values serves all heads of the queries.
        let s = dot(&mut g, q, k, [&[0], &[0]], [&[3], &[2]]);
        scores.push(s);
        let p = array::softmax(&mut g, s, 3).expect("a softmax");
        let mixed = dot(&mut g, p, v, [&[0], &[0]], [&[3], &[1]]);
        let mixed = g.reshape(mixed, &[1, tokens, width]);
        let y = project(&mut g, mixed, weights[3]);
        x = g.add(x, y);
        kept.push(x);
    }
    let loss = mean_square(&mut g, x);
    let request = request(&batched(g, loss), cluster());
    let (plan, programs) = chosen(&request);
    for (&s, &x) in scores.iter().zip(&kept) {
        assert_eq!(parts_of(&plan, s), [1, DEVICES, 1, 1]);
        assert_eq!(parts_of(&plan, x), [1, DEVICES, 1]);
    }
    let forward = sent(&programs, Phase::Forward);
    assert_eq!(count(&forward, "all_gather", tokens * size), 2 * scores.len(), "{forward:?}");
    assert_eq!(count(&forward, "all_gather", tokens * size + 1), 0, "{forward:?}");
    assert_eq!(count(&forward, "all_reduce", 2), 0, "{forward:?}");
    let of_scores = scores.iter().map(|&s| (s, &[1, DEVICES, 1, 1][..]));
    let pins: Vec<(ValueId, &[u64])> = of_scores.chain(kept.iter().map(|&x| (x, &[1, DEVICES, 1][..]))).collect();
    assert_priced_alike(&request, &plan, &pins);
}

/// Layers of attention with as many keys as queries and fewer heads than devices. Returns for each layer the attention
/// and the value that it adds.
fn attentions(tokens: u64, blocks: u64) -> (Graph, Vec<[ValueId; 2]>) {
    let (heads, size) = (3, 128);
    let width = heads * size;
    let mut g = Graph::new("attention");
    let mut x = input(&mut g, "x", &[1, tokens, width]);
    let mut found = Vec::new();
    for i in 0..2 {
        let [q, k, v, o] = ["q", "k", "v", "o"].map(|n| weight(&mut g, &format!("{n}{i}"), &[width, width]));
        let operands = [q, k, v].map(|w| {
            let y = project(&mut g, x, w);
            g.reshape(y, &[1, tokens, heads, size])
        });
        let scale = Real((size as f64).sqrt().recip());
        let mixed = g.emit(Function::Attention { scale, causal: false, blocks }.into(), &operands);
        let joined = g.reshape(mixed, &[1, tokens, width]);
        let y = project(&mut g, joined, o);
        x = g.add(x, y);
        found.push([mixed, x]);
    }
    let loss = mean_square(&mut g, x);
    (batched(g, loss), found)
}

/// One long sample and as many keys as queries: keys and values go around a ring, overlapped with computation (Liu et
/// al. 2023), so no device ever has all of them. Every position sees all others. With a causal mask, the last device of
/// a ring would see most, and the heads with one more head of zeros would be split evenly.
#[test]
fn ring_attention() {
    let tokens = 32768;
    let (graph, found) = attentions(tokens, 1);
    let auto = request(&graph, cluster());
    let (plan, programs) = chosen(&auto);
    let (gathering, _) = chosen(&Request { ring: Ring::None, ..auto.clone() });
    let block = tokens / DEVICES * 3 * 128;
    let rounds = 2 * found.len() * (DEVICES as usize - 1);
    for &[_, x] in &found {
        assert_eq!(parts_of(&plan, x), [1, DEVICES, 1]);
    }
    let forward = sent(&programs, Phase::Forward);
    let (auto_s, gathering_s) = (plan.predicted.step_time_s, gathering.predicted.step_time_s);
    assert_eq!(count(&forward, "shift", block), rounds, "{auto_s} {gathering_s} {forward:?}");
    // Keys and values go around again, and their gradients home.
    assert_eq!(count(&sent(&programs, Phase::Backward), "shift", block), 2 * rounds);
    let bodies = programs.programs.iter().flat_map(|p| &p.bodies);
    let of_tokens = bodies.filter(|b| b.phase != Phase::Update).flat_map(|b| &b.graph.nodes);
    let largest = of_tokens.filter(|n| !n.ty.shape.ends_with(&[tokens / DEVICES])).map(|n| n.ty.elements()).max();
    assert_eq!(largest, Some(block), "keys and values are there in blocks");
    // If keys are gathered before they are used, a step takes longer and a device holds more.
    let gathered = sent(&altiplano_planner::programs(&gathering).expect("programs"), Phase::Forward);
    assert_eq!(count(&gathered, "all_gather", block * DEVICES), 2 * found.len(), "{gathered:?}");
    assert!(plan.predicted.step_time_s < gathering.predicted.step_time_s);
    assert!(plan.predicted.peak_bytes < gathering.predicted.peak_bytes);
    // With memory between the peaks of both, only a plan with a ring fits.
    let mut small = auto.clone();
    small.cluster.groups[0].device.memory_bytes =
        u64::midpoint(plan.predicted.peak_bytes[0], gathering.predicted.peak_bytes[0]);
    assert!(altiplano_planner::plan(&Request { ring: Ring::None, ..small.clone() }, &Silent).is_err());
    assert_eq!(chosen(&small).0.predicted.peak_bytes, plan.predicted.peak_bytes);
    // By hand, this is the graph with blocks, split.
    let (by_hand, found) = attentions(tokens, DEVICES);
    let pins: Vec<(ValueId, &[u64])> =
        found.iter().flat_map(|&[mixed, x]| [(mixed, &[1, DEVICES, 1, 1][..]), (x, &[1, DEVICES, 1][..])]).collect();
    assert_priced_alike(&request(&by_hand, cluster()), &plan, &pins);
}

/// Logits that do not fit are made a chunk at a time; logits that fit are made whole.
#[test]
fn logits_that_do_not_fit_are_made_in_chunks() {
    let (batch, tokens, width, classes) = (4, 8192, 256, 32768);
    let mut g = Graph::new("head");
    let x = input(&mut g, "x", &[batch, tokens, width]);
    let targets = labels(&mut g, "labels", &[batch, tokens]);
    let head = weight(&mut g, "head", &[width, classes]);
    let logits = project(&mut g, x, head);
    let losses = g.emit(Function::CrossEntropy { dim: 2 }.into(), &[logits, targets]);
    let loss = g.emit(Function::Mean { dims: vec![0, 1] }.into(), &[losses]);
    let auto = request(&batched(g, loss), cluster());
    let is_cut = |plan: &Plan| plan.graph.nodes.iter().any(|n| n.op.name() == "linear_cross_entropy");
    let (whole, _) = chosen(&auto);
    assert!(!is_cut(&whole));
    let (cut, _) = chosen(&Request { loss_chunks: LossChunks::Count(32), ..auto.clone() });
    assert!(is_cut(&cut) && cut.predicted.step_time_s > whole.predicted.step_time_s);
    let [whole_bytes, cut_bytes] = [&whole, &cut].map(|plan| plan.predicted.peak_bytes[0]);
    assert!(4 * cut_bytes < whole_bytes, "{cut_bytes} {whole_bytes}");
    let mut small = auto.clone();
    small.cluster.groups[0].device.memory_bytes = 2 * cut_bytes;
    assert!(altiplano_planner::plan(&Request { loss_chunks: LossChunks::None, ..small.clone() }, &Silent).is_err());
    assert!(is_cut(&chosen(&small).0));
}

/// Samples are split, and so are the experts: tokens travel to their experts and back (Lepikhin et al. 2021).
#[test]
fn expert_parallelism() {
    let (batch, tokens, width, experts, capacity) = (16, 512, 2048, 8, 64);
    let mut g = Graph::new("experts");
    let mut x = input(&mut g, "x", &[batch, tokens, width]);
    let mut hidden = Vec::new();
    for i in 0..2 {
        let router = weight(&mut g, &format!("router{i}"), &[width, experts]);
        let scores = project(&mut g, x, router);
        let gates = array::softmax(&mut g, scores, 2).expect("a softmax");
        let top = array::max(&mut g, gates, &[2], true).expect("a maximum");
        let top = array::broadcast_to(&mut g, top, &[batch, tokens, experts]).expect("as many");
        let hit = g.compare(Direction::Eq, gates, top);
        let hit = g.convert(hit, DType::F32);
        let place = g.emit(Op::Cumulative(Cumulative { reducer: Reducer::Sum, dim: 1, reverse: false }), &[hit]);
        let place = g.mul(place, hit);
        let shape = [batch, tokens, experts, capacity];
        let place = g.broadcast(place, &shape, &[0, 1, 2]);
        let places = array::arange(&mut g, capacity, 1.0, 1.0, DType::F32).expect("a range");
        let places = g.broadcast(places, &shape, &[3]);
        let dispatch = g.compare(Direction::Eq, place, places);
        let dispatch = g.convert(dispatch, DType::F32);
        let inputs = dot(&mut g, dispatch, x, [&[0], &[0]], [&[1], &[1]]);
        let up = weight(&mut g, &format!("up{i}"), &[experts, width, 4 * width]);
        let h = dot(&mut g, inputs, up, [&[1], &[0]], [&[3], &[1]]);
        hidden.push(h);
        let h = g.unary(Unary::Tanh, h);
        let down = weight(&mut g, &format!("down{i}"), &[experts, 4 * width, width]);
        let outputs = dot(&mut g, h, down, [&[0], &[0]], [&[3], &[1]]);
        let gates = g.broadcast(gates, &shape, &[0, 1, 2]);
        let combine = g.mul(dispatch, gates);
        let back = dot(&mut g, combine, outputs, [&[0], &[1]], [&[2, 3], &[0, 2]]);
        x = g.add(x, back);
    }
    let loss = mean_square(&mut g, x);
    let request = request(&batched(g, loss), cluster());
    let (plan, programs) = chosen(&request);
    for (i, &h) in hidden.iter().enumerate() {
        assert_eq!(parts_of(&plan, h), [DEVICES, 1, 1, 1]);
        for name in ["up", "down"] {
            assert_eq!(parts(&storage(&plan, &format!("{name}{i}")).parameter, &plan), [DEVICES, 1, 1]);
        }
    }
    let elements = batch * experts * capacity * width / DEVICES;
    for phase in [Phase::Forward, Phase::Backward] {
        let sent = sent(&programs, phase);
        // The first layer's tokens are the model's input. The host splits it in any way, and nothing needs its
        // gradient.
        let least = 2 * hidden.len() - 1;
        assert!(count(&sent, "all_to_all", elements) >= least, "{phase:?} {sent:?}");
    }
    let pins: Vec<(ValueId, &[u64])> = hidden.iter().map(|&h| (h, &[DEVICES, 1, 1, 1][..])).collect();
    assert_priced_alike(&request, &plan, &pins);
}

/// A large vocabulary: the rows of its tables are split, the loss is computed where the logits are, and no device ever
/// has all logits.
#[test]
fn vocabulary_parallelism() {
    vocabulary_is_split(false);
}

/// The same if one table serves for both lookup and logits.
#[test]
fn vocabulary_parallelism_of_a_tied_table() {
    vocabulary_is_split(true);
}

fn vocabulary_is_split(tied: bool) {
    let (batch, width, vocabulary) = (512, 1024, 1 << 18);
    let mut g = Graph::new("vocabulary");
    let ids = labels(&mut g, "ids", &[batch]);
    let next = labels(&mut g, "labels", &[batch]);
    let table = weight(&mut g, "table", &[vocabulary, width]);
    let x = array::embedding(&mut g, table, ids).expect("rows");
    let mix = weight(&mut g, "mix", &[width, width]);
    let x = project(&mut g, x, mix);
    let x = g.unary(Unary::Tanh, x);
    let head = if tied { table } else { weight(&mut g, "head", &[vocabulary, width]) };
    let logits = dot(&mut g, x, head, [&[], &[]], [&[1], &[1]]);
    let loss = array::cross_entropy(&mut g, logits, next, 1).expect("a loss");
    let request = request(&batched(g, loss), cluster());
    let (plan, programs) = chosen(&request);
    assert_eq!(parts_of(&plan, logits), [1, DEVICES]);
    assert_eq!(parts(&storage(&plan, if tied { "table" } else { "head" }).parameter, &plan), [DEVICES, 1]);
    assert_eq!(parts(&storage(&plan, "table").parameter, &plan).iter().product::<u64>(), DEVICES);
    for phase in [Phase::Forward, Phase::Backward] {
        let sent = sent(&programs, phase);
        assert!(sent.iter().all(|(_, elements)| *elements <= batch * width), "{phase:?} {sent:?}");
    }
    let values = programs.programs.iter().flat_map(|p| &p.bodies).flat_map(|b| &b.graph.nodes);
    let whole: Vec<_> = values.filter(|node| node.ty.shape == [batch, vocabulary]).collect();
    assert!(whole.is_empty(), "{whole:?}");
    assert_priced_alike(&request, &plan, &[(logits, &[1, DEVICES]), (head, &[DEVICES, 1])]);
}

/// One large image: its rows are split, and each device fetches the edges of its neighbours' rows.
#[test]
fn spatial_parallelism() {
    let (rows, columns, features, layers) = (4096, 4096, 16, 3);
    let mut g = Graph::new("image");
    let mut x = input(&mut g, "x", &[1, features, rows, columns]);
    let mut products = Vec::new();
    let conv = array::Conv {
        stride: vec![1, 1],
        pad_low: vec![1, 1],
        pad_high: vec![1, 1],
        dilation: vec![1, 1],
        groups: 1,
        ..array::Conv::default()
    };
    for i in 0..layers {
        let kernel = weight(&mut g, &format!("kernel{i}"), &[features, features, 3, 3]);
        x = array::convolution(&mut g, x, kernel, None, &conv).expect("a convolution");
        products.push(x);
        x = g.unary(Unary::Tanh, x);
    }
    let loss = mean_square(&mut g, x);
    let request = request(&batched(g, loss), cluster());
    let (plan, programs) = chosen(&request);
    let layout = parts_of(&plan, products[0]);
    assert!(layout == [1, 1, DEVICES, 1] || layout == [1, 1, 1, DEVICES], "{layout:?}");
    for &x in &products {
        assert_eq!(parts_of(&plan, x), layout);
    }
    let is_halo = |c: &(&'static str, u64)| {
        c.0 == Collective::Halo { axes: vec![], dim: 0, low: 0, high: 0, reducer: Reducer::Sum }.name()
    };
    let forward = sent(&programs, Phase::Forward);
    assert_eq!(forward.iter().filter(|c| is_halo(c)).count(), layers, "{forward:?}");
    assert!(forward.iter().all(|c| is_halo(c) || c.1 == 1), "{forward:?}");
    let pins: Vec<(ValueId, &[u64])> = products.iter().map(|&x| (x, &layout[..])).collect();
    assert_priced_alike(&request, &plan, &pins);
}
