use super::{Candidate, NoStages, Query, Room, StageTable, Stages, plan_stages, sizes};
use crate::inter_op::submesh::{Block, SubmeshShape, place_blocks, shapes};
use altiplano_ir::plan::Schedule;
use proptest::prelude::*;

fn query(nodes: u32, devices_per_node: u32, num_microbatches: u32) -> Query {
    Query {
        rooms: vec![Room { nodes, devices_per_node, device_memory_bytes: 100 }],
        num_microbatches,
        schedule: Schedule::OneFOneB,
        num_stages: None,
        devices: Vec::new(),
        all_devices: true,
        relative_tolerance: 0.0,
    }
}

/// The same query on devices with this much memory.
fn within(device_memory_bytes: u64, query: Query) -> Query {
    let rooms = query.rooms.iter().map(|&room| Room { device_memory_bytes, ..room }).collect();
    Query { rooms, ..query }
}

/// Shapes in the first group.
fn in_first(shapes: Vec<SubmeshShape>) -> Vec<Block> {
    shapes.into_iter().map(|shape| Block { group: 0, shape }).collect()
}

/// All blocks of a cluster with one group.
fn blocks(nodes: u32, devices_per_node: u32) -> Vec<Block> {
    in_first(shapes(nodes, devices_per_node))
}

fn candidate(microbatch_s: f64, id: u32) -> Candidate {
    Candidate { microbatch_s, step_s: 0.0, static_bytes: 0, bytes_per_inflight_microbatch: 0, transient_bytes: 0, id }
}

/// Every range on every shape. `seconds` gives the time for a number of layers and of devices.
fn uniform(num_layers: usize, blocks: Vec<Block>, seconds: impl Fn(f64, f64) -> f64) -> StageTable {
    let mut table = StageTable::new(num_layers, blocks.clone());
    for first in 0..num_layers {
        for end in first + 1..=num_layers {
            for (i, block) in blocks.iter().enumerate() {
                let time = seconds((end - first) as f64, block.shape.num_devices() as f64);
                table.push(first, end, i, candidate(time, 0));
            }
        }
    }
    table
}

/// A stage as (first layer, end, block, candidate). The candidate's time includes entering the stage.
type Choice = (usize, usize, usize, Candidate);

fn blocks_of(stages: &[Choice], table: &StageTable) -> Vec<Block> {
    stages.iter().map(|(_, _, block, _)| table.blocks[*block]).collect()
}

/// Share of its device's memory that the fullest stage takes, and the stage's bytes.
fn fullest(stages: &[Choice], table: &StageTable, query: &Query) -> (f64, u64) {
    let held = |i: usize| query.schedule.in_flight(query.num_microbatches, stages.len() as u32, i as u32);
    let of_stage = |(i, (_, _, block, c)): (usize, &Choice)| {
        let bytes = c.static_bytes + c.transient_bytes + c.bytes_per_inflight_microbatch * u64::from(held(i));
        let limit = query.rooms[table.blocks[*block].group].device_memory_bytes;
        (bytes as f64 / limit as f64, bytes)
    };
    stages.iter().enumerate().map(of_stage).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((0.0, 0))
}

fn step_s(stages: &[Choice], query: &Query) -> f64 {
    let times = || stages.iter().map(|(_, _, _, c)| c.microbatch_s);
    let step = stages.iter().map(|(_, _, _, c)| c.step_s).fold(0.0, f64::max);
    times().sum::<f64>() + f64::from(query.num_microbatches - 1) * times().fold(0.0, f64::max) + step
}

