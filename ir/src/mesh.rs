//! The logical device array that a stage runs on.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Index of an axis within its [`Mesh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AxisId(pub u8);

/// One named axis of a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Axis {
    pub name: String,
    pub size: u32,
}

/// The name of an axis of context parallelism, which splits the positions of samples.
pub const CONTEXT_AXIS: &str = "context";

/// A logical array of devices with named axes, major axis first: `mesh<data=4, tensor=8>`.
///
/// The device at coordinates `(c0, c1, ..)` is the one at that row-major position of the submesh. So neighbours along
/// the last axis are closest.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mesh {
    pub axes: Vec<Axis>,
}

impl Mesh {
    pub fn new(axes: &[(&str, u32)]) -> Self {
        Mesh { axes: axes.iter().map(|&(name, size)| Axis { name: name.to_string(), size }).collect() }
    }

    pub fn axis_ids(&self) -> impl Iterator<Item = AxisId> + use<> {
        (0..self.axes.len() as u8).map(AxisId)
    }

    pub fn size(&self, axis: AxisId) -> u64 {
        self.axes[axis.0 as usize].size as u64
    }

    /// The product of the sizes of `axes`.
    pub fn product(&self, axes: &[AxisId]) -> u64 {
        axes.iter().map(|&a| self.size(a)).product()
    }

    pub fn name(&self, axis: AxisId) -> &str {
        &self.axes[axis.0 as usize].name
    }

    pub fn find(&self, name: &str) -> Option<AxisId> {
        self.axes.iter().position(|a| a.name == name).map(|i| AxisId(i as u8))
    }

    pub fn num_devices(&self) -> u32 {
        self.axes.iter().map(|a| a.size).product()
    }

    /// The distance between neighbours along `axis`, in devices of the submesh.
    pub fn stride(&self, axis: AxisId) -> u32 {
        self.axes[axis.0 as usize + 1..].iter().map(|a| a.size).product()
    }

    /// The coordinates of the device at a position of the submesh.
    pub fn coordinates(&self, position: u32) -> Vec<u32> {
        self.axis_ids().map(|a| position / self.stride(a) % self.axes[a.0 as usize].size).collect()
    }

    /// The position within `axes` (major first) of the device with these mesh coordinates.
    pub fn index_along(&self, axes: &[AxisId], coordinates: &[u32]) -> u64 {
        axes.iter().fold(0, |i, &a| i * self.size(a) + coordinates[a.0 as usize] as u64)
    }

    /// The group of a collective over `axes`: the devices that differ from `position` only along `axes`. Devices are
    /// positions of the submesh, ordered by [`Mesh::index_along`].
    pub fn group(&self, axes: &[AxisId], position: u32) -> Vec<u32> {
        let here = self.coordinates(position);
        let base: u32 =
            self.axis_ids().filter(|a| !axes.contains(a)).map(|a| here[a.0 as usize] * self.stride(a)).sum();
        let mut members = vec![base];
        for &axis in axes {
            members = members
                .iter()
                .flat_map(|&m| (0..self.size(axis) as u32).map(move |c| (m, c)))
                .map(|(m, c)| m + c * self.stride(axis))
                .collect();
        }
        members
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mesh<")?;
        for (i, axis) in self.axes.iter().enumerate() {
            write!(f, "{}{}={}", if i == 0 { "" } else { ", " }, axis.name, axis.size)?;
        }
        write!(f, ">")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_the_mesh_once_in_order() {
        let mesh = Mesh::new(&[("data", 2), ("tensor", 3)]);
        assert_eq!(mesh.group(&[AxisId(1)], 4), [3, 4, 5]);
        assert_eq!(mesh.group(&[AxisId(0)], 4), [1, 4]);
        assert_eq!(mesh.group(&[AxisId(1), AxisId(0)], 4), [0, 3, 1, 4, 2, 5]);
        assert_eq!(mesh.coordinates(4), [1, 1]);
        assert_eq!(mesh.index_along(&[AxisId(1), AxisId(0)], &[1, 1]), 3);
    }
}
