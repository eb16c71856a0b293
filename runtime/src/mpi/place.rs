//! Which rank is which device: the ranks of a machine take the devices of one of the plan's nodes, in order.

use crate::error::RanksError;

/// The devices that a plan uses, by node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub nodes: Vec<Vec<u32>>,
    /// Take ranks wherever they are, device by device.
    pub anywhere: bool,
}

impl Layout {
    /// The device of each rank; `node_of` has the first rank of each rank's machine.
    pub fn devices(&self, node_of: &[usize]) -> Result<Vec<u32>, RanksError> {
        let devices: Vec<u32> = self.nodes.iter().flatten().copied().collect();
        if node_of.len() != devices.len() {
            return Err(RanksError::Count { devices: devices.len(), ranks: node_of.len() });
        }
        if self.anywhere {
            return Ok(devices);
        }
        let mut nodes: Vec<usize> = node_of.to_vec();
        nodes.sort_unstable();
        nodes.dedup();
        let found: Vec<usize> =
            nodes.iter().map(|&node| node_of.iter().filter(|&&other| other == node).count()).collect();
        let planned: Vec<usize> = self.nodes.iter().map(Vec::len).collect();
        if found != planned {
            return Err(RanksError::Nodes { planned, found });
        }
        let device = |(rank, node): (usize, &usize)| {
            let local = node_of[..rank].iter().filter(|&other| other == node).count();
            nodes.binary_search(node).map_or(0, |n| self.nodes[n][local])
        };
        Ok(node_of.iter().enumerate().map(device).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_the_devices_of_their_nodes() {
        // Nodes of so many devices.
        let layout = |sizes: &[u32], anywhere| {
            let mut ids = 0..;
            let nodes = sizes.iter().map(|&size| ids.by_ref().take(size as usize).collect()).collect();
            Layout { nodes, anywhere }
        };
        let cases: [(&[u32], &[usize], Result<Vec<u32>, RanksError>); 6] = [
            (&[2, 2], &[0, 0, 2, 2], Ok(vec![0, 1, 2, 3])),
            // Ranks dealt out to nodes in turns.
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
}
