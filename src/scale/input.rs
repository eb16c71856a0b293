//! Compares the rate at which a plan reads samples with the bandwidth of a cluster's storage, from the shared file
//! system or the nodes' disks.

use altiplano_ir::cluster::DataStorage;
use altiplano_ir::graph::Graph;
use serde::Serialize;

/// The stored form of samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Samples {
    pub bytes: f64,
    /// Samples per opened file.
    pub per_file: f64,
    /// Samples per epoch, if known.
    pub in_epoch: Option<u64>,
}

/// The input of one number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Input {
    pub needed_bytes_per_s: f64,
    pub given_bytes_per_s: f64,
    /// The bottleneck.
    pub limit: &'static str,
    /// Fraction of time in which devices have samples to train on: supply over demand, at most 1.
    pub utilisation: f64,
    /// The same with local disks, if the nodes have any.
    pub staged: Option<Staged>,
}

/// Staging: each node reads its share of the samples from its own disks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Staged {
    pub utilisation: f64,
    /// A node's share of an epoch, if the number of samples is known.
    pub node_bytes: Option<f64>,
    pub fits: Option<bool>,
    /// Seconds to copy it once from the file system.
    pub copy_s: Option<f64>,
}

impl Input {
    /// The input of a number of nodes that train on `samples_per_s` while they have samples.
    pub fn new(storage: &DataStorage, samples: &Samples, nodes: u32, samples_per_s: f64) -> Input {
        let nodes = f64::from(nodes);
        let needed_bytes_per_s = samples_per_s * samples.bytes;
        let shared_bytes_per_s = storage.bytes_per_s.min(nodes * storage.node_bytes_per_s);
        let opened = storage.metadata_ops_per_s.map_or(f64::INFINITY, |ops| ops * samples.per_file * samples.bytes);
        let ways = [
            (opened, "files opened a second"),
            (nodes * storage.node_bytes_per_s, "reading by one node from the file system"),
            (storage.bytes_per_s, "the file system"),
        ];
        let least = |a: (f64, &'static str), b: (f64, &'static str)| if b.0 <= a.0 { b } else { a };
        let (given_bytes_per_s, limit) = ways.into_iter().fold((f64::INFINITY, ""), least);
        let used = |given: f64| if needed_bytes_per_s > given { given / needed_bytes_per_s } else { 1.0 };
        let staged = storage.node_disk.map(|disk| {
            let epoch_bytes = samples.in_epoch.map(|n| n as f64 * samples.bytes);
            Staged {
                utilisation: used(nodes * disk.bytes_per_s),
                node_bytes: epoch_bytes.map(|bytes| bytes / nodes),
                fits: epoch_bytes.map(|bytes| bytes / nodes <= disk.bytes as f64),
                copy_s: epoch_bytes.map(|bytes| bytes / shared_bytes_per_s.min(opened)),
            }
        });
        Input { needed_bytes_per_s, given_bytes_per_s, limit, utilisation: used(given_bytes_per_s), staged }
    }

    pub(crate) fn is_bound(&self) -> bool {
        self.utilisation < 1.0
    }

    /// Returns whether reading from local disks removes the bottleneck.
    pub(crate) fn staging_helps(&self) -> bool {
        self.is_bound() && self.staged.is_some_and(|s| s.utilisation >= 1.0 && s.fits != Some(false))
    }
}

/// Bytes of a sample as the model takes it; of a step's input if the batch is unknown.
pub fn sample_bytes(graph: &Graph) -> f64 {
    let of_batch = |v| graph.batch == 0 || graph.node(v).batch_dims != 0;
    let bytes: f64 = graph.inputs().filter(|(v, _)| of_batch(*v)).map(|(v, _)| graph.ty(v).bytes() as f64).sum();
    bytes / graph.batch.max(1) as f64
}

/// Tokens per sample: the positions of the longest integer input; `None` if the model has none. If the batch is
/// unknown, the tokens of a step.
pub fn sample_tokens(graph: &Graph) -> Option<u64> {
    let tokens = graph.inputs().filter(|(v, _)| {
        let node = graph.node(*v);
        (graph.batch == 0 || node.batch_dims != 0) && node.ty.rank() > 1 && !node.ty.dtype.is_float()
    });
    tokens.map(|(v, _)| graph.ty(v).elements() / graph.batch.max(1)).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::cluster::NodeDisk;

    const STORAGE: DataStorage = DataStorage {
        bytes_per_s: 100e9,
        node_bytes_per_s: 10e9,
        metadata_ops_per_s: Some(20_000.0),
        node_disk: Some(NodeDisk { bytes: 4_000_000_000_000, bytes_per_s: 25e9 }),
    };

    #[test]
    fn large_samples_are_bound_by_storage_and_text_is_not() {
        // Volumes of 140 MB; 16 nodes train on 2000 per second: 280 GB/s.
        let volumes = Samples { bytes: 140e6, per_file: 1.0, in_epoch: Some(300_000) };
        let input = Input::new(&STORAGE, &volumes, 16, 2000.0);
        assert_eq!((input.limit, input.given_bytes_per_s), ("the file system", 100e9));
        assert!((input.utilisation - 100.0 / 280.0).abs() < 1e-12 && input.staging_helps());
        let staged = input.staged.expect("disks");
        assert_eq!((staged.utilisation, staged.fits), (1.0, Some(true)));
        assert_eq!((staged.node_bytes, staged.copy_s), (Some(42e12 / 16.0), Some(420.0)));
        // With four nodes, each node's bandwidth is the limit, and their disks are too small.
        let few = Input::new(&STORAGE, &volumes, 4, 500.0);
        assert_eq!((few.limit, few.given_bytes_per_s), ("reading by one node from the file system", 40e9));
        assert!(few.is_bound() && !few.staging_helps() && few.staged.is_some_and(|s| s.fits == Some(false)));
        // 2048 tokens of two bytes.
        let text = Samples { bytes: 4096.0, per_file: 1000.0, in_epoch: Some(1 << 30) };
        let input = Input::new(&STORAGE, &text, 16, 2000.0);
        assert!(!input.is_bound() && !input.staging_helps());
        assert_eq!(input.staged.map(|s| s.utilisation), Some(1.0));
    }

    #[test]
    fn small_files_are_bound_by_their_opening() {
        let images = |per_file| Samples { bytes: 110e3, per_file, in_epoch: None };
        let one = Input::new(&STORAGE, &images(1.0), 16, 40_000.0);
        assert_eq!((one.limit, one.utilisation), ("files opened a second", 0.5));
        assert!(!Input::new(&STORAGE, &images(100.0), 16, 40_000.0).is_bound());
    }
}
