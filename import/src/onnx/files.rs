//! Small tensors whose data is in another file. Data that a plan depends on is read if the file is available.

use super::leaves::MOST_CONSTANT_ELEMENTS;
use super::proto::{Graph, Tensor};
use super::tensor::{External, check_raw, elements_of, external_of, has_data, type_of};

/// Reads data from another file, at most this many bytes and one more. Returns `None` if it cannot.
pub type Files<'f> = &'f dyn Fn(&External, u64) -> Option<Vec<u8>>;

/// The largest number of bytes to read for all tensors together.
const MOST_BYTES: u64 = 64 << 20;

/// Loads the data of small tensors into the graph. Data whose length does not match the shape is skipped, and reading
/// the weights reports it.
pub(super) fn fetch(graph: &mut Graph, files: Files) {
    let mut left = MOST_BYTES;
    for tensor in graph.initializer.iter_mut().filter(|t| t.data_location != 0) {
        let (Ok(ty), Ok(Some(place))) = (type_of(tensor), external_of(tensor)) else { continue };
        if ty.elements() > MOST_CONSTANT_ELEMENTS || ty.bytes() > left {
            continue;
        }
        let Some(bytes) = files(&place, ty.bytes()).filter(|bytes| check_raw(&ty, bytes).is_ok()) else { continue };
        left -= ty.bytes();
        tensor.raw_data = bytes;
        tensor.data_location = 0;
        tensor.external_data.clear();
    }
}

/// Returns true if the data is known and small enough to inspect.
pub(super) fn is_small(tensor: &Tensor) -> bool {
    has_data(tensor) && type_of(tensor).is_ok_and(|ty| ty.elements() <= MOST_CONSTANT_ELEMENTS)
}

/// Returns true if all elements are equal, and `None` if that is unknown.
pub(super) fn is_of_one_value(tensor: &Tensor) -> Option<bool> {
    let elements = is_small(tensor).then(|| elements_of(tensor).ok()).flatten()?.data;
    Some(elements.windows(2).all(|pair| pair[0].to_bits() == pair[1].to_bits()))
}
