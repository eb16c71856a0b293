//! The rules against the reference interpreter: random values in random layouts, on all devices of small meshes.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::run_mesh;
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Binary, Input, Op, Operator, Reduce, Reducer};
use altiplano_ir::reshard::Collective;
use altiplano_ir::sharding::{DimLayout, Sharding};
use altiplano_ir::tensor::{Tensor, for_each_index};
use altiplano_ir::testing::numbers::{Rng, close, random, shard_randomly};
use altiplano_ir::testing::{Case, cases, ty};
use altiplano_ir::types::TensorType;
use altiplano_prover::body::has_local_form;
use altiplano_prover::layout::{Layout, atoms, cut, from_atoms, local_size, popped, pushed};
use altiplano_prover::rules::{Given, Global, collective, common, counted, is_resized, is_scalable, results, splits};
use altiplano_prover::term::{Operands, Term, Terms};

fn meshes() -> Vec<Mesh> {
    vec![Mesh::new(&[("a", 2)]), Mesh::new(&[("a", 2), ("b", 2)]), Mesh::new(&[("a", 2), ("b", 3)])]
}

/// A random layout of a dimension, by some of the axes that are left.
fn random_dim(size: u64, left: &mut Vec<AxisId>, mesh: &Mesh, rng: &mut Rng) -> DimLayout {
    let mut dim = DimLayout::whole(size);
    for axis in left.clone() {
        let outer = rng.choose(&[1, 1, 2, 3]);
        if rng.below(2) == 0
            && let Some(next) = pushed(&dim, axis, outer, mesh)
        {
            dim = next;
            left.retain(|a| *a != axis);
        }
    }
    dim
}

/// A random layout without free dimensions. Partial axes have the reducer.
fn random_layout(shape: &[u64], reducer: Reducer, mesh: &Mesh, rng: &mut Rng) -> Layout {
    let mut left: Vec<AxisId> = mesh.axis_ids().collect();
    if rng.below(2) == 0 {
        left.reverse();
    }
    let dims = shape.iter().map(|&size| Some(random_dim(size, &mut left, mesh, rng))).collect();
    let mut partial: Vec<_> = left.into_iter().filter(|_| rng.below(3) == 0).map(|a| (a, reducer)).collect();
    partial.sort_unstable();
    Layout { dims, partial }
}

fn sharding(layout: &Layout) -> Sharding {
    let dims = layout.dims.iter().map(|d| d.clone().expect("no free dimension")).collect();
    Sharding { dims, partial: layout.partial.clone() }
}

/// The positions of a device's elements along a dimension: any, if it is free.
fn positions(dim: &Option<DimLayout>, local: u64, mesh: &Mesh, device: u32) -> Vec<u64> {
    match dim {
        Some(dim) => dim.global_indices(mesh, &mesh.coordinates(device)),
        None => vec![0; local as usize],
    }
}

/// Returns the first contradiction to a fact: that the devices' values are parts of `whole` in this layout.
fn contradiction(values: &[Tensor], whole: &Tensor, layout: &Layout, mesh: &Mesh) -> Option<String> {
    let axes: Vec<AxisId> = layout.partial.iter().map(|p| p.0).collect();
    for device in 0..mesh.num_devices() {
        let local = &values[device as usize];
        let places: Vec<Vec<u64>> =
            layout.dims.iter().zip(local.shape()).map(|(dim, &size)| positions(dim, size, mesh, device)).collect();
        if places.iter().zip(local.shape()).any(|(p, &size)| p.len() as u64 != size) {
            return Some(format!("device {device} has shape {:?}", local.shape()));
        }
        let group = mesh.group(&axes, device);
        let mut wrong = None;
        for_each_index(local.shape(), |index| {
            let source: Vec<u64> = index.iter().zip(&places).map(|(&i, p)| p[i as usize]).collect();
            let parts = group.iter().map(|&d| values[d as usize].at(index));
            let combine = layout.partial.first().map(|p| p.1.combine());
            let reduced = parts.reduce(|a, b| combine.map_or(a, |op| op.apply(a, b, local.ty.dtype))).unwrap_or(0.0);
            if !close(reduced, whole.at(&source), 1e-9) {
                wrong = Some(format!("device {device} at {index:?}: {reduced} and {}", whole.at(&source)));
            }
        });
        if wrong.is_some() {
            return wrong;
        }
    }
    None
}

