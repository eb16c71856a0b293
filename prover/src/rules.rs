//! The trusted core: what follows for the layout of a result from an op and the layouts of its operands.
//!
//! A *fact* about a local value is a term and a [`Layout`]: on every device, the local value is the part of the term that
//! the layout selects, or a summand of that part over the partial axes. The rules derive facts from facts:
//!
//! 1. **Factors.** An op whose operands are parts along its factors ([`ShardingRule`]) computes the part of its result. A
//!    split reduction makes the result partial. All operands must agree on the split of a factor, an axis may do one
//!    thing only, and a factor that is needed whole must be whole.
//! 2. **Linearity.** An op that is linear in a set of operands maps summands of these to summands of the result, if the
//!    others are replicated over the axis. The constant 0 is a summand of 0 over every axis. An op that only moves
//!    elements maps the operands of any reduction to those of its result.
//! 3. **Sizes.** The local op must be the reference's op resized to the local shapes, with every attribute.
//! 4. **Free dimensions.** Along a dimension without change any part of the right size is the part of any layout.
//! 5. **Collectives.** A reduction removes partial axes of its reducer, gathers and slices move axes out of and into
//!    dimensions, `keep_first` makes a replicated value partial. An exchange is a gather and a slice.
//! 6. **Counts.** A local count plus `axis_index * size` is the part of the global count.
//! 7. **Sums.** Values of one layout add up to a value of that layout.
//! 8. **Shares.** A value `x` that is replicated over an axis of `n` devices is a summand of `n x`, and its all-reduced
//!    sum is `n x`. Used only for sums over all parameters, and in programs that others wrote.
//! 9. **Zeros.** A product with a factor that is 0 on every device is 0, and so is an accumulator that nothing is written to.
//! 10. **Multiples.** A constant times a part is that part of the multiple, and so for summands. An op that is linear in a
//!     set of operands takes a common factor of these to its result. Used only in programs that others wrote.
//!
//! The normal form of terms ([`crate::term`]) and the check of schedules ([`crate::schedule`]) are trusted as well.

use crate::layout::{Dim, Layout, cut, from_atoms, local_size, popped, pushed};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Op, Operator, Reducer};
use altiplano_ir::reshard::Collective;
use altiplano_ir::rule::{AxisUse, FactorKind, ShardingRule, Strategy};
use altiplano_ir::sharding::DimLayout;
use altiplano_ir::types::TensorType;
use std::collections::BTreeSet;

/// One operand of a local op: its layout, its local shape, and whether it is the constant 0.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    pub layout: &'a Layout,
    pub local: &'a [u64],
    pub is_zero: bool,
}

/// The split of a factor, as far as the operands determine it.
#[derive(Clone, Debug, PartialEq)]
pub enum Split {
    /// No operand has the factor.
    Unknown,
    /// The operands that have it do not change along it. The local size, if known.
    Free(Option<u64>),
    Known(DimLayout),
}

/// Consistent splits of all factors of an op.
#[derive(Clone, Debug)]
pub struct Splits {
    pub rule: ShardingRule,
    pub factors: Vec<Split>,
    pub partial: Vec<(AxisId, Reducer)>,
}

/// A global op: attributes and types.
#[derive(Clone, Copy)]
pub struct Global<'a> {
    pub op: &'a Op,
    pub operands: &'a [TensorType],
    pub result: &'a TensorType,
}

