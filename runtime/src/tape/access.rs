//! The regions that a command reads and writes.

use super::{Part, RegionId, Tape, What};

/// A range of bytes of the arena that a command touches; `writes` is true if the command changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub region: RegionId,
    pub from: u64,
    pub to: u64,
    pub writes: bool,
}

impl Tape {
    fn whole(&self, region: RegionId, writes: bool) -> Access {
        let it = self.region(region);
        Access { region, from: it.offset, to: it.offset + it.bytes, writes }
    }

    fn part(&self, part: Part, writes: bool) -> Access {
        let it = self.region(part.region);
        let from = it.offset + part.from * it.dtype.bytes();
        Access { region: part.region, from, to: from + part.elements * it.dtype.bytes(), writes }
    }

    /// The accesses of a command: reads first, then writes.
    pub fn accesses(&self, what: &What) -> Vec<Access> {
        let mut all = Vec::new();
        match what {
            What::Launch { launch, regions, .. } => {
                for writes in [false, true] {
                    let params = &self.launches[launch.0 as usize].params;
                    let of = params.iter().zip(regions).filter(|(p, _)| p.written == writes);
                    all.extend(of.map(|(_, &region)| self.whole(region, writes)));
                }
            }
            What::Matmul(call) => {
                all.extend([call.lhs.region, call.rhs.region].map(|region| self.whole(region, false)));
                if call.accumulate {
                    all.push(self.whole(call.result.region, false));
                }
                all.push(self.whole(call.result.region, true));
            }
            What::Fill { region, .. } => all.push(self.whole(*region, true)),
            What::Copy { from, to } | What::Collective { from, to, .. } => {
                all.extend([self.whole(*from, false), self.whole(*to, true)]);
            }
            What::Upload { to, .. } => all.push(self.whole(*to, true)),
            What::Download { from, .. } => all.push(self.whole(*from, false)),
            What::Exchange { sends, receives, .. } => {
                all.extend(sends.iter().map(|m| self.part(m.part, false)));
                all.extend(receives.iter().map(|m| self.part(m.part, true)));
            }
        }
        all
    }
}