/// A local op on operands that every device has its own of.
fn run(op: &Op, mesh: &Mesh, operands: &[Vec<Tensor>]) -> Option<Vec<Tensor>> {
    let mut graph = Graph::new("local");
    for (i, parts) in operands.iter().enumerate() {
        graph.emit(Op::Input(Input { name: format!("x{i}"), ty: parts[0].ty.clone() }), &[]);
    }
    let leaves: Vec<ValueId> = graph.values().collect();
    let result = graph.push(op.clone(), &leaves).ok()?;
    let values = run_mesh(&graph, mesh, |v, device| operands[v.index()][device as usize].clone());
    Some(values[result.index()].clone())
}

#[test]
fn dimensions_are_cut_pushed_and_popped_as_their_positions_are() {
    let (mut pushes, mut cuts) = (0, 0);
    for (mesh, mut rng) in meshes().into_iter().cycle().zip(Rng::sequence(3)).take(3000) {
        let size = rng.choose(&[4, 6, 8, 12, 24, 36]);
        let mut left: Vec<AxisId> = mesh.axis_ids().collect();
        let dim = random_dim(size, &mut left, &mesh, &mut rng);
        assert_eq!(from_atoms(atoms(&dim, &mesh), &mesh), dim);
        let outer = rng.choose(&[1, 2, 3, 4]);
        if let Some(&axis) = left.first()
            && let Some(next) = pushed(&dim, axis, outer, &mesh)
        {
            pushes += 1;
            assert_eq!(popped(&next, axis, outer, &mesh).as_ref(), Some(&dim));
            for device in 0..mesh.num_devices() {
                let at = mesh.coordinates(device);
                let before = dim.global_indices(&mesh, &at);
                let (blocks, n) = (before.len() / outer as usize, mesh.size(axis) as usize);
                let own = at[axis.0 as usize] as usize * (blocks / n);
                let kept = before.chunks(blocks).flat_map(|block| block[own..own + blocks / n].to_vec());
                assert_eq!(next.global_indices(&mesh, &at), kept.collect::<Vec<_>>(), "{dim:?} {axis:?} {outer}");
            }
        }
        let first = rng.choose(&[2, 3, 4]);
        if size % first == 0
            && let Some(parts) = cut(&dim, &[first, size / first], &mesh)
        {
            cuts += 1;
            for device in 0..mesh.num_devices() {
                let at = mesh.coordinates(device);
                let [major, minor] = [&parts[0], &parts[1]].map(|d| d.global_indices(&mesh, &at));
                let joined = major.iter().flat_map(|i| minor.iter().map(move |j| i * (size / first) + j));
                assert_eq!(joined.collect::<Vec<_>>(), dim.global_indices(&mesh, &at));
            }
        }
    }
    assert!(pushes > 500 && cuts > 500, "{pushes} {cuts}");
}

fn random_collective(rank: u64, mesh: &Mesh, rng: &mut Rng) -> Collective {
    let mut axes: Vec<AxisId> = mesh.axis_ids().filter(|_| rng.below(2) == 0).collect();
    if axes.is_empty() {
        axes.push(AxisId(0));
    }
    let reducer = rng.choose(&[Reducer::Sum, Reducer::Sum, Reducer::Max]);
    let (dim, outer) = (rng.below(rank) as u8, rng.choose(&[1, 1, 2]));
    match rng.below(6) {
        0 => Collective::AllReduce { axes, reducer },
        1 => Collective::ReduceScatter { axes, reducer, dim, outer },
        2 => Collective::AllGather { axes, dim, outer },
        3 => Collective::LocalSlice { axes, dim, outer },
        4 => Collective::KeepFirst { axes, reducer },
        _ => {
            let concat_dim = rng.below(rank) as u8;
            Collective::AllToAll { axes, split_dim: dim, split_outer: outer, concat_dim, concat_outer: outer }
        }
    }
}

