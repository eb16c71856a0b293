//! The blocks of devices that a stage may get, and the placement of a plan's stages on the cluster.
//!
//! As in Alpa (Zheng et al. 2022, section 5.2), a block is either a part of one node whose size divides the node, or
//! several whole nodes. So counting devices is nearly always enough to know that the blocks of a plan fit.

use std::cmp::Reverse;
use std::fmt;

use serde::{Deserialize, Serialize};

/// A block of `nodes` nodes with `devices` devices on each: `1x4` is half of a node of eight, `2x8` two whole nodes of
/// eight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SubmeshShape {
    pub nodes: u32,
    /// Devices on each of the nodes.
    pub devices: u32,
}

impl SubmeshShape {
    /// The block of so many devices, if they are at most one node or whole nodes.
    pub fn of(devices: u32, devices_per_node: u32) -> Option<SubmeshShape> {
        match devices <= devices_per_node {
            true => Some(SubmeshShape { nodes: 1, devices }),
            false if devices.is_multiple_of(devices_per_node.max(1)) => {
                Some(SubmeshShape { nodes: devices / devices_per_node.max(1), devices: devices_per_node })
            }
            false => None,
        }
    }

    /// All devices of the block.
    pub fn num_devices(&self) -> u64 {
        u64::from(self.nodes) * u64::from(self.devices)
    }

    /// Returns true if a cluster of `nodes` x `devices_per_node` has this block, that is, if [`shapes`] lists it.
    pub fn is_block_of(&self, nodes: u32, devices_per_node: u32) -> bool {
        match self.nodes {
            0 => false,
            1 if nodes == 1 => (1..=devices_per_node).contains(&self.devices),
            1 => nodes > 1 && self.devices > 0 && devices_per_node.is_multiple_of(self.devices),
            n => n <= nodes && self.devices > 0 && self.devices == devices_per_node,
        }
    }
}

impl fmt::Display for SubmeshShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.nodes, self.devices)
    }
}

/// The blocks of a cluster that a stage may get: `1xm` for every `m` that divides `devices_per_node`
/// (every `m` up to it when there is one node only), then two and more whole nodes.
///
/// ```
/// use altiplano_planner::inter_op::submesh::shapes;
/// let names: Vec<String> = shapes(3, 4).iter().map(|s| s.to_string()).collect();
/// assert_eq!(names, ["1x1", "1x2", "1x4", "2x4", "3x4"]);
/// ```
pub fn shapes(nodes: u32, devices_per_node: u32) -> Vec<SubmeshShape> {
    let parts = (1..=devices_per_node).map(|devices| SubmeshShape { nodes: 1, devices });
    let wholes = (2..=nodes).map(|nodes| SubmeshShape { nodes, devices: devices_per_node });
    parts.chain(wholes).filter(|shape| shape.is_block_of(nodes, devices_per_node)).collect()
}

/// Places one block per stage on the cluster. Returns for each stage its global device ids (`node * devices_per_node +
/// local`), ascending. Returns `None` if a shape is no block of this cluster or no placement of all of them was found.
///
/// A block smaller than a node lies inside one node, at a multiple of its size if possible. Stages get devices in their
/// own order if that fits, otherwise the largest first. Only if neither fits, blocks may start anywhere.
///
/// **When largest first cannot fail.** Let the blocks need no more devices than there are. Whole-node blocks come first
/// and fill a prefix of the nodes without a gap, whatever their sizes. Suppose that each size below a node divides the
/// next larger one. Then the filled devices stay a prefix: `m` divides the sizes of all blocks laid before one of size
/// `m`, so the prefix ends at a multiple of `m`. Since `m` divides the node, the next `m` devices lie inside one node.
/// Powers of two are the paper's case of this. On a single node the prefix argument needs no divisibility. With several
/// nodes and sizes such as 15, 10 and 6 of 30, first fit can fail, and then the answer is `None`.
///
/// ```
/// use altiplano_planner::inter_op::submesh::{SubmeshShape, place};
/// let stages = [SubmeshShape { nodes: 1, devices: 2 }, SubmeshShape { nodes: 2, devices: 2 }];
/// assert_eq!(place(&stages, 3, 2), Some(vec![vec![0, 1], vec![2, 3, 4, 5]]));
/// ```
pub fn place(shapes: &[SubmeshShape], nodes: u32, devices_per_node: u32) -> Option<Vec<Vec<u32>>> {
    let total = nodes.checked_mul(devices_per_node)?;
    let known = shapes.iter().all(|shape| shape.is_block_of(nodes, devices_per_node));
    let needed: u64 = shapes.iter().map(SubmeshShape::num_devices).sum();
    if !known || needed > u64::from(total) {
        return None;
    }
    let stage_order: Vec<usize> = (0..shapes.len()).collect();
    let mut largest_first = stage_order.clone();
    largest_first.sort_by_key(|&stage| Reverse(shapes[stage].num_devices()));
    let lay = |order: &[usize], rising, aligned| lay_blocks(shapes, order, rising, aligned, total, devices_per_node);
    lay(&stage_order, true, true)
        .or_else(|| lay(&largest_first, false, true))
        .or_else(|| lay(&stage_order, true, false))
        .or_else(|| lay(&largest_first, false, false))
}

