//! Reshards and transfers between random shardings must preserve the tensor.

use super::numbers::{Rng, difference, random, shard_randomly};
use super::*;
use crate::program::messages;
use crate::reshard::{Pattern, legs, reshard, split_further};
use crate::sharding::{DimLayout, Segment, Sharding};
use proptest::prelude::*;

/// A random valid sharding. Each dimension is cut into random segments. Each axis goes to a random segment that it
/// divides, is partial, or is left replicated.
fn random_sharding(shape: &[u64], mesh: &Mesh, reducer: Option<Reducer>, rng: &mut Rng) -> Sharding {
    let mut segments: Vec<(usize, Segment)> = Vec::new();
    for (dim, &size) in shape.iter().enumerate() {
        let mut left = size;
        while left > 1 {
            let divisors: Vec<u64> = (2..=left).filter(|d| left % d == 0).collect();
            let size = rng.choose(&divisors);
            segments.push((dim, Segment { size, axes: Default::default() }));
            left /= size;
        }
    }
    let mut axes: Vec<AxisId> = mesh.axis_ids().collect();
    if rng.below(2) == 1 {
        axes.reverse();
    }
    let mut partial = Vec::new();
    for axis in axes {
        match (rng.below(5), reducer) {
            (0, _) => {}
            (1, Some(reducer)) => partial.push((axis, reducer)),
            _ => {
                let fits = |s: &Segment| s.size.is_multiple_of(mesh.product(&s.axes) * mesh.size(axis));
                let choices: Vec<usize> = (0..segments.len()).filter(|&i| fits(&segments[i].1)).collect();
                if !choices.is_empty() {
                    let at = rng.choose(&choices);
                    segments[at].1.axes.push(axis);
                }
            }
        }
    }
    partial.sort();
    let layout = |dim: usize| {
        let mine = segments.iter().filter(|(d, _)| *d == dim).map(|(_, s)| s.clone());
        DimLayout::from_segments(mine, mesh)
    };
    Sharding { dims: (0..shape.len()).map(layout).collect(), partial }
}

fn some_mesh(rng: &mut Rng) -> Mesh {
    rng.choose(&[
        Mesh::new(&[("a", 2)]),
        Mesh::new(&[("a", 3)]),
        Mesh::new(&[("a", 2), ("b", 2)]),
        Mesh::new(&[("a", 2), ("b", 3)]),
        Mesh::new(&[("a", 2), ("b", 2), ("c", 3)]),
        Mesh::new(&[("a", 2), ("b", 2), ("c", 2)]),
    ])
}

