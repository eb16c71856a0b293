//! How the layers of a model are dealt out to the stages of a pipeline: evenly, or so that the ends, which also embed
//! tokens and compute the loss, have fewer.

use super::fixed_degrees::evenly;
use crate::layers::graph::LayeredGraph;
use altiplano_ir::plan::Placement;
use std::ops::Range;

/// A rule that deals layers out to stages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Equally many to each; the first stages get one more if the number is uneven.
    #[default]
    Even,
    /// The first and the last stage get so many fewer than an even share, rounded up. The other stages are even, and
    /// those at the end get one more if `more_at_end`, else those at the beginning.
    Lighter { first: u8, last: u8, more_at_end: bool },
    /// As near as possible to the same FLOPs each.
    ByWork,
}

/// Most layers that the first or last stage lacks.
const MOST_FEWER: u8 = 3;

impl Layout {
    /// The layers of each stage; `None` if there are too few.
    pub fn stages(self, layered: &LayeredGraph, stages: u32) -> Option<Vec<Range<usize>>> {
        match self {
            Layout::Even => evenly(&layered.kinds, stages as usize),
            Layout::Lighter { first, last, more_at_end } => {
                lighter(&Blocks::of(&layered.kinds), stages as usize, [first, last].map(usize::from), more_at_end)
            }
            Layout::ByWork => {
                let work: Vec<f64> = (0..layered.kinds.len()).map(|l| work(layered, l)).collect();
                by_work(&Blocks::of(&layered.kinds), &work, stages as usize)
            }
        }
    }

    /// Different layouts of a number of stages, those first whose fullest device and stage have least work for so many
    /// microbatches. `lanes` is the number of blocks of devices that take stages in turn.
    pub fn ranked(
        layered: &LayeredGraph,
        stages: u32,
        lanes: u32,
        placement: Placement,
        num_microbatches: u32,
    ) -> Vec<Layout> {
        let work: Vec<f64> = (0..layered.kinds.len()).map(|l| work(layered, l)).collect();
        let lighter = |first| {
            (0..=MOST_FEWER)
                .flat_map(move |last| [false, true].map(|more_at_end| Layout::Lighter { first, last, more_at_end }))
        };
        let all = [Layout::Even].into_iter().chain((0..=MOST_FEWER).flat_map(lighter)).chain([Layout::ByWork]);
        let mut found: Vec<(f64, Vec<Range<usize>>, Layout)> = Vec::new();
        for layout in all {
            let Some(ranges) = layout.stages(layered, stages) else { continue };
            if found.iter().all(|(_, known, _)| *known != ranges) {
                found.push((most_work(&ranges, &work, lanes, placement, num_microbatches), ranges, layout));
            }
        }
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        found.into_iter().map(|(_, _, layout)| layout).collect()
    }
}

/// The work of a step by the fullest device, and of filling the pipeline by the fullest stage.
fn most_work(ranges: &[Range<usize>], work: &[f64], lanes: u32, placement: Placement, num_microbatches: u32) -> f64 {
    let of_stage: Vec<f64> = ranges.iter().map(|range| work[range.clone()].iter().sum()).collect();
    let lanes = lanes.max(1) as usize;
    let of_lane = |lane: usize| {
        let stages = placement.stages_of(lane, lanes, of_stage.len().div_ceil(lanes));
        stages.filter_map(|stage| of_stage.get(stage)).sum::<f64>()
    };
    let fullest = (0..lanes).map(of_lane).fold(0.0, f64::max);
    let longest = of_stage.iter().copied().fold(0.0, f64::max);
    f64::from(num_microbatches) * fullest + (lanes - 1) as f64 * longest
}

/// FLOPs of a layer.
fn work(layered: &LayeredGraph, layer: usize) -> f64 {
    let nodes = layered.starts[layer]..layered.starts[layer + 1];
    nodes.map(|v| layered.graph.flop(altiplano_ir::graph::ValueId(v)) as f64).sum()
}

/// Layers as stages may hold them: what precedes the repeated layers, those, and what follows them.
struct Blocks {
    /// Where each block begins, and the end.
    bounds: Vec<usize>,
    has_stem: bool,
    has_head: bool,
}

impl Blocks {
    /// Stages are cut before and after layers of a kind that occurs again.
    fn of(kinds: &[usize]) -> Blocks {
        let repeats = |l: usize| kinds.iter().filter(|&&kind| kind == kinds[l]).count() > 1;
        let n = kinds.len();
        let inner = (1..n).filter(|&l| repeats(l - 1) || repeats(l));
        let bounds = [0].into_iter().chain(inner).chain([n]).collect();
        let ends = |l: usize| n > 0 && !repeats(l);
        Blocks { bounds, has_stem: ends(0), has_head: ends(n.saturating_sub(1)) }
    }

    fn count(&self) -> usize {
        self.bounds.len() - 1
    }

    /// The layers of stages that end after so many blocks.
    fn ranges(&self, ends: &[usize]) -> Vec<Range<usize>> {
        let begins = [0].into_iter().chain(ends.iter().copied());
        begins.zip(ends).map(|(begin, &end)| self.bounds[begin]..self.bounds[end]).collect()
    }
}