/// First fit in the given order. With `rising`, no block starts before the end of the previous one. With `aligned`, a
/// block inside a node starts at a multiple of its size.
fn lay_blocks(
    shapes: &[SubmeshShape],
    order: &[usize],
    rising: bool,
    aligned: bool,
    total: u32,
    devices_per_node: u32,
) -> Option<Vec<Vec<u32>>> {
    let mut used = vec![false; total as usize];
    let mut devices = vec![Vec::new(); shapes.len()];
    let mut floor = 0;
    for &stage in order {
        let shape = shapes[stage];
        let size = shape.nodes * shape.devices;
        let starts_well = |start: u32| {
            let local = start % devices_per_node;
            if size >= devices_per_node {
                local == 0
            } else {
                local + size <= devices_per_node && (!aligned || local.is_multiple_of(size))
            }
        };
        let start = (floor..=total.checked_sub(size)?).find(|&start| {
            starts_well(start) && used[start as usize..(start + size) as usize].iter().all(|used| !used)
        })?;
        used[start as usize..(start + size) as usize].fill(true);
        devices[stage] = (start..start + size).collect();
        if rising {
            floor = start + size;
        }
    }
    Some(devices)
}

/// A submesh shape in one group of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// Position of the group in the cluster.
    pub group: usize,
    pub shape: SubmeshShape,
}

/// Like [`place`], in a cluster of several groups, each given by its nodes and devices per node. Every block lies in
/// its own group, and devices are numbered through the groups.
///
/// ```
/// use altiplano_planner::inter_op::submesh::{Block, SubmeshShape, place_blocks};
/// let block = |group, devices| Block { group, shape: SubmeshShape { nodes: 1, devices } };
/// let stages = [block(1, 4), block(0, 2), block(1, 4)];
/// let placed = place_blocks(&stages, &[(1, 2), (2, 4)]);
/// assert_eq!(placed, Some(vec![vec![2, 3, 4, 5], vec![0, 1], vec![6, 7, 8, 9]]));
/// ```
pub fn place_blocks(blocks: &[Block], groups: &[(u32, u32)]) -> Option<Vec<Vec<u32>>> {
    let mut devices = vec![Vec::new(); blocks.len()];
    let mut first = 0u32;
    for (group, &(nodes, devices_per_node)) in groups.iter().enumerate() {
        let here: Vec<usize> = (0..blocks.len()).filter(|&i| blocks[i].group == group).collect();
        let shapes: Vec<SubmeshShape> = here.iter().map(|&i| blocks[i].shape).collect();
        for (i, placed) in here.into_iter().zip(place(&shapes, nodes, devices_per_node)?) {
            devices[i] = placed.into_iter().map(|local| first + local).collect();
        }
        first = first.checked_add(nodes.checked_mul(devices_per_node)?)?;
    }
    devices.iter().all(|placed| !placed.is_empty()).then_some(devices)
}

/// Like [`packable_families`], for blocks in several groups: every combination of a family of each.
pub fn packable_block_families(blocks: &[Block], groups: &[(u32, u32)]) -> Vec<Vec<usize>> {
    let mut families: Vec<Vec<usize>> = vec![Vec::new()];
    for (group, &(nodes, devices_per_node)) in groups.iter().enumerate() {
        let here: Vec<usize> = (0..blocks.len()).filter(|&i| blocks[i].group == group).collect();
        let shapes: Vec<SubmeshShape> = here.iter().map(|&i| blocks[i].shape).collect();
        let of_group = packable_families(&shapes, nodes, devices_per_node);
        let with = |family: &Vec<usize>, more: &Vec<usize>| -> Vec<usize> {
            let mut all: Vec<usize> = family.iter().copied().chain(more.iter().map(|&i| here[i])).collect();
            all.sort_unstable();
            all
        };
        families = families.iter().flat_map(|family| of_group.iter().map(move |more| with(family, more))).collect();
    }
    families
}