fn some_shape(rng: &mut Rng) -> Vec<u64> {
    let shapes: [&[u64]; 6] = [&[8, 12, 6], &[12, 6], &[24], &[2, 12, 4], &[5, 12], &[8, 1, 6]];
    rng.choose(&shapes).to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn resharding_keeps_the_tensor(seed in any::<u64>()) {
        let rng = &mut Rng::new(seed);
        let (mesh, shape) = (some_mesh(rng), some_shape(rng));
        let reducer = rng.choose(&[Reducer::Sum, Reducer::Max, Reducer::Min, Reducer::Product]);
        let after = rng.choose(&[Some(reducer), Some(reducer), None]);
        let from = random_sharding(&shape, &mesh, Some(reducer), rng);
        let to = random_sharding(&shape, &mesh, after, rng);
        prop_assert!(from.is_valid(&shape, &mesh), "{}", from.display(&mesh));
        prop_assert!(to.is_valid(&shape, &mesh), "{}", to.display(&mesh));
        let path = format!("{} to {} on {mesh}", from.display(&mesh), to.display(&mesh));

        let ty = TensorType::new(DType::F32, shape.clone());
        let whole = random(&ty, (-2.0, 2.0), (0, 1), rng);
        let mut parts = shard_randomly(&whole, &from, &mesh, rng);
        let mut now = from.clone();
        for step in reshard(&from, &to, &mesh) {
            let op = Op::collective(step.collective.clone(), &mesh);
            let operand = now.local_type(&ty, &mesh);
            let expected = step.result.local_type(&ty, &mesh);
            prop_assert_eq!(op.infer(&[&operand]), Ok(expected.clone()), "{}: {:?}", &path, &step);
            prop_assert!(step.result.is_valid(&shape, &mesh), "{}: {:?}", &path, &step);
            parts = crate::interpret::collective(&step.collective, &mesh, &parts);
            prop_assert!(parts.iter().all(|p| p.ty == expected), "{}: {:?}", &path, &step);
            let between = crate::interpret::unshard(&parts, &ty, &step.result, &mesh);
            prop_assert_eq!(difference(&between, &whole, 1e-9), None, "{}: {:?}", &path, &step);
            now = step.result;
        }
        prop_assert_eq!(&now, &to);
        // Replicas agree: all devices of a replica group hold the same values.
        if !to.is_partial() {
            for device in 0..mesh.num_devices() {
                let expected = crate::interpret::shard(&whole, &to, &mesh, device);
                prop_assert_eq!(difference(&parts[device as usize], &expected, 1e-9), None, "{}", &path);
            }
        }
    }

    #[test]
    fn remembered_reshards_are_those_of_any_size(seed in any::<u64>()) {
        let rng = &mut Rng::new(seed);
        let mesh = some_mesh(rng);
        for _ in 0..20 {
            let shape = some_shape(rng);
            let from = random_sharding(&shape, &mesh, Some(Reducer::Sum), rng);
            let to = random_sharding(&shape, &mesh, Some(Reducer::Sum), rng);
            let path = format!("{} to {} on {mesh}", from.display(&mesh), to.display(&mesh));
            let ty = TensorType::new(DType::F32, shape);
            let patterns = [&from, &to].map(|layout| Pattern::of(layout, &mesh));
            let (steps, known) = (reshard(&from, &to, &mesh), legs(patterns, &from, &to, &mesh));
            prop_assert_eq!(steps.len(), known.len(), "{}", &path);
            let mut now = from;
            for (step, leg) in steps.into_iter().zip(known.iter()) {
                prop_assert_eq!(&step.collective, &leg.collective, "{}", &path);
                prop_assert_eq!(now.local_bytes(&ty, &mesh), ty.bytes() / leg.parts(&mesh)[0], "{}", &path);
                prop_assert_eq!(step.result.local_bytes(&ty, &mesh), ty.bytes() / leg.parts(&mesh)[1], "{}", &path);
                now = step.result;
            }
        }
    }

    #[test]
    fn resharding_to_the_same_sharding_is_nothing(seed in any::<u64>()) {
        let rng = &mut Rng::new(seed);
        let (mesh, shape) = (some_mesh(rng), some_shape(rng));
        let sharding = random_sharding(&shape, &mesh, Some(Reducer::Sum), rng);
        prop_assert!(reshard(&sharding, &sharding, &mesh).is_empty());
    }

    #[test]
    fn random_shardings_print_and_parse(seed in any::<u64>()) {
        let rng = &mut Rng::new(seed);
        let (mesh, shape) = (some_mesh(rng), some_shape(rng));
        let sharding = random_sharding(&shape, &mesh, Some(Reducer::Max), rng);
        let text = sharding.display(&mesh).to_string();
        prop_assert_eq!(Sharding::parse(&text, &shape, &mesh), Some(sharding), "{}", text);
    }

    #[test]
    fn equal_placements_are_equal_layouts(seed in any::<u64>()) {
        let rng = &mut Rng::new(seed);
        let mesh = some_mesh(rng);
        let (one, two) = (random_sharding(&[24], &mesh, None, rng), random_sharding(&[24], &mesh, None, rng));
        let places = |s: &Sharding| -> Vec<Vec<u64>> {
            let devices = 0..mesh.num_devices();
            devices.map(|d| s.dims[0].global_indices(&mesh, &mesh.coordinates(d))).collect()
        };
        prop_assert_eq!(places(&one) == places(&two), one == two, "{} {}", one.display(&mesh), two.display(&mesh));
    }

    #[test]
    fn transfers_move_the_tensor(seed in any::<u64>()) {
        let rng = &mut Rng::new(seed);
        let (source_mesh, target_mesh, shape) = (some_mesh(rng), some_mesh(rng), some_shape(rng));
        let from = random_sharding(&shape, &source_mesh, None, rng);
        let to = random_sharding(&shape, &target_mesh, None, rng);
        let whole = random(&TensorType::new(DType::F32, shape), (-2.0, 2.0), (0, 1), rng);
        let sent = shard_randomly(&whole, &from, &source_mesh, rng);
        let empty = Tensor::splat(to.local_type(&whole.ty, &target_mesh), f64::NAN);
        let mut received = vec![empty; target_mesh.num_devices() as usize];
        let mut writes = vec![0; received.len()];
        for message in messages(&from, &source_mesh, &to, &target_mesh) {
            prop_assert!(message.source < source_mesh.num_devices());
            let (source, target) = (&sent[message.source as usize], &mut received[message.target as usize]);
            let counts: Vec<u64> = message.source_indices.iter().map(|i| i.len() as u64).collect();
            let at = |indices: &[Vec<u64>], i: &[u64]| -> Vec<u64> {
                indices.iter().zip(i).map(|(list, &k)| list[k as usize]).collect()
            };
            crate::tensor::for_each_index(&counts, |i| {
                let offset = target.offset(&at(&message.target_indices, i));
                target.data[offset] = source.at(&at(&message.source_indices, i));
                writes[message.target as usize] += 1;
            });
        }
        for (device, part) in received.iter().enumerate() {
            let expected = crate::interpret::shard(&whole, &to, &target_mesh, device as u32);
            prop_assert_eq!(difference(part, &expected, 0.0), None, "device {}", device);
            prop_assert_eq!(writes[device] as u64, part.ty.elements(), "each element comes once");
        }
    }
}

/// The sum of replicas in groups is scattered inside a group before it is reduced among groups, in any order of axes.
#[test]
fn what_is_scattered_is_scattered_before_the_rest_is_reduced() {
    let mesh = Mesh::new(&[("a", 4), ("b", 8)]);
    for (whole, split) in [(AxisId(0), AxisId(1)), (AxisId(1), AxisId(0))] {
        let mut from = Sharding::replicated(&[64, 16]);
        from.partial = vec![(AxisId(0), Reducer::Sum), (AxisId(1), Reducer::Sum)];
        let to = split_further(&Sharding::replicated(&[64, 16]), 0, split, &mesh).expect("it divides");
        let steps: Vec<Collective> = reshard(&from, &to, &mesh).into_iter().map(|step| step.collective).collect();
        let reducer = Reducer::Sum;
        assert_eq!(
            steps,
            [
                Collective::ReduceScatter { axes: vec![split], reducer, dim: 0, outer: 1 },
                Collective::AllReduce { axes: vec![whole], reducer }
            ]
        );
    }
}