#[test]
fn collectives_change_layouts_as_they_change_values() {
    let mut applied = std::collections::BTreeMap::new();
    for (mesh, mut rng) in meshes().into_iter().cycle().zip(Rng::sequence(4)).take(20_000) {
        let shape = [rng.choose(&[4, 12, 24]), rng.choose(&[4, 6, 12])];
        let reducer = rng.choose(&[Reducer::Sum, Reducer::Max]);
        let layout = random_layout(&shape, reducer, &mesh, &mut rng);
        let op = random_collective(2, &mesh, &mut rng);
        let Some((after, factor)) = collective(&op, &layout, &mesh) else { continue };
        let whole = random(&TensorType::new(altiplano_ir::dtype::DType::F32, shape), (-2.0, 2.0), (0, 4), &mut rng);
        let parts = shard_randomly(&whole, &sharding(&layout), &mesh, &mut rng);
        let name = op.name();
        let Some(values) = run(&Op::collective(op.clone(), &mesh), &mesh, &[parts]) else {
            panic!("{op:?} on {layout:?} is refused");
        };
        let expected = Tensor::new(whole.ty.clone(), whole.data.iter().map(|x| x * factor).collect());
        let wrong = contradiction(&values, &expected, &after, &mesh);
        assert_eq!(wrong, None, "{op:?} on {} gives {}", layout.text(&mesh), after.text(&mesh));
        *applied.entry(name).or_insert(0) += 1;
    }
    assert!(applied.len() == 6 && applied.values().all(|&n| n > 50), "{applied:?}");
}

/// The layouts that a rule gives a case whose operands have these layouts, and the local results.
fn check_case(case: &Case, mesh: &Mesh, rng: &mut Rng) -> usize {
    let layouts: Vec<Layout> = case
        .operands
        .iter()
        .map(|ty| {
            let reducer = rng.choose(&[Reducer::Sum, Reducer::Sum, Reducer::Max]);
            let mut layout = random_layout(&ty.shape, reducer, mesh, rng);
            if !ty.dtype.is_float() || rng.below(2) == 0 {
                layout.partial.clear();
            }
            layout
        })
        .collect();
    let wholes = case.random_operands(rng);
    let locals: Vec<Vec<u64>> =
        layouts.iter().map(|l| l.dims.iter().flatten().map(|d| local_size(d, mesh)).collect()).collect();
    let given: Vec<Given<'_>> =
        layouts.iter().zip(&locals).map(|(layout, local)| Given { layout, local, is_zero: false }).collect();
    let global = Global { op: &case.op, operands: &case.operands, result: &case.result };
    let Some(splits) = splits(global, &given, mesh) else { return 0 };
    // The local op: resized to any shape that a device could have.
    let mut checked = 0;
    let whole = case.op.eval(&wholes.iter().collect::<Vec<_>>(), &case.result);
    let parts: Vec<Vec<Tensor>> =
        wholes.iter().zip(&layouts).map(|(w, l)| shard_randomly(w, &sharding(l), mesh, rng)).collect();
    for shape in shapes(&case.result.shape, mesh) {
        let layouts_of_result = results(global, &splits, &shape, mesh);
        if layouts_of_result.is_empty() {
            continue;
        }
        let shapes: Vec<&[u64]> = locals.iter().map(|l| l.as_slice()).collect();
        let op = case.op.resized(&shapes, &shape);
        let types: Vec<TensorType> = parts.iter().map(|p| p[0].ty.clone()).collect();
        let fits = op.infer(&types.iter().collect::<Vec<_>>()).is_ok_and(|ty| ty.shape == shape);
        if !fits || !is_resized(global, &op, &given, &shape) {
            continue;
        }
        for layout in layouts_of_result {
            let Some(values) = run(&op, mesh, &parts) else { continue };
            let texts: Vec<String> = layouts.iter().map(|l| l.text(mesh)).collect();
            let wrong = contradiction(&values, &whole, &layout, mesh);
            assert_eq!(wrong, None, "{} on {texts:?} gives {}", case.label(), layout.text(mesh));
            checked += 1;
        }
    }
    checked
}

