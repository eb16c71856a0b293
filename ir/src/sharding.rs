//! The layout of a tensor on a mesh.
//!
//! A dimension is a list of segments, major first. The size of each segment is split over an ordered list of axes. Most
//! dimensions have one segment. Several segments describe layouts that are not contiguous blocks: a fused q/k/v
//! dimension of 2304 is `{3, 768: tensor}`, where each third is split over `tensor`.

use crate::mesh::{AxisId, Mesh};
use crate::op::Reducer;
use crate::types::TensorType;
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;

/// Axes of a mesh. They are stored inline because a search makes and compares millions of layouts.
pub type Axes = SmallVec<[AxisId; 16]>;

/// A factor of a dimension and the axes that split it, major axis first.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Segment {
    pub size: u64,
    pub axes: Axes,
}

/// Copies the axes as bytes, which the derived `Clone` would do one by one.
impl Clone for Segment {
    fn clone(&self) -> Segment {
        Segment { size: self.size, axes: Axes::from_slice(&self.axes) }
    }
}

/// The segments of one dimension in normal form. The product of the sizes is the dimension, and every segment but the
/// first is split over at least one axis. Two layouts that place the same elements on the same devices are equal.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DimLayout {
    segments: SmallVec<[Segment; 1]>,
}

impl Clone for DimLayout {
    fn clone(&self) -> DimLayout {
        match self.segments.as_slice() {
            [only] => DimLayout { segments: smallvec![only.clone()] },
            many => DimLayout { segments: many.iter().cloned().collect() },
        }
    }
}

impl DimLayout {
    /// A dimension that no axis splits.
    pub fn whole(size: u64) -> Self {
        DimLayout { segments: smallvec![Segment { size, axes: Axes::new() }] }
    }

    /// A dimension split into contiguous blocks over `axes`.
    pub fn split(size: u64, axes: impl IntoIterator<Item = AxisId>) -> Self {
        DimLayout { segments: smallvec![Segment { size, axes: axes.into_iter().collect() }] }
    }

    /// Brings a list of segments to normal form. The axis sizes of `mesh` tell which segments are split completely.
    pub fn from_segments(segments: impl IntoIterator<Item = Segment>, mesh: &Mesh) -> Self {
        let mut normal: SmallVec<[Segment; 1]> = SmallVec::new();
        for segment in segments {
            if let Some(last) = normal.last_mut() {
                let whole = mesh.product(&last.axes) == last.size;
                if segment.axes.is_empty() || whole {
                    last.size *= segment.size;
                    last.axes.extend(segment.axes);
                    continue;
                }
            }
            normal.push(segment);
        }
        if normal.is_empty() {
            normal.push(Segment { size: 1, axes: Axes::new() });
        }
        DimLayout { segments: normal }
    }

    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    pub fn size(&self) -> u64 {
        self.segments.iter().map(|s| s.size).product()
    }

