//! The work of a runtime for one kernel call, in countable terms such as elements through an inner loop or matrix
//! products of a size. A runtime states its terms, and a measured profile gives the time of each. Neither needs the
//! other.

use crate::dtype::DType;
use crate::graph::ValueId;
use crate::reshard::Collective;

/// Some work of one family: `times` runs of `size`.
///
/// `size` has one number for each axis of the family's series in a profile: elements, bytes, or the rows, columns and
/// terms of a matrix product. Example: one exponential of 4096 floats is `exponential f32 [4096]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Term {
    pub family: &'static str,
    pub dtype: DType,
    pub size: Vec<f64>,
    pub times: f64,
    /// The number of threads that share each run.
    pub threads: u32,
}

impl Term {
    /// Work that one thread does once.
    pub fn once(family: &'static str, dtype: DType, size: impl Into<Vec<f64>>) -> Term {
        Term { family, dtype, size: size.into(), times: 1.0, threads: 1 }
    }
}

/// The families of a message between two devices of a node and between nodes. Its size is its bytes.
pub const MESSAGE: [&str; 2] = ["message", "message_across"];

/// The family of a collective among devices of several nodes. Its size is the number of nodes and the bytes. `None` if
/// the collective sends nothing.
pub fn across_nodes(collective: &Collective) -> Option<&'static str> {
    Some(match collective {
        Collective::AllReduce { .. } => "all_reduce_across",
        Collective::ReduceScatter { .. } => "reduce_scatter_across",
        Collective::AllGather { .. } => "all_gather_across",
        Collective::AllToAll { .. } => "all_to_all_across",
        Collective::Halo { .. } => "halo_across",
        Collective::Shift { .. } => "shift_across",
        Collective::LocalSlice { .. } | Collective::KeepFirst { .. } => return None,
    })
}

/// The work of one kernel call.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    pub terms: Vec<Term>,
    /// The number of threads over which the terms are spread evenly.
    pub parts: u32,
}

impl Work {
    pub fn new(parts: usize) -> Work {
        Work { terms: Vec::new(), parts: parts as u32 }
    }

    /// Adds a term, or more of one that is there already.
    pub fn add(&mut self, term: Term) {
        let alike = |t: &&mut Term| {
            t.family == term.family && t.dtype == term.dtype && t.size == term.size && t.threads == term.threads
        };
        match self.terms.iter_mut().find(alike) {
            Some(known) => known.times += term.times,
            None => self.terms.push(term),
        }
    }

    /// Adds a term of one axis that one thread does once.
    pub fn once(&mut self, family: &'static str, dtype: DType, size: f64) {
        self.add(Term::once(family, dtype, [size]));
    }
}

/// A kernel call of a compiled body.
#[derive(Clone, Debug, PartialEq)]
pub struct Called {
    /// The nodes that the call computes, in graph order. The last one names it.
    pub nodes: Vec<ValueId>,
    /// The values that it reads and writes, with the stored bytes of each.
    pub reads: Vec<(ValueId, u64)>,
    pub writes: Vec<(ValueId, u64)>,
    pub work: Work,
}