/// The splits of the factors of a global op whose operands have these layouts (rules 1 and 2). `None` if they do not
/// agree.
pub fn splits(global: Global<'_>, given: &[Given<'_>], mesh: &Mesh) -> Option<Splits> {
    let types: Vec<&TensorType> = global.operands.iter().collect();
    let rule = global.op.rule(&types, global.result);
    if rule.operands.len() != given.len() {
        return None;
    }
    let mut factors = vec![Split::Unknown; rule.factors.len()];
    for (dims, operand) in rule.operands.iter().zip(given) {
        if dims.len() != operand.layout.dims.len() || dims.len() != operand.local.len() {
            return None;
        }
        for ((of_dim, layout), &local) in dims.iter().zip(&operand.layout.dims).zip(operand.local) {
            add_dim(&rule, &mut factors, of_dim, layout, local, mesh)?;
        }
    }
    for (factor, split) in rule.factors.iter().zip(&mut factors) {
        match (factor.kind, &split) {
            (FactorKind::Whole, Split::Free(Some(size))) if *size == factor.size => {
                *split = Split::Known(DimLayout::whole(factor.size));
            }
            (FactorKind::Whole, Split::Free(_)) => return None,
            _ => {}
        }
    }
    for window in &rule.windows {
        follow(&rule, &mut factors, window.factor, &window.followers)?;
    }
    let mut partial = partial_of(&rule, given, moves(global.op))?;
    let mut used: Vec<AxisId> = partial.iter().map(|p| p.0).collect();
    for (f, (factor, split)) in rule.factors.iter().zip(&factors).enumerate() {
        let Split::Known(layout) = split else { continue };
        let is_window = rule.windows.iter().any(|w| usize::from(w.factor) == f);
        let axes: Vec<AxisId> = layout.axes().collect();
        match factor.kind {
            FactorKind::Whole if !axes.is_empty() && !is_window => return None,
            FactorKind::Reduction(reducer) => partial.extend(axes.iter().map(|&a| (a, reducer))),
            _ => {}
        }
        if rule.contiguous.contains(&(f as u8)) && layout.segments().len() != 1 {
            return None;
        }
        if !is_window {
            used.extend(axes);
        }
    }
    used.sort_unstable();
    let one_reducer = partial.windows(2).all(|p| p[0].1 == p[1].1);
    partial.sort_unstable();
    (used.windows(2).all(|a| a[0] != a[1]) && one_reducer).then_some(Splits { rule, factors, partial })
}

/// Adds what one dimension of an operand says about its factors.
fn add_dim(
    rule: &ShardingRule,
    factors: &mut [Split],
    of_dim: &[u8],
    layout: &Dim,
    local: u64,
    mesh: &Mesh,
) -> Option<()> {
    let Some(layout) = layout else {
        for &f in of_dim {
            let size = size_of_free(rule, of_dim, f, local);
            let split = &mut factors[f as usize];
            match split {
                Split::Unknown | Split::Free(None) => *split = Split::Free(size),
                Split::Free(Some(known)) if size.is_some_and(|size| size != *known) => return None,
                Split::Known(known) if size.is_some_and(|size| size != local_size(known, mesh)) => return None,
                _ => {}
            }
        }
        return Some(());
    };
    let sizes: Vec<u64> = of_dim.iter().map(|&f| rule.factors[f as usize].size).collect();
    if sizes.is_empty() {
        return layout.is_whole().then_some(());
    }
    for (&f, part) in of_dim.iter().zip(cut(layout, &sizes, mesh)?) {
        let split = &mut factors[f as usize];
        match split {
            Split::Unknown | Split::Free(None) => *split = Split::Known(part),
            Split::Free(Some(known)) if *known == local_size(&part, mesh) => *split = Split::Known(part),
            Split::Known(known) if *known == part => {}
            _ => return None,
        }
    }
    Some(())
}

/// The part of a factor in a free dimension of so many local elements, of which any part is as good as another. Factors that
/// are never split are taken whole, so that the size of the only other one follows.
fn size_of_free(rule: &ShardingRule, of_dim: &[u8], factor: u8, local: u64) -> Option<u64> {
    let of = |f: u8| &rule.factors[usize::from(f)];
    let is_whole = |f: u8| of(f).kind == FactorKind::Whole;
    if of_dim.len() == 1 {
        return Some(local);
    }
    let whole = of_dim.iter().filter(|f| is_whole(**f)).try_fold(1u64, |n, f| n.checked_mul(of(*f).size))?;
    let others = of_dim.iter().filter(|f| !is_whole(**f)).count();
    let part = local.is_multiple_of(whole.max(1)).then(|| local / whole.max(1))?;
    match is_whole(factor) {
        true => (others == 1 || others == 0 && part == 1).then_some(of(factor).size),
        false => (others == 1).then_some(part),
    }
}