    /// All axes that split this dimension, major first.
    pub fn axes(&self) -> impl DoubleEndedIterator<Item = AxisId> + '_ {
        self.segments.iter().flat_map(|s| s.axes.iter().copied())
    }

    pub fn is_whole(&self) -> bool {
        self.axes().next().is_none()
    }

    /// The number of elements of this dimension that one device holds.
    pub(crate) fn local_size(&self, mesh: &Mesh) -> u64 {
        self.segments.iter().map(|s| s.size.div_ceil(mesh.product(&s.axes))).product()
    }

    /// Removes the minor-most axis. Returns the new layout, the axis, and the number of outer blocks in a local
    /// dimension. A gather over the axis concatenates within each of these blocks.
    pub fn pop(&self, mesh: &Mesh) -> Option<(DimLayout, AxisId, u64)> {
        if let [only] = self.segments.as_slice() {
            let mut segment = only.clone();
            let axis = segment.axes.pop()?;
            return Some((DimLayout { segments: smallvec![segment] }, axis, 1));
        }
        let at = self.segments.iter().rposition(|s| !s.axes.is_empty())?;
        let outer = self.segments[..at].iter().map(|s| s.size / mesh.product(&s.axes).max(1)).product();
        let mut segments = self.segments.clone();
        let axis = segments[at].axes.pop()?;
        Some((DimLayout::from_segments(segments, mesh), axis, outer))
    }

    /// The next split on the way from this layout to `finer`, if that refines it. Returns the layout after it, its axis,
    /// and the number of outer blocks within which it cuts.
    pub(crate) fn next_split(&self, finer: &DimLayout, mesh: &Mesh) -> Option<(DimLayout, AxisId, u64)> {
        // Most pairs of layouts are both whole, or equal.
        let mut more = finer.axes().count().checked_sub(self.axes().count())?;
        let mut target = Cow::Borrowed(finer);
        while more > 0 {
            let (next, axis, outer) = target.pop(mesh)?;
            more -= 1;
            if more == 0 && next == *self {
                return Some((target.into_owned(), axis, outer));
            }
            target = Cow::Owned(next);
        }
        None
    }

    /// Returns true if `finer` splits this layout further, or is equal to it.
    pub(crate) fn is_refined_by(&self, finer: &DimLayout, mesh: &Mesh) -> bool {
        self == finer || self.next_split(finer, mesh).is_some()
    }

    /// The global index of each local index on the device with these coordinates. Every segment must divide evenly.
    pub fn global_indices(&self, mesh: &Mesh, coordinates: &[u32]) -> Vec<u64> {
        let mut indices = vec![0u64];
        for s in &self.segments {
            let local = s.size.div_ceil(mesh.product(&s.axes));
            let first = mesh.index_along(&s.axes, coordinates) * local;
            indices = indices.iter().flat_map(|&i| (0..local).map(move |j| i * s.size + first + j)).collect();
        }
        indices
    }
}

/// The layout of a tensor on a [`Mesh`]. Dimension `i` is split as `dims[i]` says. Over the axes in `partial`, each
/// device holds a summand of the value, or an operand of another reducer. Over all other axes the value is replicated.
///
/// `[{data}, {}, {tensor}]` on `mesh<data=2, tensor=4>`: `f32[8,16,64]` has local shape `[4,16,16]`.
///
/// **Invariants** (checked by [`Sharding::is_valid`]): there is one layout per dimension, and its sizes multiply to the
/// dimension. An axis appears at most once across `dims` and `partial`. `partial` is sorted and names one reducer,
/// since a maximum of sums is not a sum of maxima.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Sharding {
    pub dims: Vec<DimLayout>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partial: Vec<(AxisId, Reducer)>,
}

impl Sharding {
    /// The sharding in which every device holds the whole tensor.
    pub fn replicated(shape: &[u64]) -> Self {
        Sharding { dims: shape.iter().map(|&d| DimLayout::whole(d)).collect(), partial: Vec::new() }
    }

    /// The sharding that splits one dimension into contiguous blocks over `axes`.
    pub fn split(shape: &[u64], dim: usize, axes: Vec<AxisId>) -> Self {
        let mut sharding = Sharding::replicated(shape);
        sharding.dims[dim] = DimLayout::split(shape[dim], axes);
        sharding
    }

    /// The same layout without partial axes.
    pub fn reduced(&self) -> Self {
        Sharding { dims: self.dims.clone(), partial: Vec::new() }
    }

    pub fn is_partial(&self) -> bool {
        !self.partial.is_empty()
    }