/// Every plan, whatever its memory: all partitions, shapes and candidates that can be placed.
fn every_plan(table: &StageTable, query: &Query, visit: &mut dyn FnMut(&[Choice])) {
    fn extend(table: &StageTable, query: &Query, stages: &mut Vec<Choice>, visit: &mut dyn FnMut(&[Choice])) {
        let first = stages.last().map_or(0, |(_, end, _, _)| *end);
        let blocks = blocks_of(stages, table);
        let used =
            |group: usize| -> u64 { blocks.iter().filter(|b| b.group == group).map(|b| b.shape.num_devices()).sum() };
        let free: Vec<i64> =
            query.rooms.iter().enumerate().map(|(g, room)| room.num_devices() as i64 - used(g) as i64).collect();
        if free.iter().any(|&free| free < 0) {
            return;
        }
        if first == table.num_layers {
            let sizes_of = blocks.iter().map(|block| block.shape.num_devices());
            let given = query.devices.is_empty() || sizes_of.eq(query.devices.iter().copied());
            let counts = given && query.num_stages.is_none_or(|n| n as usize == stages.len());
            let placed = place_blocks(&blocks, &sizes(query)).is_some();
            if counts && placed && (free.iter().all(|&free| free == 0) || !query.all_devices) {
                visit(stages);
            }
            return;
        }
        for end in first + 1..=table.num_layers {
            for block in 0..table.blocks.len() {
                let before = blocks.last().map_or(0, |b| b.group);
                for candidate in table.candidates(first, end, block) {
                    let microbatch_s = candidate.microbatch_s + table.entering_s(first, block, before);
                    stages.push((first, end, block, Candidate { microbatch_s, ..*candidate }));
                    extend(table, query, stages, visit);
                    stages.pop();
                }
            }
        }
    }
    extend(table, query, &mut Vec::new(), visit);
}

/// The answer in the oracle's form, checked to be a partition from the table.
fn chosen(table: &StageTable, found: &Stages) -> Vec<Choice> {
    let (mut next, mut before) = (0, 0);
    let stages: Vec<Choice> = found
        .stages
        .iter()
        .map(|(layers, block, id)| {
            assert_eq!(layers.start, next);
            next = layers.end;
            let ways = table.candidates(layers.start, layers.end, *block);
            let way = ways.iter().find(|c| c.id == *id).expect("an id from the table");
            let microbatch_s = way.microbatch_s + table.entering_s(layers.start, *block, before);
            before = table.blocks[*block].group;
            (layers.start, layers.end, *block, Candidate { microbatch_s, ..*way })
        })
        .collect();
    assert_eq!(next, table.num_layers);
    stages
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0)
}

/// Compares the program with exhaustive search, in answers and in errors.
fn check_against_every_plan(table: &StageTable, query: &Query) -> Result<Stages, NoStages> {
    let (mut best_s, mut fewest, mut least_part, mut least_bytes) = (f64::INFINITY, 0, f64::INFINITY, u64::MAX);
    every_plan(table, query, &mut |stages| {
        let (part, bytes) = fullest(stages, table, query);
        least_part = least_part.min(part);
        least_bytes = least_bytes.min(bytes);
        let time_s = step_s(stages, query);
        if part > 1.0 {
            return;
        }
        // Times in these tests are multiples of 1/8: equal times are equal to the bit.
        if time_s < best_s || (time_s == best_s && stages.len() < fewest) {
            (best_s, fewest) = (time_s, stages.len());
        }
    });
    let found = plan_stages(table, query);
    match &found {
        Ok(stages) => {
            let plan = chosen(table, stages);
            assert!(close(stages.step_s, best_s), "{} is not {best_s}", stages.step_s);
            assert!(close(step_s(&plan, query), stages.step_s));
            assert_eq!(plan.len(), fewest, "equally fast with fewer stages");
            assert!(fullest(&plan, table, query).0 <= 1.0);
            let placed = place_blocks(&blocks_of(&plan, table), &sizes(query)).expect("placed");
            let used: usize = placed.iter().map(Vec::len).sum();
            let total: u64 = query.rooms.iter().map(Room::num_devices).sum();
            assert!(!query.all_devices || used as u64 == total);
            assert!(query.num_stages.is_none_or(|n| n as usize == plan.len()));
            let devices: Vec<u64> = blocks_of(&plan, table).iter().map(|block| block.shape.num_devices()).collect();
            assert!(query.devices.is_empty() || query.devices == devices);
            assert!(close(stages.bound_s, stages.step_s));
        }
        Err(NoStages::Memory { required_bytes, limit_bytes, .. }) => {
            assert_eq!(best_s, f64::INFINITY);
            assert_eq!(*required_bytes as f64 / *limit_bytes as f64, least_part);
            assert!(query.rooms.iter().any(|room| room.device_memory_bytes == *limit_bytes));
            assert!(query.rooms.len() > 1 || *required_bytes == least_bytes);
            assert!(required_bytes > limit_bytes);
        }
        Err(_) => assert_eq!(least_part, f64::INFINITY, "{found:?}"),
    }
    found
}