/// All shapes that dimensions split by some axes can have.
fn shapes(whole: &[u64], mesh: &Mesh) -> Vec<Vec<u64>> {
    let mut parts: Vec<u64> = vec![1];
    for axis in mesh.axis_ids() {
        parts.extend(parts.clone().iter().map(|p| p * mesh.size(axis)));
    }
    parts.sort_unstable();
    parts.dedup();
    let mut all = vec![Vec::new()];
    for &size in whole {
        let sizes: Vec<u64> = parts.iter().filter(|p| size % **p == 0).map(|p| size / p).collect();
        all = all
            .iter()
            .flat_map(|shape: &Vec<u64>| sizes.iter().map(move |&s| shape.iter().copied().chain([s]).collect()))
            .take(200)
            .collect();
    }
    all
}

#[test]
fn ops_on_parts_compute_parts() {
    let mut checked = 0;
    let mut names = std::collections::BTreeSet::new();
    for case in cases() {
        let local = matches!(case.op, Op::Collective(_) | Op::AxisIndex(_) | Op::HostCopy(_));
        if local || case.op.is_leaf() || has_local_form(&case.op) || matches!(case.op, Op::Composite(_) | Op::Iota(_)) {
            continue;
        }
        for (mesh, mut rng) in meshes().into_iter().cycle().zip(Rng::sequence(5)).take(60) {
            let of_case = check_case(&case, &mesh, &mut rng);
            checked += of_case;
            if of_case > 0 {
                names.insert(case.op.name());
            }
        }
    }
    assert!(checked > 2000 && names.len() > 50, "{checked} of {names:?}");
}

/// A sum along dimensions without change, a reshape and a block of them hold in every layout that is offered.
#[test]
fn free_dimensions_stand_for_any_part() {
    let (mut checked, mut slices) = (0, 0);
    for (mesh, mut rng) in meshes().into_iter().cycle().zip(Rng::sequence(6)).take(600) {
        let whole = Tensor::splat(ty("f32[12,24]"), 1.5);
        let local = [rng.choose(&[12, 6, 4, 2]), rng.choose(&[24, 12, 8, 6, 4])];
        let layout = Layout::free(2);
        let given = [Given { layout: &layout, local: &local, is_zero: false }];
        let sum = Op::Reduce(altiplano_ir::op::Reduce { reducer: Reducer::Sum, dims: vec![1] });
        let reshape = Op::Reshape(altiplano_ir::op::Reshape { shape: vec![288] });
        let (start, limit, stride) = (vec![0, 6], vec![12, 12], vec![1, 1]);
        let block = Op::Slice(altiplano_ir::op::Slice { start, limit, stride });
        for op in [sum, reshape, block] {
            let result = op.infer(&[&whole.ty]).expect("a type");
            let types = [whole.ty.clone()];
            let global = Global { op: &op, operands: &types, result: &result };
            let Some(splits) = splits(global, &given, &mesh) else { continue };
            let shape = match &op {
                Op::Reduce(_) => vec![local[0]],
                Op::Slice(_) => vec![local[0], local[1] / 4],
                _ => vec![local[0] * local[1]],
            };
            let local_op = op.resized(&[&local], &shape);
            let part = Tensor::splat(whole.ty.with_shape(local), 1.5);
            let values = run(&local_op, &mesh, &[vec![part; mesh.num_devices() as usize]]).expect("values");
            let expected = op.eval(&[&whole], &result);
            for after in results(global, &splits, &shape, &mesh) {
                let wrong = contradiction(&values, &expected, &after, &mesh);
                assert_eq!(wrong, None, "{op:?} of {local:?} gives {}", after.text(&mesh));
                checked += 1;
                slices += usize::from(matches!(op, Op::Slice(_)));
            }
        }
    }
    assert!(checked > 100 && slices > 100, "{checked}, {slices} of slices");
}

