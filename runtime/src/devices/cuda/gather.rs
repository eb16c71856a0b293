//! Collectives among devices of one process through the host: data is downloaded, exchanged between threads, and
//! uploaded.
//!
//! This is slow but needs no library. Several devices of a plan may share one GPU, which NCCL refuses. So plans for
//! many GPUs can be verified on one.

use super::bytes::reduced;
use crate::error::KernelError;
use crate::mailbox::{Mailbox, Payload, Tag};
use crate::tape::{CollectiveKind, Communicator, Purpose};
use altiplano_ir::dtype::DType;

/// Computes this member's result of a collective from the data of all members.
pub(crate) fn collective(
    mailbox: &mut Mailbox,
    communicator: &Communicator,
    kind: CollectiveKind,
    dtype: DType,
    mine: Vec<u8>,
) -> Result<Vec<u8>, KernelError> {
    let ranks = &communicator.ranks;
    let me = ranks.iter().position(|&rank| rank as usize == mailbox.rank).unwrap_or(0);
    for (_, &rank) in ranks.iter().enumerate().filter(|(member, _)| *member != me) {
        send(mailbox, communicator, rank, &mine);
    }
    let mut all = Vec::with_capacity(ranks.len());
    for (member, &rank) in ranks.iter().enumerate() {
        all.push(if member == me { mine.clone() } else { receive(mailbox, communicator, rank, mine.len())? });
    }
    Ok(match kind {
        CollectiveKind::AllGather => all.concat(),
        CollectiveKind::AllReduce(reducer) => {
            let members: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
            reduced(dtype, reducer, &members)
        }
        CollectiveKind::ReduceScatter(reducer) => {
            let part = mine.len() / ranks.len();
            let members: Vec<&[u8]> = all.iter().map(|member| &member[me * part..(me + 1) * part]).collect();
            reduced(dtype, reducer, &members)
        }
    })
}

/// Sends bytes to a rank without blocking.
pub(crate) fn send(mailbox: &Mailbox, communicator: &Communicator, to: u32, bytes: &[u8]) {
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
    mailbox.send(to as usize, tag(communicator), Payload::Words(words));
}

/// Receives the given number of bytes from a rank.
pub(crate) fn receive(
    mailbox: &mut Mailbox,
    communicator: &Communicator,
    from: u32,
    bytes: usize,
) -> Result<Vec<u8>, KernelError> {
    match mailbox.receive(from as usize, tag(communicator))? {
        Payload::Words(words) if words.len() == bytes.div_ceil(8) => {
            Ok(bytemuck::cast_slice::<u64, u8>(&words)[..bytes].to_vec())
        }
        Payload::Words(words) => Err(KernelError::MessageSize { expected: bytes, found: 8 * words.len() }),
        _ => Err(KernelError::Disconnected),
    }
}

/// The message tag of a communicator. Two devices agree on the order of the messages of one purpose.
fn tag(communicator: &Communicator) -> Tag {
    match communicator.purpose {
        Purpose::Collectives => Tag::Collective,
        Purpose::Channel => Tag::Channel,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::cuda::bytes::{decode, encode};
    use altiplano_ir::op::Reducer;

    #[test]
    fn members_get_what_the_collective_gives() {
        let check = |kind: CollectiveKind, given: [&[f64]; 3], expected: [&[f64]; 3]| {
            // The group's order differs from that of the ranks.
            let communicator = Communicator { ranks: vec![2, 0, 1], purpose: Purpose::Collectives };
            let got: Vec<Vec<f64>> = std::thread::scope(|scope| {
                let run = |mut mailbox: Mailbox| {
                    let communicator = communicator.clone();
                    let mine = encode(DType::F32, given[mailbox.rank].iter().copied());
                    scope.spawn(move || {
                        let got = collective(&mut mailbox, &communicator, kind, DType::F32, mine).expect("it works");
                        decode(DType::F32, &got)
                    })
                };
                let threads: Vec<_> = Mailbox::network(3, false).into_iter().map(run).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            assert_eq!(got, expected, "{kind:?}");
        };
        let given: [&[f64]; 3] = [&[1.0, 2.0, 3.0], &[10.0, 20.0, 30.0], &[100.0, 200.0, 300.0]];
        check(CollectiveKind::AllReduce(Reducer::Sum), given, [&[111.0, 222.0, 333.0]; 3]);
        check(CollectiveKind::ReduceScatter(Reducer::Sum), given, [&[222.0], &[333.0], &[111.0]]);
        let all: &[f64] = &[100.0, 200.0, 300.0, 1.0, 2.0, 3.0, 10.0, 20.0, 30.0];
        check(CollectiveKind::AllGather, given, [all; 3]);
    }
}
