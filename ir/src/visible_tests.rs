use super::*;
use crate::array::{arange, binary, causal_mask, compare, full_like, iota, permute, reshape, with_number};
use crate::interpret::run_all;
use crate::literal::Literal;
use crate::op::Input;
use crate::types::TensorType;

/// The fraction of a mask's tiles with a visible element, by computing the whole mask.
fn by_force(graph: &Graph, mask: Mask, tile: u64) -> f64 {
    let values = run_all(graph, |_| panic!("masks of these tests have no leaves"));
    let table = &values[mask.value.index()];
    let shape = graph.shape(mask.value);
    let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
    let matrices = shape[..shape.len() - 2].iter().product::<u64>();
    let mut visible = 0;
    for matrix in 0..matrices {
        for row in (0..rows).step_by(tile as usize) {
            for column in (0..columns).step_by(tile as usize) {
                let (last_row, last_column) = ((row + tile).min(rows), (column + tile).min(columns));
                let shows =
                    |r: u64, c: u64| (table.data[((matrix * rows + r) * columns + c) as usize] != 0.0) == mask.shows;
                let any = (row..last_row).any(|r| (column..last_column).any(|c| shows(r, c)));
                visible += if any { (last_row - row) * (last_column - column) } else { 0 };
            }
        }
    }
    visible as f64 / (matrices * rows * columns) as f64
}

/// Masks of 64 queries and 64 keys, as models write them.
fn masks() -> Vec<(&'static str, Graph, ValueId)> {
    let mut all = Vec::new();
    let mut add = |name: &'static str, build: &dyn Fn(&mut Graph) -> ValueId| {
        let mut g = Graph::new(name);
        let mask = build(&mut g);
        all.push((name, g, mask));
    };
    let distance = |g: &mut Graph| {
        let query = iota(g, &[64, 64], 0, DType::I32).unwrap();
        let key = iota(g, &[64, 64], 1, DType::I32).unwrap();
        binary(g, Binary::Subtract, query, key).unwrap()
    };
    let less = |g: &mut Graph, x: ValueId, most: f64| {
        let most = full_like(g, x, most).unwrap();
        compare(g, Direction::Lt, x, most).unwrap()
    };
    add("causal", &|g| causal_mask(g, 64, 64, 0).unwrap());
    add("window", &|g| {
        let (causal, distance) = (causal_mask(g, 64, 64, 0).unwrap(), distance(g));
        let near = less(g, distance, 8.0);
        binary(g, Binary::And, causal, near).unwrap()
    });
    add("window both ways", &|g| {
        let distance = distance(g);
        let distance = g.unary(Unary::Abs, distance);
        less(g, distance, 5.0)
    });
    add("prefix", &|g| {
        let causal = causal_mask(g, 64, 64, 0).unwrap();
        let key = iota(g, &[64, 64], 1, DType::I32).unwrap();
        let prefix = less(g, key, 16.0);
        binary(g, Binary::Or, causal, prefix).unwrap()
    });
    add("blocks", &|g| {
        let of = |g: &mut Graph, dim| {
            let at = iota(g, &[64, 64], dim, DType::I32).unwrap();
            with_number(g, Binary::Divide, at, 16.0).unwrap()
        };
        let (query, key) = (of(g, 0), of(g, 1));
        compare(g, Direction::Eq, query, key).unwrap()
    });
    add("of groups of heads, in f32", &|g| {
        let (rows, columns) =
            (arange(g, 64, 0.0, 1.0, DType::F32).unwrap(), arange(g, 64, 0.0, 1.0, DType::F32).unwrap());
        let (rows, columns) = (reshape(g, rows, &[64, 1]).unwrap(), reshape(g, columns, &[1, 64]).unwrap());
        let mask = compare(g, Direction::Le, columns, rows).unwrap();
        let mask = crate::array::broadcast_to(g, mask, &[3, 64, 64]).unwrap();
        let mask = reshape(g, mask, &[3, 1, 64, 64]).unwrap();
        permute(g, mask, &[1, 0, 2, 3]).unwrap()
    });
    add("a table", &|g| {
        let table = (0..64 * 64).map(|i| f64::from(u8::from((i / 64 / 8) % 3 == (i % 64 / 8) % 3))).collect();
        g.constant(Literal::dense(TensorType::new(DType::Bool, vec![64, 64]), table))
    });
    all
}

#[test]
fn the_visible_part_is_that_of_the_whole_mask() {
    for (name, graph, value) in masks() {
        for tile in [1, 4, 16, 128] {
            for shows in [true, false] {
                let mask = Mask { value, shows };
                let (found, expect) = (visible(&graph, mask, tile, &unknown_leaf), by_force(&graph, mask, tile));
                assert!((found - expect).abs() < 1e-12, "{name}, tiles of {tile}, {shows}: {found}, not {expect}");
            }
        }
    }
}

#[test]
fn the_visible_part_of_a_long_mask_is_found_in_few_places() {
    let mut g = Graph::new("long");
    let length = 1 << 20;
    let query = iota(&mut g, &[length, length], 0, DType::I32).unwrap();
    let key = iota(&mut g, &[length, length], 1, DType::I32).unwrap();
    let distance = binary(&mut g, Binary::Subtract, query, key).unwrap();
    let causal = compare(&mut g, Direction::Ge, query, key).unwrap();
    let window = full_like(&mut g, distance, 4096.0).unwrap();
    let near = compare(&mut g, Direction::Lt, distance, window).unwrap();
    let window = binary(&mut g, Binary::And, causal, near).unwrap();
    let part = |value, tile| visible(&g, Mask { value, shows: true }, tile, &unknown_leaf);
    assert!((part(causal, 1) - 0.5).abs() < 1e-3);
    assert!((part(causal, TILE) - 0.5).abs() < 1e-3);
    assert!((part(window, 1) * length as f64 - 4096.0).abs() < 50.0);
    // A band of 128 queries sees tiles that the window cuts on both sides.
    assert!((part(window, TILE) * length as f64 - 4096.0 - 128.0).abs() < 50.0);
}

#[test]
fn what_depends_on_data_may_be_visible_and_what_is_known_still_counts() {
    let mut g = Graph::new("padded");
    let ty = TensorType::new(DType::Bool, vec![64, 64]);
    let padding = g.push(Op::Input(Input { name: "padding".into(), ty }), &[]).unwrap();
    let causal = causal_mask(&mut g, 64, 64, 0).unwrap();
    let both = binary(&mut g, Binary::And, causal, padding).unwrap();
    let either = binary(&mut g, Binary::Or, causal, padding).unwrap();
    let part = |value| visible(&g, Mask { value, shows: true }, 1, &unknown_leaf);
    assert_eq!([part(padding), part(both), part(either)], [1.0, 65.0 / 128.0, 1.0]);
}