    /// The axes that split some dimension.
    pub fn split_axes(&self) -> impl Iterator<Item = AxisId> + '_ {
        self.dims.iter().flat_map(|d| d.axes())
    }

    pub fn local_shape(&self, mesh: &Mesh) -> Vec<u64> {
        self.dims.iter().map(|d| d.local_size(mesh)).collect()
    }

    pub fn local_type(&self, ty: &TensorType, mesh: &Mesh) -> TensorType {
        ty.with_shape(self.local_shape(mesh))
    }

    /// The bytes that one device holds.
    pub fn local_bytes(&self, ty: &TensorType, mesh: &Mesh) -> u64 {
        self.local_elements(mesh).saturating_mul(ty.dtype.bytes())
    }

    /// The elements that one device holds.
    pub fn local_elements(&self, mesh: &Mesh) -> u64 {
        self.dims.iter().fold(1u64, |n, d| n.saturating_mul(d.local_size(mesh)))
    }

    /// Appends numbers that identify which axes split which dimension. Sizes are included only for dimensions of
    /// several segments, because the collectives between two layouts depend on no other sizes.
    pub fn pattern(&self, out: &mut Vec<u64>) {
        for dim in &self.dims {
            let segments = dim.segments();
            out.push(segments.len() as u64);
            for segment in segments {
                out.extend((segments.len() > 1).then_some(segment.size));
                out.push(segment.axes.len() as u64);
                out.extend(segment.axes.iter().map(|a| u64::from(a.0)));
            }
        }
        out.push(u64::MAX);
        out.extend(self.partial.iter().map(|&(axis, reducer)| u64::from(axis.0) << 8 | reducer as u64));
        out.push(u64::MAX);
    }

    /// Returns true if some dimension is not split into contiguous blocks.
    pub(crate) fn has_several_segments(&self) -> bool {
        self.dims.iter().any(|dim| dim.segments().len() > 1)
    }

    /// Returns true if the invariants above hold and every split divides evenly.
    pub fn is_valid(&self, shape: &[u64], mesh: &Mesh) -> bool {
        let mut used = vec![false; mesh.axes.len()];
        let mut axes = self.split_axes().chain(self.partial.iter().map(|p| p.0));
        let axes_once = axes.all(|a| used.get_mut(a.0 as usize).is_some_and(|seen| !std::mem::replace(seen, true)));
        axes_once
            && self.partial.is_sorted()
            && self.partial.windows(2).all(|pair| pair[0].1 == pair[1].1)
            && self.dims.len() == shape.len()
            && self.dims.iter().zip(shape).all(|(layout, &size)| {
                layout.size() == size
                    && *layout == DimLayout::from_segments(layout.segments().iter().cloned(), mesh)
                    && layout.segments().iter().all(|s| s.size % mesh.product(&s.axes).max(1) == 0)
            })
    }

    /// The text form, e.g. `[{data}, {}, {3, 768: tensor}] partial{sum: tensor}`.
    pub fn display<'a>(&'a self, mesh: &'a Mesh) -> impl std::fmt::Display + 'a {
        Printed { sharding: self, mesh }
    }

    /// Parses the text form. `shape` gives the sizes of dimensions that have one segment.
    pub fn parse(text: &str, shape: &[u64], mesh: &Mesh) -> Option<Sharding> {
        let (dims_text, rest) = text.trim().strip_prefix('[')?.split_once(']')?;
        let mut dims = Vec::new();
        for (i, part) in braces(dims_text)?.iter().enumerate() {
            let size = *shape.get(i)?;
            let mut segments = Vec::new();
            if part.contains(':') || part.split(',').all(|p| p.trim().parse::<u64>().is_ok()) && !part.trim().is_empty()
            {
                let mut open: Option<Segment> = None;
                for word in part.split(',').map(str::trim) {
                    let (head, axis) = match word.split_once(':') {
                        Some((n, a)) => (Some(n.trim()), Some(a.trim())),
                        None if word.parse::<u64>().is_ok() => (Some(word), None),
                        None => (None, Some(word)),
                    };
                    if let Some(n) = head {
                        segments.extend(open.take());
                        open = Some(Segment { size: n.parse().ok()?, axes: Axes::new() });
                    }
                    if let Some(a) = axis {
                        open.as_mut()?.axes.push(mesh.find(a)?);
                    }
                }
                segments.extend(open);
            } else {
                let words = part.split(',').map(str::trim).filter(|w| !w.is_empty());
                segments.push(Segment { size, axes: words.map(|w| mesh.find(w)).collect::<Option<_>>()? });
            }
            dims.push(DimLayout::from_segments(segments, mesh));
        }
        let mut partial = Vec::new();
        let rest = rest.trim();
        if !rest.is_empty() {
            let inner = rest.strip_prefix("partial{")?.strip_suffix('}')?;
            for group in inner.split(';') {
                let (reducer, axes) = group.split_once(':')?;
                let reducer = Reducer::parse(reducer.trim())?;
                for axis in axes.split(',') {
                    partial.push((mesh.find(axis.trim())?, reducer));
                }
            }
            partial.sort();
        }
        let sharding = Sharding { dims, partial };
        sharding.is_valid(shape, mesh).then_some(sharding)
    }
}