/// The split of a window's operand is that of its follower: of the one that is known, or of the result.
fn follow(rule: &ShardingRule, factors: &mut [Split], window: u8, followers: &[u8]) -> Option<()> {
    let is_split = |f: &&u8| matches!(&factors[**f as usize], Split::Known(l) if l.axes().next().is_some());
    let layout = match factors[window as usize].clone() {
        Split::Known(layout) if layout.axes().next().is_some() => layout,
        // A follower must not be split alone.
        _ => return followers.iter().find(is_split).is_none().then_some(()),
    };
    let axes: Vec<AxisId> = layout.axes().collect();
    if layout.segments().len() != 1 {
        return None;
    }
    let unknown = |f: &&u8| factors[**f as usize] == Split::Unknown;
    let follower = *followers.iter().find(is_split).or_else(|| followers.iter().find(unknown))?;
    let split = DimLayout::split(rule.factors[follower as usize].size, axes);
    let known = &mut factors[follower as usize];
    match known {
        Split::Unknown => *known = Split::Known(split),
        Split::Known(known) if *known == split => {}
        _ => return None,
    }
    Some(())
}

/// The partial axes that pass through an op (rule 2).
///
/// An op that only moves elements does so with the values of any reduction.
fn partial_of(rule: &ShardingRule, given: &[Given<'_>], moves: bool) -> Option<Vec<(AxisId, Reducer)>> {
    let mut partial: Vec<(AxisId, Reducer)> = given.iter().flat_map(|g| g.layout.partial.iter().copied()).collect();
    partial.sort_unstable();
    partial.dedup();
    for &(axis, reducer) in &partial {
        let passes = |set: &Vec<u8>| {
            let mut operands = given.iter().enumerate();
            operands.all(|(i, g)| match set.contains(&(i as u8)) {
                true => g.layout.partial.contains(&(axis, reducer)) || g.is_zero && !g.layout.is_partial_over(axis),
                false => !g.layout.is_partial_over(axis),
            })
        };
        if !(moves || reducer == Reducer::Sum) || !rule.linear.iter().any(passes) {
            return None;
        }
    }
    // An axis must not split one operand and be partial in another.
    let split = |g: &Given<'_>| g.layout.split_axes().any(|a| partial.iter().any(|p| p.0 == a));
    (!given.iter().any(split)).then_some(partial)
}

/// Returns true if an op only copies elements of its operand to other places.
fn moves(op: &Op) -> bool {
    matches!(op, Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_))
}

/// The most alternatives for one factor that any part fits.
const MOST_ALTERNATIVES: usize = 8;