fn lighter(blocks: &Blocks, stages: usize, fewer: [usize; 2], more_at_end: bool) -> Option<Vec<Range<usize>>> {
    let (stem, head) = (usize::from(blocks.has_stem), usize::from(blocks.has_head));
    let repeated = blocks.count().checked_sub(stem + head)?;
    if stages < 2 {
        return None;
    }
    let share = repeated.div_ceil(stages);
    let last = share.checked_sub(fewer[1])?;
    let first = if stages == 2 { repeated.checked_sub(last)? } else { share.checked_sub(fewer[0])? };
    let between = repeated.checked_sub(first + last)?;
    let inner = stages - 2;
    if first + stem == 0 || last + head == 0 || between < inner || inner == 0 && between > 0 {
        return None;
    }
    let (each, more) = (between / inner.max(1), between % inner.max(1));
    let mut ends = vec![stem + first];
    for s in 0..inner {
        let one_more = if more_at_end { s >= inner - more } else { s < more };
        ends.push(ends[s] + each + usize::from(one_more));
    }
    ends.push(blocks.count());
    Some(blocks.ranges(&ends))
}

/// Cuts where the work so far is nearest to the stage's share of all.
fn by_work(blocks: &Blocks, work: &[f64], stages: usize) -> Option<Vec<Range<usize>>> {
    let count = blocks.count();
    if stages == 0 || stages > count {
        return None;
    }
    let mut before = vec![0.0];
    for block in blocks.bounds.windows(2) {
        before.push(before[before.len() - 1] + work[block[0]..block[1]].iter().sum::<f64>());
    }
    let mut ends: Vec<usize> = Vec::with_capacity(stages);
    for s in 1..stages {
        let share = before[count] * s as f64 / stages as f64;
        let from = ends.last().map_or(1, |end| end + 1);
        let off = |end: &usize| (before[*end] - share).abs();
        ends.push((from..=count - (stages - s)).min_by(|a, b| off(a).total_cmp(&off(b)))?);
    }
    ends.push(count);
    Some(blocks.ranges(&ends))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kinds of an embedding, so many equal layers, and a head.
    fn model(layers: usize) -> Vec<usize> {
        [0].into_iter().chain(std::iter::repeat_n(1, layers)).chain([2]).collect()
    }

    fn lengths(ranges: Option<Vec<Range<usize>>>) -> Option<Vec<usize>> {
        ranges.map(|ranges| ranges.iter().map(Range::len).collect())
    }

    #[test]
    fn ends_have_fewer_layers() {
        let table = [
            // (layers, stages, fewer, more at the end, lengths with embedding and head)
            (6, 4, [0, 2], false, Some(vec![3, 2, 2, 1])),
            (6, 4, [1, 1], false, Some(vec![2, 2, 2, 2])),
            (7, 4, [0, 1], false, Some(vec![3, 2, 2, 2])),
            (8, 4, [1, 1], true, Some(vec![2, 3, 3, 2])),
            (9, 4, [1, 2], true, Some(vec![3, 3, 3, 2])),
            (8, 3, [2, 2], false, Some(vec![2, 6, 2])),
            (2, 4, [1, 1], false, Some(vec![1, 1, 1, 1])),
            (5, 2, [0, 2], false, Some(vec![5, 2])),
            (2, 5, [1, 1], false, None),
            (4, 1, [0, 0], false, None),
        ];
        for (layers, stages, fewer, at_end, expect) in table {
            let found = lengths(lighter(&Blocks::of(&model(layers)), stages, fewer, at_end));
            assert_eq!(found, expect, "{layers} layers in {stages} stages, {fewer:?} fewer");
        }
    }

    #[test]
    fn stages_of_equal_work_have_unequal_layers() {
        // Two layers with little work, four with four times as much, and a head.
        let kinds = [0, 1, 1, 2, 2, 2, 2, 3];
        let work = [0.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0, 3.0];
        let blocks = Blocks::of(&kinds);
        assert_eq!(lengths(by_work(&blocks, &work, 3)), Some(vec![4, 2, 2]));
        assert_eq!(lengths(by_work(&blocks, &work, 8)), Some(vec![1; 8]));
        assert_eq!(lengths(by_work(&blocks, &work, 9)), None);
    }

    #[test]
    fn models_without_equal_layers_have_one_block() {
        assert_eq!(Blocks::of(&[0, 1, 2]).count(), 1);
        assert_eq!(lengths(by_work(&Blocks::of(&[0, 1, 2]), &[1.0; 3], 2)), None);
    }

    #[test]
    fn the_fullest_device_decides_before_the_fullest_stage() {
        // Three stages of two layers and one of none, on two devices: each has four layers but one has two.
        let work = [1.0; 6];
        let ranges = [0..2, 2..4, 4..6, 6..6];
        assert_eq!(most_work(&ranges, &work, 2, Placement::Loop, 8), 8.0 * 4.0 + 2.0);
        assert_eq!(most_work(&ranges, &work, 4, Placement::Loop, 8), 8.0 * 2.0 + 3.0 * 2.0);
        // The first device has the first stage and the one of none.
        assert_eq!(most_work(&ranges, &work, 2, Placement::V, 8), 8.0 * 4.0 + 2.0);
        assert_eq!(most_work(&[0..1, 1..2, 2..4, 4..6], &work, 2, Placement::V, 8), 8.0 * 3.0 + 2.0);
    }
}