/// The contents of `{..}, {..}`.
fn braces(text: &str) -> Option<Vec<&str>> {
    let mut parts = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (part, tail) = rest.strip_prefix('{')?.split_once('}')?;
        parts.push(part);
        rest = tail.trim_start().strip_prefix(',').unwrap_or(tail).trim_start();
    }
    Some(parts)
}

struct Printed<'a> {
    sharding: &'a Sharding,
    mesh: &'a Mesh,
}

impl std::fmt::Display for Printed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = |axes: &[AxisId]| axes.iter().map(|&a| self.mesh.name(a)).collect::<Vec<_>>().join(", ");
        write!(f, "[")?;
        for (i, dim) in self.sharding.dims.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            let text = match dim.segments() {
                [only] => names(&only.axes),
                many => many
                    .iter()
                    .map(|s| match s.axes.as_slice() {
                        [] => s.size.to_string(),
                        axes => format!("{}: {}", s.size, names(axes)),
                    })
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            write!(f, "{separator}{{{text}}}")?;
        }
        write!(f, "]")?;
        if self.sharding.is_partial() {
            let groups: Vec<String> = Reducer::ALL
                .into_iter()
                .filter_map(|r| {
                    let axes: Vec<AxisId> = self.sharding.partial.iter().filter(|p| p.1 == r).map(|p| p.0).collect();
                    (!axes.is_empty()).then(|| format!("{}: {}", r.name(), names(&axes)))
                })
                .collect();
            write!(f, " partial{{{}}}", groups.join("; "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: AxisId = AxisId(0);
    const T: AxisId = AxisId(1);

    fn seg(size: u64, axes: &[AxisId]) -> Segment {
        Segment { size, axes: axes.into() }
    }

    #[test]
    fn equal_placements_have_one_normal_form() {
        let mesh = Mesh::new(&[("data", 2), ("tensor", 4)]);
        let normal = |s: &[Segment]| DimLayout::from_segments(s.iter().cloned(), &mesh);
        assert_eq!(normal(&[seg(12, &[T]), seg(64, &[])]), DimLayout::split(768, vec![T]));
        assert_eq!(normal(&[seg(2, &[D]), seg(4, &[T])]), DimLayout::split(8, vec![D, T]));
        assert_eq!(normal(&[seg(3, &[]), seg(12, &[T]), seg(64, &[])]), normal(&[seg(3, &[]), seg(768, &[T])]));
        assert_ne!(normal(&[seg(3, &[]), seg(768, &[T])]), DimLayout::split(2304, vec![T]));
    }

    #[test]
    fn text_round_trips() {
        let mesh = Mesh::new(&[("data", 2), ("tensor", 4)]);
        for text in [
            "[{data}, {}, {tensor}]",
            "[{}, {data, tensor}, {}] partial{max: }",
            "[{}, {}, {3, 768: tensor}] partial{sum: data}",
            "[{2, 4: data}, {}, {3, 768: data, tensor}]",
        ] {
            match Sharding::parse(text, &[8, 16, 2304], &mesh) {
                Some(s) => assert_eq!(s.display(&mesh).to_string(), text),
                None => assert!(text.contains("max: }") || text.starts_with("[{2"), "{text}"),
            }
        }
    }

    #[test]
    fn strided_blocks_have_strided_indices() {
        let mesh = Mesh::new(&[("data", 1), ("tensor", 2)]);
        let layout = DimLayout::from_segments([seg(3, &[]), seg(4, &[T])], &mesh);
        assert_eq!(layout.global_indices(&mesh, &[0, 1]), [2, 3, 6, 7, 10, 11]);
        assert_eq!(layout.local_size(&mesh), 6);
    }
}