/// Splits shapes into families for which counting devices guarantees that [`place`] succeeds. In each family, the sizes
/// below a node divide one another. All whole-node shapes are in every family. The answer holds indices into `shapes`,
/// ascending; families overlap, and none contains another. A single node has one family, since there everything fits
/// that is not too large.
///
/// With 6 devices per node the sizes 1, 2, 3, 6 give the families 1, 2, 6 and 1, 3, 6.
pub fn packable_families(shapes: &[SubmeshShape], nodes: u32, devices_per_node: u32) -> Vec<Vec<usize>> {
    let usable: Vec<usize> = (0..shapes.len()).filter(|&i| shapes[i].is_block_of(nodes, devices_per_node)).collect();
    if nodes == 1 {
        return vec![usable];
    }
    let is_part = |i: usize| shapes[i].nodes == 1 && shapes[i].devices < devices_per_node;
    let mut sizes: Vec<u32> = usable.iter().filter(|&&i| is_part(i)).map(|&i| shapes[i].devices).collect();
    sizes.sort_unstable_by_key(|&size| Reverse(size));
    sizes.dedup();

    // Chains of sizes. Each is extended by the largest divisors of its last size: those with no other size in between.
    let mut finished: Vec<Vec<u32>> = Vec::new();
    let mut open: Vec<Vec<u32>> = vec![vec![devices_per_node]];
    while let Some(chain) = open.pop() {
        let last = chain.last().copied().unwrap_or(devices_per_node);
        let below: Vec<u32> = sizes.iter().copied().filter(|&size| size < last && last.is_multiple_of(size)).collect();
        let next: Vec<u32> = below
            .iter()
            .copied()
            .filter(|&size| !below.iter().any(|&between| between > size && between.is_multiple_of(size)))
            .collect();
        if next.is_empty() {
            finished.push(chain);
        } else {
            open.extend(next.iter().rev().map(|&size| {
                let mut longer = chain.clone();
                longer.push(size);
                longer
            }));
        }
    }
    finished
        .iter()
        .map(|chain| usable.iter().copied().filter(|&i| !is_part(i) || chain.contains(&shapes[i].devices)).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{SubmeshShape, packable_families, place, shapes};
    use proptest::prelude::*;

    fn block(nodes: u32, devices: u32) -> SubmeshShape {
        SubmeshShape { nodes, devices }
    }

    fn parts(sizes: &[u32]) -> Vec<SubmeshShape> {
        sizes.iter().map(|&m| block(1, m)).collect()
    }

    fn names(list: &[SubmeshShape]) -> String {
        let names: Vec<String> = list.iter().map(ToString::to_string).collect();
        names.join(" ")
    }

    #[test]
    fn shapes_of_clusters() {
        for (nodes, devices, expect) in [
            (1, 4, "1x1 1x2 1x3 1x4"),
            (1, 1, "1x1"),
            (2, 8, "1x1 1x2 1x4 1x8 2x8"),
            (3, 6, "1x1 1x2 1x3 1x6 2x6 3x6"),
            (4, 1, "1x1 2x1 3x1 4x1"),
            (0, 8, ""),
            (8, 0, ""),
        ] {
            assert_eq!(names(&shapes(nodes, devices)), expect, "{nodes}x{devices}");
        }
    }

    #[test]
    fn places_in_stage_order_when_it_fits() {
        let stages = [block(1, 1), block(1, 1), block(1, 2), block(2, 4)];
        let expect = vec![vec![0], vec![1], vec![2, 3], (4..12).collect()];
        assert_eq!(place(&stages, 3, 4), Some(expect));
        // With room to spare, the second block skips one device to start at a multiple of its size.
        assert_eq!(place(&parts(&[1, 2]), 1, 4), Some(vec![vec![0], vec![2, 3]]));
    }

    #[test]
    fn places_largest_first_when_stage_order_does_not_fit() {
        let stages = [block(1, 1), block(2, 4), block(1, 1), block(1, 2)];
        let expect = vec![vec![10], (0..8).collect(), vec![11], vec![8, 9]];
        assert_eq!(place(&stages, 3, 4), Some(expect));
        assert_eq!(place(&parts(&[1, 3, 3]), 1, 7), Some(vec![vec![6], vec![0, 1, 2], vec![3, 4, 5]]));
    }

    #[test]
    fn gives_up_multiples_before_giving_up() {
        let expect = vec![vec![0, 1], vec![2, 3, 4]];
        assert_eq!(place(&parts(&[2, 3]), 1, 5), Some(expect));
    }

    #[test]
    fn refuses_what_does_not_fit() {
        assert_eq!(place(&parts(&[2, 2, 1]), 1, 4), None);
        assert_eq!(place(&parts(&[3]), 2, 4), None, "3 does not divide 4");
        assert_eq!(place(&[block(2, 2)], 2, 4), None, "parts of two nodes");
        // 59 of 60 devices, but two nodes of 30 cannot be cut into these.
        assert_eq!(place(&parts(&[15, 10, 10, 6, 6, 6, 6]), 2, 30), None);
        assert_eq!(place(&[block(1, 1)], u32::MAX, 2), None);
    }

    #[test]
    fn every_combination_fits_two_nodes_of_six() {
        for ones in 0..=12 {
            for twos in 0..=6 {
                for threes in 0..=4 {
                    let mut sizes = vec![1; ones];
                    sizes.extend(vec![2; twos]);
                    sizes.extend(vec![3; threes]);
                    let fits = ones + 2 * twos + 3 * threes <= 12;
                    assert_eq!(place(&parts(&sizes), 2, 6).is_some(), fits, "{sizes:?}");
                }
            }
        }
    }

    #[test]
    fn families_are_chains_of_divisors() {
        let check = |nodes, devices, expect: &[&str]| {
            let all = shapes(nodes, devices);
            let families: Vec<String> = packable_families(&all, nodes, devices)
                .iter()
                .map(|family| names(&family.iter().map(|&i| all[i]).collect::<Vec<_>>()))
                .collect();
            assert_eq!(families, expect);
        };
        check(2, 8, &["1x1 1x2 1x4 1x8 2x8"]);
        check(1, 3, &["1x1 1x2 1x3"]);
        check(2, 6, &["1x1 1x3 1x6 2x6", "1x1 1x2 1x6 2x6"]);
        check(2, 1, &["1x1 2x1"]);
    }

    proptest! {
        /// Blocks are disjoint, inside the cluster, of their size, and inside a node or on whole nodes. If all shapes
        /// come from one family and are not too many, they are placed.
        #[test]
        fn placements_are_valid(
            nodes in 1u32..5,
            devices_per_node in 1u32..13,
            picks in prop::collection::vec(any::<prop::sample::Index>(), 1..14),
            family in any::<prop::sample::Index>(),
        ) {
            let all = shapes(nodes, devices_per_node);
            let families = packable_families(&all, nodes, devices_per_node);
            let family = family.get(&families);
            let total = u64::from(nodes * devices_per_node);
            for within_family in [true, false] {
                let mut stages: Vec<SubmeshShape> = Vec::new();
                for pick in &picks {
                    let shape = if within_family { all[*pick.get(family)] } else { *pick.get(&all) };
                    let taken: u64 = stages.iter().map(SubmeshShape::num_devices).sum();
                    if taken + shape.num_devices() <= total {
                        stages.push(shape);
                    }
                }
                let Some(placed) = place(&stages, nodes, devices_per_node) else {
                    prop_assert!(!within_family, "{} on {nodes}x{devices_per_node}", names(&stages));
                    continue;
                };
                prop_assert_eq!(placed.len(), stages.len());
                let mut seen = vec![false; total as usize];
                for (devices, shape) in placed.iter().zip(&stages) {
                    prop_assert_eq!(devices.len() as u64, shape.num_devices());
                    prop_assert!(devices.windows(2).all(|pair| pair[1] == pair[0] + 1));
                    for &device in devices {
                        prop_assert!(!std::mem::replace(&mut seen[device as usize], true));
                    }
                    let (first, last) = (devices[0], devices[devices.len() - 1]);
                    if shape.devices == devices_per_node {
                        prop_assert_eq!(first % devices_per_node, 0);
                    } else {
                        prop_assert_eq!(first / devices_per_node, last / devices_per_node);
                    }
                    if nodes > 1 {
                        let aligned = (first % devices_per_node).is_multiple_of(shape.devices);
                        prop_assert!(aligned || !within_family);
                    }
                }
            }
        }
    }
}
