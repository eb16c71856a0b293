//! Layouts of local values: the part of a global value that each device of a mesh holds.
//!
//! A layout says more than a [`Sharding`] in one respect: along a dimension in which all elements are equal, any part is
//! as good as any other. Such a dimension is *free*.

use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::Reducer;
use altiplano_ir::sharding::{DimLayout, Segment, Sharding};

/// The part of one dimension that a device holds. `None` if the global value does not change along the dimension.
pub type Dim = Option<DimLayout>;

/// The relation between a local value and a global one. Axes of the mesh that neither split a dimension nor are partial
/// replicate the value. Axes of size 1 do not occur.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    pub dims: Vec<Dim>,
    /// Over these axes, the reduction of the devices' values is the global value. Sorted.
    pub partial: Vec<(AxisId, Reducer)>,
}

impl Layout {
    /// The layout of a value that every device holds whole.
    pub fn whole(shape: &[u64]) -> Layout {
        Layout { dims: shape.iter().map(|&d| Some(DimLayout::whole(d))).collect(), partial: Vec::new() }
    }

    /// The layout of a value with one number in all elements.
    pub fn free(rank: usize) -> Layout {
        Layout { dims: vec![None; rank], partial: Vec::new() }
    }

    /// The layout that a sharding describes.
    pub fn of(sharding: &Sharding, mesh: &Mesh) -> Layout {
        let dim = |dim: &DimLayout| {
            let segment = |s: &Segment| Segment {
                size: s.size,
                axes: s.axes.iter().copied().filter(|&a| mesh.size(a) > 1).collect(),
            };
            Some(DimLayout::from_segments(dim.segments().iter().map(segment), mesh))
        };
        let mut partial: Vec<_> = sharding.partial.iter().copied().filter(|(a, _)| mesh.size(*a) > 1).collect();
        partial.sort_unstable();
        Layout { dims: sharding.dims.iter().map(dim).collect(), partial }
    }

    /// The axes that split a dimension.
    pub fn split_axes(&self) -> impl Iterator<Item = AxisId> + '_ {
        self.dims.iter().flatten().flat_map(|d| d.axes())
    }

    /// Returns true if the value is a partial one over the axis.
    pub fn is_partial_over(&self, axis: AxisId) -> bool {
        self.partial.iter().any(|p| p.0 == axis)
    }

    /// Returns true if a local value of this shape is also laid out as `wanted`: free dimensions fit any part of the
    /// right size.
    pub fn fits(&self, wanted: &Layout, local: &[u64], mesh: &Mesh) -> bool {
        self.partial == wanted.partial
            && self.dims.len() == wanted.dims.len()
            && self.dims.iter().zip(&wanted.dims).zip(local).all(|((have, want), &size)| match (have, want) {
                (Some(have), Some(want)) => have == want,
                (None, Some(want)) => local_size(want, mesh) == size,
                (None, None) => true,
                (Some(_), None) => false,
            })
    }

    /// The text form, as shardings have it. A free dimension is `{any}`.
    pub fn text(&self, mesh: &Mesh) -> String {
        let named = |d: &Dim| match d {
            None => "{any}".to_string(),
            Some(d) => {
                let alone = Sharding { dims: vec![d.clone()], partial: Vec::new() };
                alone.display(mesh).to_string().trim_matches(['[', ']']).to_string()
            }
        };
        let dims: Vec<String> = self.dims.iter().map(named).collect();
        let partial = Sharding { dims: Vec::new(), partial: self.partial.clone() };
        format!("[{}]{}", dims.join(", "), partial.display(mesh).to_string().trim_start_matches("[]"))
    }
}

/// A part of a dimension: a run of positions that all devices hold, or one that an axis splits completely.
pub type Atom = (u64, Option<AxisId>);

/// The factors of a dimension, major first.
pub fn atoms(dim: &DimLayout, mesh: &Mesh) -> Vec<Atom> {
    let mut atoms = Vec::new();
    for segment in dim.segments() {
        atoms.extend(segment.axes.iter().map(|&a| (mesh.size(a), Some(a))));
        let rest = segment.size / mesh.product(&segment.axes).max(1);
        if rest != 1 {
            atoms.push((rest, None));
        }
    }
    atoms
}

/// The inverse of [`atoms`].
pub fn from_atoms(atoms: impl IntoIterator<Item = Atom>, mesh: &Mesh) -> DimLayout {
    let segment = |(size, axis): Atom| Segment { size, axes: axis.into_iter().collect() };
    DimLayout::from_segments(atoms.into_iter().map(segment), mesh)
}

/// The number of elements of the dimension that a device holds.
pub fn local_size(dim: &DimLayout, mesh: &Mesh) -> u64 {
    atoms(dim, mesh).iter().filter(|a| a.1.is_none()).map(|a| a.0).product()
}

/// Cuts the layout of a dimension into those of its factors, whose sizes multiply to it. `None` if a cut would divide
/// the part that an axis selects.
pub fn cut(dim: &DimLayout, sizes: &[u64], mesh: &Mesh) -> Option<Vec<DimLayout>> {
    if let [_] = sizes {
        return Some(vec![dim.clone()]);
    }
    if dim.size() == 0 || sizes.contains(&0) {
        return None;
    }
    let mut left = atoms(dim, mesh).into_iter().rev().collect::<Vec<_>>();
    let mut cuts = Vec::with_capacity(sizes.len());
    for &size in sizes {
        let (mut of_factor, mut have) = (Vec::new(), 1);
        while have < size {
            let (atom, axis) = left.pop()?;
            let need = size / have;
            if need * have == size && need % atom == 0 {
                of_factor.push((atom, axis));
                have *= atom;
            } else if need * have == size && axis.is_none() && atom % need == 0 {
                of_factor.push((need, None));
                left.push((atom / need, None));
                have = size;
            } else {
                return None;
            }
        }
        cuts.push(from_atoms(of_factor, mesh));
    }
    left.is_empty().then_some(cuts)
}

/// The layout of a dimension of which each of `outer` equal blocks of a device's part is split further by an axis, each
/// device taking a contiguous part. `None` if the layout of the result has no such form.
pub fn pushed(dim: &DimLayout, axis: AxisId, outer: u64, mesh: &Mesh) -> Option<DimLayout> {
    let n = mesh.size(axis);
    if n == 0 || outer == 0 || dim.size() == 0 {
        return None;
    }
    let (mut result, mut before, mut placed) = (Vec::new(), 1, false);
    for (mut size, of) in atoms(dim, mesh) {
        if of.is_none() && !placed {
            if before < outer {
                let need = outer / before;
                if need % size == 0 && before * need == outer {
                    before *= size;
                    result.push((size, None));
                    continue;
                }
                if before * need != outer || size % need != 0 {
                    return None;
                }
                result.push((need, None));
                before = outer;
                size /= need;
            }
            if size % n != 0 {
                return None;
            }
            result.push((n, Some(axis)));
            placed = true;
            size /= n;
        }
        if size != 1 {
            result.push((size, of));
        }
    }
    (placed && before == outer).then(|| from_atoms(result, mesh))
}

/// The layout of a dimension without the axis that splits each of `outer` blocks last: the inverse of [`pushed`].
pub fn popped(dim: &DimLayout, axis: AxisId, outer: u64, mesh: &Mesh) -> Option<DimLayout> {
    let without = atoms(dim, mesh).into_iter().map(|(size, of)| (size, of.filter(|a| *a != axis)));
    let without = from_atoms(without, mesh);
    (dim.axes().any(|a| a == axis) && pushed(&without, axis, outer, mesh).as_ref() == Some(dim)).then_some(without)
}
