//! Assigns devices to ranks: the ranks of a machine take the devices of one of the plan's nodes, in order, one or
//! several each.

use crate::error::RanksError;
use std::collections::BTreeMap;

/// The devices that a plan uses, by node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub nodes: Vec<Vec<u32>>,
    /// Assign devices to ranks in order, whatever their nodes.
    pub anywhere: bool,
}

impl Layout {
    /// The device of each rank; `node_of` has the first rank of each rank's machine.
    pub fn devices(&self, node_of: &[usize]) -> Result<Vec<u32>, RanksError> {
        let devices = self.num_devices();
        if node_of.len() != devices {
            return Err(RanksError::Count { devices, ranks: node_of.len() });
        }
        let shares = self.shares(node_of).map_err(|error| match error {
            RanksError::Shares { planned, found } => RanksError::Nodes { planned, found },
            error => error,
        })?;
        // With as many ranks as devices, shared evenly on each node, each rank has one.
        Ok(shares.into_iter().flatten().collect())
    }

    /// The devices of each rank, if ranks have several. All ranks of a node have equally many.
    pub fn shares(&self, node_of: &[usize]) -> Result<Vec<Vec<u32>>, RanksError> {
        let (devices, ranks) = (self.num_devices(), node_of.len());
        if self.anywhere {
            if ranks == 0 || devices % ranks != 0 {
                return Err(RanksError::Uneven { devices, ranks });
            }
            let devices: Vec<u32> = self.nodes.iter().flatten().copied().collect();
            return Ok(devices.chunks(devices.len() / ranks).map(<[u32]>::to_vec).collect());
        }
        let found = ranks_by_node(node_of);
        let fits = |(planned, (_, ranks)): (&Vec<u32>, &(usize, Vec<usize>))| planned.len() % ranks.len() == 0;
        if found.len() != self.nodes.len() || !self.nodes.iter().zip(&found).all(fits) {
            let planned = self.nodes.iter().map(Vec::len).collect();
            return Err(RanksError::Shares { planned, found: found.iter().map(|(_, ranks)| ranks.len()).collect() });
        }
        let mut shares = vec![Vec::new(); ranks];
        for (devices, (_, ranks)) in self.nodes.iter().zip(&found) {
            for (&rank, share) in ranks.iter().zip(devices.chunks(devices.len() / ranks.len())) {
                shares[rank] = share.to_vec();
            }
        }
        Ok(shares)
    }

    fn num_devices(&self) -> usize {
        self.nodes.iter().map(Vec::len).sum()
    }
}

/// The ranks of each machine, in order.
fn ranks_by_node(node_of: &[usize]) -> Vec<(usize, Vec<usize>)> {
    let mut nodes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    node_of.iter().enumerate().for_each(|(rank, &node)| nodes.entry(node).or_default().push(rank));
    nodes.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_the_devices_of_their_nodes() {
        // A layout with nodes of these sizes.
        let layout = |sizes: &[u32], anywhere| {
            let mut ids = 0..;
            let nodes = sizes.iter().map(|&size| ids.by_ref().take(size as usize).collect()).collect();
            Layout { nodes, anywhere }
        };
        let cases: [(&[u32], &[usize], Result<Vec<u32>, RanksError>); 6] = [
            (&[2, 2], &[0, 0, 2, 2], Ok(vec![0, 1, 2, 3])),
            // Ranks assigned to nodes round-robin.
            (&[2, 2], &[0, 1, 0, 1], Ok(vec![0, 2, 1, 3])),
            (&[1, 2], &[0, 1, 1], Ok(vec![0, 1, 2])),
            (&[4], &[0; 3], Err(RanksError::Count { devices: 4, ranks: 3 })),
            (&[2, 2], &[0; 4], Err(RanksError::Nodes { planned: vec![2, 2], found: vec![4] })),
            (&[2, 1], &[0, 1, 1], Err(RanksError::Nodes { planned: vec![2, 1], found: vec![1, 2] })),
        ];
        for (nodes, node_of, expected) in cases {
            assert_eq!(layout(nodes, false).devices(node_of), expected, "{nodes:?} {node_of:?}");
        }
        let anywhere = layout(&[2, 2], true);
        assert_eq!(anywhere.devices(&[0; 4]), Ok(vec![0, 1, 2, 3]));
        assert_eq!(anywhere.devices(&[0; 2]), Err(RanksError::Count { devices: 4, ranks: 2 }));
    }

    #[test]
    fn ranks_of_a_node_share_its_devices() {
        let layout = |anywhere| Layout { nodes: vec![vec![0, 1, 2, 3], vec![4, 5]], anywhere };
        let nodes = layout(false);
        assert_eq!(nodes.shares(&[0, 1]), Ok(vec![vec![0, 1, 2, 3], vec![4, 5]]));
        assert_eq!(nodes.shares(&[0, 1, 0]), Ok(vec![vec![0, 1], vec![4, 5], vec![2, 3]]));
        let planned = vec![4, 2];
        assert_eq!(nodes.shares(&[0; 3]), Err(RanksError::Shares { planned: planned.clone(), found: vec![3] }));
        assert_eq!(
            nodes.shares(&[0, 0, 0, 3]),
            Err(RanksError::Shares { planned: planned.clone(), found: vec![3, 1] })
        );
        // As many ranks as devices, but distributed differently.
        assert_eq!(layout(false).devices(&[0, 0, 2, 2, 2, 2]), Err(RanksError::Nodes { planned, found: vec![2, 4] }));
        assert_eq!(layout(true).shares(&[0; 3]), Ok(vec![vec![0, 1], vec![2, 3], vec![4, 5]]));
        assert_eq!(layout(true).shares(&[0; 4]), Err(RanksError::Uneven { devices: 6, ranks: 4 }));
    }
}