/// Sums of two values, with shares of replicated scalars.
#[test]
fn sums_have_the_common_layout() {
    let mut checked = 0;
    for (mesh, mut rng) in meshes().into_iter().cycle().zip(Rng::sequence(7)).take(4000) {
        let of = ty(if rng.below(2) == 0 { "f32[]" } else { "f32[12]" });
        let layouts = [0, 1].map(|_| random_layout(&of.shape, Reducer::Sum, &mesh, &mut rng));
        let wholes = [0, 1].map(|_| random(&of, (-2.0, 2.0), (0, 4), &mut rng));
        let parts = [0, 1].map(|i| shard_randomly(&wholes[i], &sharding(&layouts[i]), &mesh, &mut rng));
        let shapes = [0, 1].map(|i: usize| parts[i][0].shape().to_vec());
        let [a, b] = [0, 1].map(|i: usize| Given { layout: &layouts[i], local: &shapes[i], is_zero: false });
        let Some((layout, factors)) = common(a, b, rng.below(2) == 0, &mesh) else { continue };
        let add = Op::Binary(altiplano_ir::op::Binary::Add);
        let values = run(&add, &mesh, &parts).expect("a sum");
        let sum = wholes[0].data.iter().zip(&wholes[1].data).map(|(x, y)| x * factors[0] + y * factors[1]);
        let expected = Tensor::new(of, sum.collect());
        assert_eq!(contradiction(&values, &expected, &layout, &mesh), None, "{layouts:?}");
        checked += 1;
    }
    assert!(checked > 500, "{checked}");
}

#[test]
fn multiples_have_the_layout_of_the_value() {
    let (mut checked, mut kept) = (0, 0);
    for (mesh, mut rng) in meshes().into_iter().cycle().zip(Rng::sequence(8)).take(2000) {
        let of = ty("f32[12,6]");
        let reducer = rng.choose(&[Reducer::Sum, Reducer::Max]);
        let layout = random_layout(&of.shape, reducer, &mesh, &mut rng);
        let whole = random(&of, (-2.0, 2.0), (0, 4), &mut rng);
        let factor = rng.choose(&[-3.0, -1.0, 0.25, 7.0]);
        let times = |t: &Tensor| Tensor::new(t.ty.clone(), t.data.iter().map(|x| x * factor).collect());
        let parts = shard_randomly(&whole, &sharding(&layout), &mesh, &mut rng);
        let values: Vec<Tensor> = parts.iter().map(times).collect();
        let wrong = contradiction(&values, &times(&whole), &layout, &mesh);
        match is_scalable(&layout) {
            true => assert_eq!(wrong, None, "{layout:?} times {factor}"),
            false => kept += usize::from(wrong.is_some()),
        }
        checked += 1;
    }
    assert!(checked > 1000 && kept > 50, "{checked} {kept}");
}

/// The factors that terms take out of an op, with operands that are multiples, and some that are 0.
#[test]
fn common_factors_pass_through_linear_ops() {
    let mut names = std::collections::BTreeSet::new();
    for case in cases() {
        let local = matches!(case.op, Op::Collective(_) | Op::AxisIndex(_) | Op::HostCopy(_));
        if local || case.op.is_leaf() || matches!(case.op, Op::Composite(_)) {
            continue;
        }
        for mut rng in Rng::sequence(9).take(30) {
            let wholes = case.random_operands(&mut rng);
            let mut terms = Terms::of_pair();
            let common = rng.choose(&[-2.0, 0.5, 3.0]);
            let mut factors = Vec::new();
            let mut given = Operands::new();
            let mut bases: Vec<Term> = Vec::new();
            for (i, of) in case.operands.iter().enumerate() {
                let factor = match of.dtype.is_float() {
                    true => rng.choose(&[0.0, 1.0, common, common, common]),
                    false => 1.0,
                };
                let leaf = terms.leaf(format!("x{i}"), &of.shape);
                bases.push(leaf);
                factors.push(factor);
                given.push(if factor == 1.0 { leaf } else { terms.scaled(leaf, factor) });
            }
            let mut left = given.clone();
            let factor = terms.factored(&case.op, &mut left, &case.operands, &case.result);
            if factor == 1.0 {
                continue;
            }
            let times = |t: &Tensor, by: f64| Tensor::new(t.ty.clone(), t.data.iter().map(|x| x * by).collect());
            let scaled: Vec<Tensor> = wholes.iter().zip(&factors).map(|(w, f)| times(w, *f)).collect();
            // An operand that is no more the given term is the leaf alone.
            let without = |(i, w): (usize, &Tensor)| if left[i] == bases[i] { w.clone() } else { scaled[i].clone() };
            let without: Vec<Tensor> = wholes.iter().enumerate().map(without).collect();
            let eval = |operands: &[Tensor]| case.op.eval(&operands.iter().collect::<Vec<_>>(), &case.result);
            let (value, base) = (eval(&scaled), eval(&without));
            let equal = |(a, b): (&f64, &f64)| !a.is_finite() || close(*a, b * factor, 1e-9);
            assert!(value.data.iter().zip(&base.data).all(equal), "{} with {factors:?}", case.label());
            names.insert(case.op.name());
        }
    }
    assert!(names.len() > 15, "{names:?}");
}