/// The layouts of the result of a global op (rules 1 to 4). `local` is the local shape of the result.
pub fn results(global: Global<'_>, splits: &Splits, local: &[u64], mesh: &Mesh) -> Vec<Layout> {
    let Splits { rule, factors, partial } = splits;
    let mut layouts = vec![Layout { dims: Vec::new(), partial: partial.clone() }];
    let spreads = matches!(global.op, Op::BroadcastInDim(_));
    let known = factors.iter().flat_map(|split| match split {
        Split::Known(layout) => layout.axes().collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let taken: Vec<AxisId> = known.chain(partial.iter().map(|p| p.0)).collect();
    // A sum along a free dimension depends on the number of its terms.
    for (factor, split) in rule.factors.iter().zip(factors) {
        let (FactorKind::Reduction(reducer), Split::Free(size)) = (factor.kind, split) else { continue };
        let Some(size) = *size else { return Vec::new() };
        layouts = extended(layouts, (factor.size, size), &taken, mesh, |layout, split| {
            layout.partial.extend(split.axes().map(|a| (a, reducer)));
            layout.partial.sort_unstable();
        });
        layouts.retain(|l| l.partial.windows(2).all(|p| p[0].1 == p[1].1));
    }
    if rule.result.len() != local.len() {
        return Vec::new();
    }
    for (of_dim, &size) in rule.result.iter().zip(local) {
        let alone = of_dim.len() == 1;
        let free = |f: &u8| match &factors[*f as usize] {
            Split::Free(_) => rule.factors[*f as usize].kind == FactorKind::Parallel,
            Split::Unknown => spreads,
            Split::Known(_) => false,
        };
        if alone && of_dim.iter().all(free) {
            let same = !matches!(factors[of_dim[0] as usize], Split::Free(Some(known)) if known != size);
            if !same || !is_part_size(rule.factors[of_dim[0] as usize].size, size, mesh) {
                return Vec::new();
            }
            layouts.iter_mut().for_each(|l| l.dims.push(None));
            continue;
        }
        layouts.iter_mut().for_each(|l| l.dims.push(Some(DimLayout::whole(1))));
        for &f in of_dim {
            let whole = rule.factors[f as usize].size;
            let join = |layout: &mut Layout, part: &DimLayout| {
                let at = layout.dims.len() - 1;
                let before = layout.dims[at].take();
                let segments = before.iter().flat_map(|d| d.segments()).chain(part.segments()).cloned();
                layout.dims[at] = Some(DimLayout::from_segments(segments, mesh));
            };
            match &factors[f as usize] {
                Split::Known(part) => layouts.iter_mut().for_each(|l| join(l, part)),
                Split::Unknown => layouts.iter_mut().for_each(|l| join(l, &DimLayout::whole(whole))),
                Split::Free(known) => {
                    let Some(known) = known.or(alone.then_some(size)) else { return Vec::new() };
                    layouts = extended(layouts, (whole, known), &taken, mesh, join);
                }
            }
        }
        layouts.retain(|l| l.dims.last().is_some_and(|d| d.as_ref().is_none_or(|d| local_size(d, mesh) == size)));
    }
    layouts
}

/// Returns true if some axes split a dimension into parts of this size.
fn is_part_size(whole: u64, part: u64, mesh: &Mesh) -> bool {
    part_ratios(mesh).iter().any(|ratio| part.checked_mul(*ratio) == Some(whole))
}

/// The numbers of parts into which some axes split a dimension.
fn part_ratios(mesh: &Mesh) -> BTreeSet<u64> {
    let mut ratios = BTreeSet::from([1u64]);
    for axis in mesh.axis_ids().filter(|&a| mesh.size(a) > 1) {
        let more: Vec<u64> = ratios.iter().filter_map(|r| r.checked_mul(mesh.size(axis))).collect();
        ratios.extend(more);
    }
    ratios
}

/// Splits a factor of which a device has any part of size `local` in all ways that unused axes allow.
fn extended(
    layouts: Vec<Layout>,
    (size, local): (u64, u64),
    taken: &[AxisId],
    mesh: &Mesh,
    join: impl Fn(&mut Layout, &DimLayout),
) -> Vec<Layout> {
    let mut all = Vec::new();
    for layout in layouts {
        let unused: Vec<AxisId> = mesh
            .axis_ids()
            .filter(|&a| {
                mesh.size(a) > 1
                    && !taken.contains(&a)
                    && !layout.is_partial_over(a)
                    && !layout.split_axes().any(|s| s == a)
            })
            .collect();
        for chosen in 0..1u32 << unused.len().min(10) {
            let axes: Vec<AxisId> = (0..unused.len()).filter(|i| chosen >> i & 1 == 1).map(|i| unused[i]).collect();
            if local.checked_mul(mesh.product(&axes)) == Some(size) && all.len() < MOST_ALTERNATIVES {
                let mut with = layout.clone();
                join(&mut with, &DimLayout::split(size, axes));
                all.push(with);
            }
        }
    }
    all
}

/// The layouts of the result and the axes of each factor, for ops whose local form is built from these.
///
/// A scatter has the split of its result's rows from no operand, so all splits are tried.
pub fn local_forms(op: &Op, splits: &Splits, mesh: &Mesh) -> Vec<(Layout, Vec<Vec<AxisId>>)> {
    let scatters = matches!(op, Op::Scatter(_) | Op::ScatterAdd(_));
    let known = splits.factors.iter().flat_map(|split| match split {
        Split::Known(layout) => layout.axes().collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let taken: Vec<AxisId> = known.chain(splits.partial.iter().map(|p| p.0)).collect();
    // The splits of all factors, as the dimensions of a layout.
    let mut all = vec![Layout { dims: Vec::new(), partial: Vec::new() }];
    for (factor, split) in splits.rule.factors.iter().zip(&splits.factors) {
        let push = |layout: &mut Layout, part: &DimLayout| layout.dims.push(Some(part.clone()));
        match split {
            Split::Known(part) => all.iter_mut().for_each(|l| push(l, part)),
            Split::Unknown if scatters && factor.kind == FactorKind::Parallel => {
                let ratios = part_ratios(mesh).into_iter().filter(|ratio| factor.size % ratio == 0);
                let parts = ratios.map(|ratio| factor.size / ratio);
                all = parts.flat_map(|part| extended(all.clone(), (factor.size, part), &taken, mesh, push)).collect();
            }
            Split::Unknown => all.iter_mut().for_each(|l| push(l, &DimLayout::whole(factor.size))),
            Split::Free(Some(size)) => all = extended(all, (factor.size, *size), &taken, mesh, push),
            Split::Free(None) => return Vec::new(),
        }
    }
    all.iter().filter_map(|parts| local_form(splits, parts, mesh)).collect()
}

/// The local form for one split of each factor.
fn local_form(splits: &Splits, parts: &Layout, mesh: &Mesh) -> Option<(Layout, Vec<Vec<AxisId>>)> {
    let rule = &splits.rule;
    let parts: Vec<&DimLayout> = parts.dims.iter().flatten().collect();
    let mut partial = splits.partial.clone();
    for ((f, part), split) in parts.iter().enumerate().zip(&splits.factors) {
        let FactorKind::Reduction(reducer) = rule.factors[f].kind else { continue };
        // The axes of known factors are among the partial ones already.
        if !matches!(split, Split::Known(_)) {
            partial.extend(part.axes().map(|a| (a, reducer)));
        }
    }
    partial.sort_unstable();
    if partial.windows(2).any(|p| p[0].1 != p[1].1) {
        return None;
    }
    let dim = |factors: &Vec<u8>| {
        let segments = factors.iter().flat_map(|&f| parts[f as usize].segments()).cloned();
        Some(DimLayout::from_segments(segments, mesh))
    };
    let layout = Layout { dims: rule.result.iter().map(dim).collect(), partial };
    let is_window = |f: usize| rule.windows.iter().any(|w| usize::from(w.factor) == f);
    let axes = parts.iter().enumerate().map(|(f, part)| if is_window(f) { Vec::new() } else { part.axes().collect() });
    let axes: Vec<Vec<AxisId>> = axes.collect();
    // An op builds its local form for strategies, which name the axes of a factor in the mesh's order.
    let mut strategy = Strategy::replicated(mesh);
    for (f, (part, axes)) in parts.iter().zip(&axes).enumerate() {
        let outer = match part.segments() {
            [_] => 1,
            [outer, _] if outer.axes.is_empty() => outer.size,
            _ => return None,
        };
        if !axes.is_sorted() {
            return None;
        }
        axes.iter().for_each(|a| strategy.0[usize::from(a.0)] = AxisUse::Factor { factor: f as u8, outer });
    }
    rule.allows(&strategy, mesh).then_some((layout, axes))
}

/// Returns true if a local op is the global one resized to local shapes (rule 3).
pub fn is_resized(global: Global<'_>, local: &Op, given: &[Given<'_>], result: &[u64]) -> bool {
    let shapes: Vec<&[u64]> = given.iter().map(|g| g.local).collect();
    global.op.resized(&shapes, result) == *local
}

/// The layout after a collective (rule 5). The second value is the factor by which the term grows (rule 8), which is 1
/// unless a sum is taken over axes that replicate the value.
pub fn collective(op: &Collective, layout: &Layout, mesh: &Mesh) -> Option<(Layout, f64)> {
    let mut layout = layout.clone();
    let mut factor = 1.0;
    let axes = || op.axes().iter().copied().filter(|&a| mesh.size(a) > 1);
    match op {
        Collective::AllReduce { reducer, .. } => {
            for axis in axes() {
                factor *= reduced(&mut layout, axis, *reducer, mesh)?;
            }
        }
        Collective::ReduceScatter { reducer, dim, outer, .. } => {
            for axis in axes() {
                factor *= reduced(&mut layout, axis, *reducer, mesh)?;
                sliced(&mut layout, axis, usize::from(*dim), *outer, mesh)?;
            }
        }
        Collective::AllGather { dim, outer, .. } => {
            for axis in axes().collect::<Vec<_>>().into_iter().rev() {
                gathered(&mut layout, axis, usize::from(*dim), *outer, mesh)?;
            }
        }
        Collective::LocalSlice { dim, outer, .. } => {
            for axis in axes() {
                sliced(&mut layout, axis, usize::from(*dim), *outer, mesh)?;
            }
        }
        Collective::AllToAll { split_dim, split_outer, concat_dim, concat_outer, .. } => {
            if split_dim == concat_dim {
                return None;
            }
            for axis in axes().collect::<Vec<_>>().into_iter().rev() {
                gathered(&mut layout, axis, usize::from(*concat_dim), *concat_outer, mesh)?;
            }
            for axis in axes() {
                sliced(&mut layout, axis, usize::from(*split_dim), *split_outer, mesh)?;
            }
        }
        Collective::KeepFirst { reducer, .. } => {
            for axis in axes() {
                if layout.is_partial_over(axis) || layout.split_axes().any(|a| a == axis) {
                    return None;
                }
                layout.partial.push((axis, *reducer));
            }
            layout.partial.sort_unstable();
            if layout.partial.windows(2).any(|p| p[0].1 != p[1].1) {
                return None;
            }
        }
        Collective::Halo { .. } | Collective::Shift { .. } => return None,
    }
    Some((layout, factor))
}

fn reduced(layout: &mut Layout, axis: AxisId, reducer: Reducer, mesh: &Mesh) -> Option<f64> {
    if layout.split_axes().any(|a| a == axis) {
        return None;
    }
    match layout.partial.iter().position(|p| p.0 == axis) {
        Some(at) if layout.partial[at].1 == reducer => {
            layout.partial.remove(at);
            Some(1.0)
        }
        Some(_) => None,
        None if !layout.partial.is_empty() && layout.partial[0].1 != reducer => None,
        None => match reducer {
            Reducer::Sum => Some(mesh.size(axis) as f64),
            Reducer::Product => None,
            _ => Some(1.0),
        },
    }
}

fn sliced(layout: &mut Layout, axis: AxisId, dim: usize, outer: u64, mesh: &Mesh) -> Option<()> {
    if layout.is_partial_over(axis) || layout.split_axes().any(|a| a == axis) {
        return None;
    }
    if let Some(known) = layout.dims.get_mut(dim)? {
        *known = pushed(known, axis, outer, mesh)?;
    }
    Some(())
}

fn gathered(layout: &mut Layout, axis: AxisId, dim: usize, outer: u64, mesh: &Mesh) -> Option<()> {
    let elsewhere = layout.split_axes().any(|a| a == axis) || layout.is_partial_over(axis);
    match layout.dims.get_mut(dim)? {
        Some(known) => *known = popped(known, axis, outer, mesh)?,
        // All parts are equal, so their concatenation is a part too.
        None if elsewhere => return None,
        None => {}
    }
    Some(())
}

/// The layout of a count whose local part has `size` elements and begins at `axis_index(axes) * size` (rule 6). `None`
/// if the global count is of another size.
pub fn counted(global: u64, size: u64, axes: &[AxisId], mesh: &Mesh) -> Option<DimLayout> {
    let axes: Vec<AxisId> = axes.iter().copied().filter(|&a| mesh.size(a) > 1).collect();
    let parts = mesh.product(&axes);
    let atoms = axes.iter().map(|&a| (mesh.size(a), Some(a))).chain([(size, None)]);
    (size.checked_mul(parts) == Some(global)).then(|| from_atoms(atoms, mesh))
}

/// Returns true if a multiple of a value has the value's layout (rule 10).
pub fn is_scalable(layout: &Layout) -> bool {
    layout.partial.iter().all(|p| p.1 == Reducer::Sum)
}

/// The layout that two summands have in common (rule 7). With `shares`, replicated values become summands (rule 8), and
/// the returned factors are those by which each term grows.
pub fn common(a: Given<'_>, b: Given<'_>, shares: bool, mesh: &Mesh) -> Option<(Layout, [f64; 2])> {
    if a.layout.dims.len() != b.layout.dims.len() || a.local != b.local {
        return None;
    }
    let mut dims = Vec::with_capacity(a.local.len());
    for ((x, y), &size) in a.layout.dims.iter().zip(&b.layout.dims).zip(a.local) {
        dims.push(match (x, y) {
            (None, None) => None,
            (Some(x), None) | (None, Some(x)) if local_size(x, mesh) == size => Some(x.clone()),
            (Some(x), Some(y)) if x == y => Some(x.clone()),
            _ => return None,
        });
    }
    let mut partial = a.layout.partial.clone();
    partial.extend(b.layout.partial.iter().copied());
    partial.sort_unstable();
    partial.dedup();
    let mut factors = [1.0; 2];
    for &(axis, reducer) in &partial {
        if reducer != Reducer::Sum || dims.iter().flatten().any(|d| d.axes().any(|a| a == axis)) {
            return None;
        }
        for (factor, given) in factors.iter_mut().zip([a, b]) {
            if !given.layout.is_partial_over(axis) && !given.is_zero {
                if !shares {
                    return None;
                }
                *factor *= mesh.size(axis) as f64;
            }
        }
    }
    Some((Layout { dims, partial }, factors))
}