fn any_candidate() -> impl Strategy<Value = Candidate> {
    let eighths = |most: u32| (0..=most).prop_map(|n| f64::from(n) / 8.0);
    (eighths(80), eighths(160), 0u64..60, 0u64..25, 0u64..20).prop_map(
        |(microbatch_s, step_s, static_bytes, bytes_per_inflight_microbatch, transient_bytes)| Candidate {
            microbatch_s,
            step_s,
            static_bytes,
            bytes_per_inflight_microbatch,
            transient_bytes,
            id: 0,
        },
    )
}

/// All blocks of a cluster with these groups.
fn blocks_of_groups(groups: &[(u32, u32)]) -> Vec<Block> {
    let of_group = |(group, &(nodes, devices)): (usize, &(u32, u32))| {
        shapes(nodes, devices).into_iter().map(move |shape| Block { group, shape })
    };
    groups.iter().enumerate().flat_map(of_group).collect()
}

fn one_group() -> BoxedStrategy<Vec<(u32, u32)>> {
    prop_oneof![Just((2, 2)), Just((1, 4)), Just((1, 3)), Just((3, 2)), Just((1, 1))].prop_map(|g| vec![g]).boxed()
}

fn two_groups() -> BoxedStrategy<Vec<(u32, u32)>> {
    let group = || prop_oneof![Just((2, 1)), Just((1, 2)), Just((1, 1)), Just((1, 3)), Just((2, 2))];
    let idle = prop_oneof![8 => Just(None), 1 => Just(Some(0)), 1 => Just(Some(1))];
    let pair = (group(), group(), idle).prop_map(|(first, second, idle)| {
        let mut groups = vec![first, second];
        if let Some(group) = idle {
            groups[group].0 = 0;
        }
        groups
    });
    pair.boxed()
}