#[test]
fn counts_begin_at_a_device_s_offset() {
    let mesh = Mesh::new(&[("a", 2), ("b", 3)]);
    for axes in [vec![], vec![AxisId(0)], vec![AxisId(1)], vec![AxisId(0), AxisId(1)], vec![AxisId(1), AxisId(0)]] {
        let size = 24 / mesh.product(&axes);
        let dim = counted(24, size, &axes, &mesh).expect("it divides");
        for device in 0..mesh.num_devices() {
            let first = mesh.index_along(&axes, &mesh.coordinates(device)) * size;
            let expected: Vec<u64> = (first..first + size).collect();
            assert_eq!(dim.global_indices(&mesh, &mesh.coordinates(device)), expected);
        }
    }
    assert_eq!(counted(25, 12, &[AxisId(0)], &mesh), None);
}

#[test]
fn squares_that_several_devices_weight_add_up_to_one() {
    let (number, scalar) = (ty("f32[8]"), ty("f32[]"));
    let (multiply, sum) = (Op::Binary(Binary::Multiply), Op::Reduce(Reduce { reducer: Reducer::Sum, dims: vec![0] }));
    for holders in 1..=256 {
        let mut terms = Terms::new(1);
        // The gradient of a tied parameter is a sum.
        let [a, b] = ["a", "b"].map(|name| terms.leaf(name.into(), &number.shape));
        let half = terms.scaled(b, 0.5);
        let tied = terms.add(a, half);
        let squares = |terms: &mut Terms, x: Term| {
            let square = terms.apply(&multiply, &[x, x], &[&number, &number], &number);
            terms.apply(&sum, &[square], &[&number], &scalar)
        };
        for x in [a, half, tied] {
            let whole = squares(&mut terms, x);
            let weighted = terms.scaled(x, 1.0 / f64::from(holders).sqrt());
            let share = squares(&mut terms, weighted);
            assert_eq!(terms.scaled(share, f64::from(holders)), whole, "{holders} holders");
        }
    }
}

/// A summand that is 1e600 times smaller than another is a summand all the same.
#[test]
fn no_summand_is_lost_in_a_common_factor() {
    let (number, scalar) = (ty("f32[8]"), ty("f32[]"));
    let sum = Op::Reduce(Reduce { reducer: Reducer::Sum, dims: vec![0] });
    let mut terms = Terms::new(1);
    let [a, b] = ["a", "b"].map(|name| terms.leaf(name.into(), &number.shape));
    let (large, small) = (terms.scaled(a, 1e300), terms.scaled(b, 1e-300));
    let both = terms.add(large, small);
    let [both, large] = [both, large].map(|x| terms.apply(&sum, &[x], &[&number], &scalar));
    assert_ne!(both, large);
}

#[test]
fn factors_of_sums_are_taken_out_once() {
    let (number, scalar) = (ty("f32[8]"), ty("f32[]"));
    let sum = Op::Reduce(Reduce { reducer: Reducer::Sum, dims: vec![0] });
    for divisor in 1..=1000 {
        let mut terms = Terms::of_pair();
        let [a, b] = ["a", "b"].map(|name| terms.leaf(name.into(), &number.shape));
        // The multiple comes first, so that its base is computed from it.
        let [share_a, share_b] = [a, b].map(|x| terms.scaled(x, 1.0 / f64::from(divisor)));
        let share = terms.add(share_a, share_b);
        let share = terms.apply(&sum, &[share], &[&number], &scalar);
        let both = terms.add(a, b);
        let whole = terms.apply(&sum, &[both], &[&number], &scalar);
        assert_eq!(terms.scaled(share, f64::from(divisor)), whole, "{divisor} parts");
    }
}
