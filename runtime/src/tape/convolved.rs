//! Convolutions as pieces: tiles are gathered and multiplied one after the other. If products do not pay, a convolution
//! is a loop program.

use super::Batch;
use super::prepare::{Operand, Piece, Pieces, Place, Product, Table};
use super::strided::Strided;
use crate::loops::{direct, gather, rounded};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::Convolution;
use altiplano_ir::storage::gathered::{Products, Steps};
use altiplano_ir::types::{TensorType, strides};

/// A matrix of `rows` by `columns` elements at a place, with its strides in both directions, one of which is 1.
fn operand(place: Place, dtype: DType, from: u64, [rows, columns]: [u64; 2], [row, column]: [u64; 2]) -> Operand {
    let transposed = column != 1 && columns > 1 || row == 1 && rows > 1 && columns > 1;
    let leading = if transposed { column } else { row.max(columns) };
    Operand { place, dtype, from, leading, transposed }
}

/// Appends the pieces of a convolution whose values are contiguous, by products of tiles of limited size.
pub fn convolution(
    table: &mut Table,
    pieces: &mut Pieces,
    op: &Convolution,
    places: [Place; 3],
    types: [&TensorType; 3],
    tile_bytes: u64,
) {
    let [lhs, rhs, result] = types;
    let shapes = types.map(|ty| ty.shape.as_slice());
    let Some(products) = Products::of(op, shapes, result.dtype, tile_bytes) else {
        let launch = table.add(direct(op, types));
        pieces.pieces.push(Piece::Launch { launch, params: places.to_vec(), starts: Vec::new() });
        return;
    };
    let dtype = result.dtype;
    let scratch = |pieces: &mut Pieces, dtype, elements: u64| match elements {
        0 => None,
        n => Some(pieces.scratch(&TensorType::new(dtype, vec![n]))),
    };
    let [of_kernel, of_tile, of_sums] = products.scratch();
    let kernel = scratch(pieces, dtype, of_kernel);
    let tile_place = scratch(pieces, dtype, of_tile);
    let sums = scratch(pieces, DType::F32, of_sums);
    if let (Some(copy), Some(order)) = (kernel, &products.kernel_copy) {
        let stride = strides(&rhs.shape);
        let sizes = order.iter().map(|&d| rhs.shape[d]).collect();
        let copied = Strided::gathered(sizes, 0, order.iter().map(|&d| stride[d]).collect());
        let launch = table.add(copied.launch(dtype, rhs.elements(), rhs.elements()));
        pieces.pieces.push(Piece::Launch { launch, params: vec![places[1], copy], starts: Vec::new() });
    }
    let kernel = kernel.unwrap_or(places[1]);
    let (to, sums_dtype) = sums.map_or((places[2], dtype), |sums| (sums, DType::F32));
    let (all_results, all_terms) = (products.num_before() * products.num_after(), products.num_terms());
    for tile in &products.tiles {
        let (results, terms) = (tile.results.1 - tile.results.0, tile.terms.1 - tile.terms.0);
        let (matrix, laid) = match (tile_place, products.in_place) {
            (Some(place), _) => {
                let launch = table.add(gather(op, &products, tile, lhs));
                let starts = [(tile.results.0, results, all_results), (tile.terms.0, terms, all_terms)];
                let starts = starts.into_iter().filter(|(_, part, all)| part != all).map(|s| s.0).collect();
                // Scratch beyond the tile's elements does not belong to this launch.
                pieces.pieces.push(Piece::Launch { launch, params: vec![places[0], place], starts });
                (place, products.gathered(tile))
            }
            (None, laid) => (places[0], laid.unwrap_or_else(|| products.gathered(tile))),
        };
        let of_kernel = Steps { from: products.kernel.from + tile.terms.0 * products.kernel.along, ..products.kernel };
        let of_result = products.results(tile);
        // With features last, a result is a row; otherwise it is a column of one product per index of the dimensions
        // before them.
        let (count, across) = match products.after.is_empty() {
            true => (1, results),
            false => (results.div_ceil(products.num_after()), results.min(products.num_after())),
        };
        let sizes = [across, products.outputs, terms];
        let ([lhs, rhs, written], sizes, swapped) = match products.after.is_empty() {
            true => {
                let lhs = operand(matrix, dtype, laid.from, [across, terms], [laid.across, laid.along]);
                let by = [of_kernel.along, of_kernel.across];
                let rhs = operand(kernel, dtype, of_kernel.from, [terms, products.outputs], by);
                let by = [of_result.across, 1];
                ([lhs, rhs, operand(to, sums_dtype, of_result.from, [across, products.outputs], by)], sizes, false)
            }
            false => {
                let by = [of_kernel.across, of_kernel.along];
                let lhs = operand(kernel, dtype, of_kernel.from, [products.outputs, terms], by);
                let rhs = operand(matrix, dtype, laid.from, [terms, across], [laid.along, laid.across]);
                let by = [of_result.along, 1];
                let written = operand(to, sums_dtype, of_result.from, [products.outputs, across], by);
                ([lhs, rhs, written], [products.outputs, across, terms], true)
            }
        };
        let batch = |count: u64, patches: u64, kernel: u64, result: u64| {
            let (lhs, rhs) = if swapped { (kernel, patches) } else { (patches, kernel) };
            Batch { count, lhs, rhs, result }
        };
        let mut batches = vec![
            batch(count, laid.batch, 0, of_result.batch),
            batch(products.groups, laid.group, of_kernel.group, of_result.group),
        ];
        batches.retain(|b| b.count > 1);
        // A library takes the last batch dimension in one call.
        batches.sort_by_key(|b| b.count);
        let accumulate = tile.terms.0 > 0;
        let operands = [lhs, rhs, written];
        pieces.pieces.push(Piece::Matmul(Box::new(Product { sizes, operands, batches, accumulate })));
    }
    if let Some(sums) = sums {
        let launch = table.add(rounded(DType::F32, dtype, result.elements()));
        pieces.pieces.push(Piece::Launch { launch, params: vec![sums, places[2]], starts: Vec::new() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loops::Source;
    use crate::loops::interpret::{Memory, run};
    use altiplano_ir::graph::ValueId;
    use altiplano_ir::op::{ImageDims, KernelDims, Operator, WindowDim};
    use altiplano_ir::tensor::{Tensor, for_each_index};
    use std::collections::BTreeMap;

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % n
        }

        fn tensor(&mut self, ty: &TensorType) -> Tensor {
            Tensor::from_fn(ty.clone(), |_| self.below(17) as f64 - 8.0)
        }

        /// A random permutation of the dimensions.
        fn order(&mut self, rank: usize) -> Vec<usize> {
            let mut order: Vec<usize> = (0..rank).collect();
            (1..rank).for_each(|i| order.swap(i, self.below(i as u64 + 1) as usize));
            order
        }
    }

    /// Runs pieces on the given values; scratch and results start as NaN.
    fn run_pieces(table: &Table, pieces: &Pieces, values: &mut BTreeMap<Place, Vec<f64>>) {
        for (i, &(_, elements)) in (0u32..).zip(&pieces.scratch) {
            values.insert(Place::Scratch(i), vec![f64::NAN; elements as usize]);
        }
        for piece in &pieces.pieces {
            match piece {
                Piece::Launch { launch, params, starts } => {
                    let launch = &table.launches[launch.0 as usize];
                    assert_eq!(launch.coordinates.len(), starts.len());
                    let source = |i: usize| Source::Value(ValueId(i as u32));
                    let mut memory: Memory =
                        params.iter().enumerate().map(|(i, place)| (source(i), values[place].clone())).collect();
                    for (param, place) in launch.params.iter().zip(params) {
                        assert!(param.elements as usize <= values[place].len());
                    }
                    run(launch, starts, &mut memory);
                    for (i, place) in params.iter().enumerate().filter(|(i, _)| launch.params[*i].written) {
                        values.insert(*place, memory[&source(i)].clone());
                    }
                }
                Piece::Matmul(product) => {
                    let [m, n, k] = product.sizes;
                    let [lhs, rhs, result] = product.operands;
                    assert!(!result.transposed);
                    let at = |o: &Operand, base: u64, row: u64, column: u64| {
                        let (major, minor) = if o.transposed { (column, row) } else { (row, column) };
                        (o.from + base + major * o.leading + minor) as usize
                    };
                    for (o, rows, columns) in [(&lhs, m, k), (&rhs, k, n), (&result, m, n)] {
                        let line = if o.transposed { rows } else { columns };
                        assert!(o.leading >= line, "lines of {o:?} overlap");
                    }
                    let counts: Vec<u64> = product.batches.iter().map(|b| b.count).collect();
                    for_each_index(&counts, |index| {
                        let base = |of: fn(&Batch) -> u64| -> u64 {
                            index.iter().zip(&product.batches).map(|(i, b)| i * of(b)).sum()
                        };
                        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                            let term = |l| {
                                values[&lhs.place][at(&lhs, base(|b| b.lhs), i, l)]
                                    * values[&rhs.place][at(&rhs, base(|b| b.rhs), l, j)]
                            };
                            let sum: f64 = (0..k).map(term).sum();
                            let to = at(&result, base(|b| b.result), i, j);
                            let before = if product.accumulate { values[&result.place][to] } else { 0.0 };
                            values.get_mut(&result.place).expect("a place")[to] = before + sum;
                        }
                    });
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Compares convolutions of all kinds and layouts, with tiles from one element to everything, with the reference.
    #[test]
    fn convolutions_are_what_the_reference_says() {
        let mut random = Random(7);
        let (mut products, mut in_place, mut apart, mut copies, mut loops) = (0, 0, 0, 0, 0);
        for _ in 0..900 {
            let rank = 2 + random.below(3) as usize;
            let groups = [1, 1, 2, 3][random.below(4) as usize];
            let (feature_groups, batch_groups) = if random.below(2) == 0 { (groups, 1) } else { (1, groups) };
            let (inputs, outputs) = (1 + random.below(7), [1, 3, 8, 9][random.below(4) as usize]);
            let (batch, order) = (1 + random.below(3), [random.order(rank), random.order(rank), random.order(rank)]);
            let simple = random.below(3) == 0;
            let window: Vec<WindowDim> = (0..rank - 2)
                .map(|_| match simple {
                    true => WindowDim::one(),
                    false => WindowDim {
                        size: 1 + random.below(3),
                        stride: 1 + random.below(2),
                        pad_low: random.below(4) as i64 - 1,
                        pad_high: random.below(4) as i64 - 1,
                        base_dilation: 1 + random.below(2),
                        window_dilation: 1 + random.below(2),
                        reversed: random.below(4) == 0,
                    },
                })
                .collect();
            let image = |o: &[usize]| ImageDims { batch: o[0], feature: o[1], spatial: o[2..].to_vec() };
            let op = Convolution {
                lhs: image(&order[0]),
                rhs: KernelDims { input: order[1][0], output: order[1][1], spatial: order[1][2..].to_vec() },
                result: image(&order[2]),
                window: window.clone(),
                feature_groups,
                batch_groups,
            };
            let (mut of_lhs, mut of_rhs) = (vec![0; rank], vec![0; rank]);
            of_lhs[op.lhs.batch] = batch * batch_groups;
            of_lhs[op.lhs.feature] = inputs * feature_groups;
            of_rhs[op.rhs.input] = inputs;
            of_rhs[op.rhs.output] = outputs * groups;
            for (i, w) in window.iter().enumerate() {
                of_lhs[op.lhs.spatial[i]] = 3 + random.below(3);
                of_rhs[op.rhs.spatial[i]] = w.size;
            }
            let dtype = [DType::F32, DType::BF16][random.below(2) as usize];
            let (lhs, rhs) = (TensorType::new(dtype, of_lhs), TensorType::new(dtype, of_rhs));
            let Ok(result) = op.infer(&[&lhs, &rhs]) else { continue };
            let (x, w) = (random.tensor(&lhs), random.tensor(&rhs));
            let expected = op.eval(&[&x, &w], &result);
            let tile_bytes = [1, 100, 700, u64::MAX][random.below(4) as usize];
            let (mut table, mut pieces) = (Table::default(), Pieces::default());
            let places = [0, 1, 2].map(|i| Place::Value(ValueId(i)));
            convolution(&mut table, &mut pieces, &op, places, [&lhs, &rhs, &result], tile_bytes);
            let mut values: BTreeMap<Place, Vec<f64>> =
                [(places[0], x.data), (places[1], w.data), (places[2], vec![f64::NAN; expected.data.len()])].into();
            run_pieces(&table, &pieces, &mut values);
            // The reference does not round sums of small formats.
            for (i, (&a, &b)) in expected.data.iter().zip(&values[&places[2]]).enumerate() {
                assert_eq!(
                    dtype.round(a),
                    dtype.round(b),
                    "[{i}] of {op:?} on {lhs} and {rhs}, tiles of {tile_bytes}: {pieces:?}"
                );
            }
            match Products::of(&op, [&lhs.shape, &rhs.shape, &result.shape], dtype, tile_bytes) {
                Some(p) => {
                    products += 1;
                    in_place += usize::from(p.in_place.is_some());
                    apart += usize::from(p.sums_apart);
                    copies += usize::from(p.kernel_copy.is_some());
                    let scratch: Vec<u64> = p.scratch().into_iter().filter(|&n| n > 0).collect();
                    assert_eq!(scratch, pieces.scratch.iter().map(|s| s.1).collect::<Vec<_>>());
                    let few = p.tiles.iter().all(|t| {
                        let (results, terms) = (t.results.1 - t.results.0, t.terms.1 - t.terms.0);
                        results == 1 || terms == 1 || results * terms * groups * dtype.bytes() <= tile_bytes
                    });
                    assert!(few || p.in_place.is_some(), "{p:?}");
                }
                None => loops += 1,
            }
        }
        let seen = [products, in_place, apart, copies, loops];
        assert!(seen.iter().all(|&n| n >= 10), "too few of a kind: {seen:?}");
    }
}