prop_compose! {
    /// A random table and a random query: some candidates are missing, and memory is tight.
    fn any_case(groups: BoxedStrategy<Vec<(u32, u32)>>)(
        groups in groups,
        num_layers in prop_oneof![1 => 1usize..3, 4 => 3usize..6],
        num_microbatches in 1u32..9,
        gpipe in any::<bool>(),
        memories in prop::collection::vec(20u64..300, 2),
        crossings in prop::collection::vec(0u32..40, 10),
        num_stages in prop_oneof![2 => Just(None), 1 => (1u32..5).prop_map(Some)],
        all_devices in any::<bool>(),
        coarse in any::<bool>(),
        density in 0.4f64..1.5,
        sizes_of_stages in prop_oneof![2 => Just(None), 1 => prop::collection::vec(1u64..4, 4).prop_map(Some)],
    )(
        cells in prop::collection::vec(
            prop::collection::vec(any_candidate(), 0..=3),
            num_layers * (num_layers + 1) / 2 * blocks_of_groups(&groups).len(),
        ),
        presence in prop::collection::vec(0.0f64..1.0, 75),
        (groups, memories, crossings) in Just((groups, memories, crossings)),
        (num_layers, num_microbatches) in Just((num_layers, num_microbatches)),
        (gpipe, num_stages, all_devices, coarse, density) in
            Just((gpipe, num_stages, all_devices, coarse, density)),
        sizes_of_stages in Just(sizes_of_stages),
    ) -> (StageTable, Query) {
        let mut table = StageTable::new(num_layers, blocks_of_groups(&groups));
        let mut crossings = crossings.into_iter().map(|n| f64::from(n) / 8.0).cycle();
        for first in 1..num_layers {
            for block in 0..table.blocks.len() {
                table.set_crossing(first, block, crossings.next().unwrap_or(0.0));
            }
        }
        let mut cells = cells.into_iter().zip(presence.into_iter().cycle());
        for first in 0..num_layers {
            for end in first + 1..=num_layers {
                for block in 0..table.blocks.len() {
                    let Some((ways, present)) = cells.next() else { continue };
                    if present > density {
                        continue;
                    }
                    for (id, mut way) in ways.into_iter().enumerate() {
                        if coarse {
                            // Many ties.
                            way.microbatch_s = (way.microbatch_s / 4.0).round();
                            way.step_s = (way.step_s / 10.0).round();
                        }
                        // More layers cost more, so that stages of one layer have a chance.
                        let layers = end - first;
                        table.push(first, end, block, Candidate {
                            microbatch_s: way.microbatch_s * layers as f64,
                            step_s: way.step_s * layers as f64,
                            static_bytes: way.static_bytes * layers as u64,
                            bytes_per_inflight_microbatch: way.bytes_per_inflight_microbatch * layers as u64,
                            id: id as u32,
                            ..way
                        });
                    }
                }
            }
        }
        let schedule = if gpipe { Schedule::GPipe } else { Schedule::OneFOneB };
        let room = |(&(nodes, devices_per_node), &device_memory_bytes): (&(u32, u32), &u64)| {
            Room { nodes, devices_per_node, device_memory_bytes }
        };
        let rooms = groups.iter().zip(&memories).map(room).collect();
        let devices = match (sizes_of_stages, num_stages) {
            (Some(sizes), Some(count)) => sizes.into_iter().take(count as usize).collect(),
            _ => Vec::new(),
        };
        let relative_tolerance = 0.0;
        let query = Query { rooms, num_microbatches, schedule, num_stages, devices, all_devices, relative_tolerance };
        (table, query)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn equals_exhaustive_search((table, query) in any_case(one_group())) {
        let found = check_against_every_plan(&table, &query);
        prop_assert_eq!(found, plan_stages(&table, &query), "the same again");
    }

    /// Stages in two groups, each with its own devices and memory, and a time to cross between them.
    #[test]
    fn equals_exhaustive_search_over_two_groups((table, query) in any_case(two_groups())) {
        let found = check_against_every_plan(&table, &query);
        prop_assert_eq!(found, plan_stages(&table, &query), "the same again");
    }

    /// A tolerance gives a valid plan within it.
    #[test]
    fn tolerance_bounds_the_loss((table, mut query) in any_case(prop_oneof![one_group(), two_groups()].boxed()), tolerance in 0.0f64..0.5) {
        let exact = plan_stages(&table, &query);
        query.relative_tolerance = tolerance;
        let loose = plan_stages(&table, &query);
        prop_assert_eq!(exact.is_ok(), loose.is_ok());
        if let (Ok(exact), Ok(loose)) = (exact, loose) {
            prop_assert!(loose.bound_s <= exact.step_s + 1e-9);
            prop_assert!(exact.step_s <= loose.step_s + 1e-9);
            prop_assert!(loose.bound_s >= loose.step_s * (1.0 - tolerance) - 1e-9);
            prop_assert!(close(step_s(&chosen(&table, &loose), &query), loose.step_s));
        }
    }
}

#[test]
fn microbatches_in_flight() {
    let held = |schedule: Schedule| (0..4).map(|i| schedule.in_flight(3, 4, i)).collect::<Vec<_>>();
    assert_eq!(held(Schedule::OneFOneB), [3, 3, 2, 1]);
    assert_eq!(held(Schedule::GPipe), [3, 3, 3, 3]);
}

#[test]
fn tables_keep_what_was_pushed() {
    let mut table = StageTable::new(4, blocks(1, 2));
    let mut id = 0;
    for first in 0..4 {
        for end in first + 1..=4 {
            for shape in 0..2 {
                table.push(first, end, shape, candidate(1.0, id));
                id += 1;
            }
        }
    }
    assert_eq!(id, 20);
    let mut id = 0;
    for first in 0..4 {
        for end in first + 1..=4 {
            for shape in 0..2 {
                let found: Vec<u32> = table.candidates(first, end, shape).iter().map(|c| c.id).collect();
                assert_eq!(found, [id]);
                id += 1;
            }
        }
    }
    for (first, end, shape) in [(2, 2, 0), (3, 2, 0), (0, 5, 0), (0, 1, 2), (9, 10, 0)] {
        assert!(table.candidates(first, end, shape).is_empty());
    }
}

/// Under perfect scaling, one stage is as fast as any balanced pipeline and has no bubble.
#[test]
fn ties_go_to_fewer_stages_and_earlier_layers() {
    let table = uniform(6, blocks(2, 4), |layers, devices| layers / devices);
    let found = plan_stages(&table, &query(2, 4, 16));
    let stages = found.map(|found| found.stages);
    assert_eq!(stages, Ok(vec![(0..6, 4 - 1, 0)]), "on {}", table.blocks[3].shape);

    // Three layers on two devices: one and two, or two and one.
    let table = uniform(3, blocks(2, 1)[..1].to_vec(), |layers, devices| layers / devices);
    let found = plan_stages(&table, &query(2, 1, 4));
    assert_eq!(found.map(|found| found.stages), Ok(vec![(0..1, 0, 0), (1..3, 0, 0)]));
}

/// With many microbatches the balanced pipeline wins, with one microbatch the one with the fewest idle stages.
#[test]
fn microbatches_decide_between_pipeline_and_one_stage() {
    // Two devices together are only 1.25 times as fast as one.
    let table = uniform(4, blocks(2, 1), |layers, devices| if devices == 1.0 { layers } else { layers / 1.25 });
    let stages = |b| plan_stages(&table, &query(2, 1, b)).map(|found| (found.stages.len(), found.step_s));
    assert_eq!(stages(1), Ok((1, 3.2)));
    assert_eq!(stages(8), Ok((2, 4.0 + 7.0 * 2.0)));
}

/// The first stage of a 1F1B pipeline holds the most activations and must take the slower, smaller candidate.
#[test]
fn memory_depends_on_the_position() {
    let mut table = StageTable::new(3, blocks(3, 1)[..1].to_vec());
    for layer in 0..3 {
        let fast = Candidate { bytes_per_inflight_microbatch: 40, ..candidate(1.0, 0) };
        let small = Candidate { bytes_per_inflight_microbatch: 10, ..candidate(1.5, 1) };
        table.push(layer, layer + 1, 0, fast);
        table.push(layer, layer + 1, 0, small);
    }
    let ids = |schedule| {
        let query = Query { schedule, ..query(3, 1, 3) };
        plan_stages(&table, &query).map(|found| found.stages.iter().map(|s| s.2).collect::<Vec<_>>())
    };
    assert_eq!(ids(Schedule::OneFOneB), Ok(vec![1, 0, 0]));
    assert_eq!(ids(Schedule::GPipe), Ok(vec![1, 1, 1]));
}

/// Fast microbatches do not hide a stage that is slow once per step.
#[test]
fn the_largest_step_cost_counts_once() {
    let mut table = StageTable::new(2, blocks(2, 1)[..1].to_vec());
    for layer in 0..2 {
        table.push(layer, layer + 1, 0, Candidate { step_s: 10.0, ..candidate(1.0, 0) });
        table.push(layer, layer + 1, 0, Candidate { step_s: 1.0, ..candidate(2.0, 1) });
    }
    for (b, id, step_s) in [(2, 1, 4.0 + 2.0 + 1.0), (9, 0, 2.0 + 8.0 + 10.0)] {
        let found = plan_stages(&table, &query(2, 1, b));
        let expect = Stages { stages: vec![(0..1, 0, id), (1..2, 0, id)], step_s, bound_s: step_s };
        assert_eq!(found, Ok(expect));
    }
}

#[test]
fn errors_say_what_fails() {
    // Two stages on one device each: the first holds two microbatches of 30 bytes and 50 + 5 more.
    let mut table = StageTable::new(2, blocks(1, 2));
    let way =
        Candidate { static_bytes: 50, bytes_per_inflight_microbatch: 30, transient_bytes: 5, ..candidate(1.0, 0) };
    table.push(0, 1, 0, way);
    table.push(1, 2, 0, way);
    table.push(0, 2, 1, Candidate { static_bytes: 90, ..way });
    let with_stages = |num_stages, limit| within(limit, Query { num_stages, ..query(1, 2, 8) });
    let memory = |required_bytes, limit_bytes, layers, block: usize, num_stages, in_flight| {
        let block = table.blocks[block];
        Err(NoStages::Memory { required_bytes, limit_bytes, layers, block, stage: 0, num_stages, in_flight })
    };
    for (num_stages, limit, expect) in [
        (None, 100, memory(115, 100, 0..1, 0, 2, 2)),
        (Some(2), 100, memory(115, 100, 0..1, 0, 2, 2)),
        (Some(1), 124, memory(125, 124, 0..2, 1, 1, 1)),
        (Some(3), 1000, Err(NoStages::MoreStagesThanLayers { num_stages: 3, num_layers: 2 })),
    ] {
        assert_eq!(plan_stages(&table, &with_stages(num_stages, limit)), expect);
    }
    let error = plan_stages(&table, &with_stages(None, 100)).map_err(|error| error.to_string());
    let text = "stage 0 of 2 (layers 0..1 on 1x1) needs at least 115 bytes per device with 2 microbatches in flight, \
                15 more than the limit of 100";
    assert_eq!(error, Err(text.to_string()));
    assert!(plan_stages(&table, &with_stages(None, 115)).is_ok());

    // Two stages cannot use three devices when blocks have one.
    let table = uniform(4, blocks(1, 1), |layers, _| layers);
    let three = Query { num_stages: Some(2), ..query(1, 3, 8) };
    let no_tiling = |num_stages, all_devices| Err(NoStages::NoTiling { sizes: vec![(1, 3)], num_stages, all_devices });
    assert_eq!(plan_stages(&table, &three), no_tiling(Some(2), true));
    assert!(plan_stages(&table, &Query { all_devices: false, ..three.clone() }).is_ok());
    let four = Query { num_stages: Some(4), all_devices: false, ..three.clone() };
    assert_eq!(plan_stages(&table, &four), no_tiling(Some(4), false));
    let zero = Query { num_stages: Some(0), ..three };
    assert_eq!(plan_stages(&table, &zero), no_tiling(Some(0), true));

    // No candidate covers layer 1.
    let mut table = StageTable::new(2, blocks(1, 1));
    table.push(0, 1, 0, candidate(1.0, 0));
    assert_eq!(plan_stages(&table, &query(1, 1, 8)), Err(NoStages::NoCandidates { num_layers: 2 }));
    table.push(0, 2, 0, candidate(f64::NAN, 0));
    table.push(0, 2, 0, candidate(f64::INFINITY, 1));
    table.push(0, 2, 0, candidate(-1.0, 2));
    assert_eq!(plan_stages(&table, &query(1, 1, 8)), Err(NoStages::NoCandidates { num_layers: 2 }));
    let empty = StageTable::new(0, blocks(1, 1));
    assert_eq!(plan_stages(&empty, &query(1, 1, 8)), Err(NoStages::NoCandidates { num_layers: 0 }));
}

/// 15 + 10 + 10 + 6 + 6 + 6 + 6 devices are fewer than those of two nodes of 30, but do not pack into them.
#[test]
fn stages_that_do_not_pack_are_not_returned() {
    let sizes = [15, 10, 10, 6, 6, 6, 6];
    let blocks = [6, 10, 15].map(|devices| SubmeshShape { nodes: 1, devices });
    let mut table = StageTable::new(7, in_first(blocks.to_vec()));
    for (layer, size) in sizes.into_iter().enumerate() {
        let shape = blocks.iter().position(|block| block.devices == size).expect("a block");
        table.push(layer, layer + 1, shape, candidate(1.0, size));
    }
    let query = Query { all_devices: false, ..query(2, 30, 4) };
    let found = plan_stages(&table, &query);
    assert!(matches!(found, Err(NoStages::NoCandidates { num_layers: 7 })), "{found:?}");

    // Slower, but only with blocks of six devices.
    for layer in 0..7 {
        table.push(layer, layer + 1, 0, candidate(2.0, 100));
    }
    let found = plan_stages(&table, &query).expect("seven blocks of six");
    assert!(found.stages.iter().all(|(_, shape, _)| *shape == 0));
    assert_eq!(found.step_s, 3.0 * 2.0 + 4.0 + 3.0 * 2.0);
    assert!(close(found.bound_s, 7.0 + 3.0));
}

/// Huge inputs are refused or counted without overflow.
#[test]
fn extreme_numbers_are_not_panics() {
    let mut table = StageTable::new(1, blocks(1, 1));
    table.push(
        0,
        1,
        0,
        Candidate { static_bytes: u64::MAX, bytes_per_inflight_microbatch: u64::MAX, ..candidate(1.0, 0) },
    );
    let found = plan_stages(&table, &query(1, 1, u32::MAX));
    assert!(matches!(found, Err(NoStages::Memory { required_bytes: u64::MAX, .. })), "{found:?}");
    let found = plan_stages(&table, &within(u64::MAX, query(1, 1, 0)));
    assert_eq!(found.map(|found| found.step_s), Ok(1.0));
    assert!(plan_stages(&table, &query(0, 1, 1)).is_err());
}

/// A group that only slows the pipeline down stays idle, and no crossing is made that costs too much.
#[test]
fn a_slow_group_may_stay_idle() {
    let both = vec![Block { group: 0, shape: shapes(1, 1)[0] }, Block { group: 1, shape: shapes(1, 1)[0] }];
    let stages = |seconds_of_slow: f64, crossing_s: f64, all_devices: bool| {
        let mut table = StageTable::new(4, both.clone());
        for first in 0..4 {
            for end in first + 1..=4 {
                table.push(first, end, 0, candidate((end - first) as f64, 0));
                table.push(first, end, 1, candidate((end - first) as f64 * seconds_of_slow, 1));
            }
        }
        (1..4).for_each(|first| (0..2).for_each(|block| table.set_crossing(first, block, crossing_s)));
        let rooms = vec![query(1, 1, 8).rooms[0]; 2];
        let found = plan_stages(&table, &Query { rooms, all_devices, ..query(1, 1, 8) }).expect("stages");
        found.stages.iter().map(|s| (s.0.len(), s.1)).collect::<Vec<_>>()
    };
    assert_eq!(stages(1.0, 0.0, false), [(2, 0), (2, 1)]);
    assert_eq!(stages(2.0, 0.0, false), [(1, 1), (3, 0)], "the last layer or the first, the earlier end first");
    assert_eq!(stages(9.0, 0.0, false), [(4, 0)]);
    assert_eq!(stages(9.0, 0.0, true), [(1, 1), (3, 0)]);
    assert_eq!(stages(1.0, 3.0, false), [(4, 0)]);
}
