//! Direct connections between the processes of a run, for values that move between their devices.
//!
//! Sending never waits: a thread for each peer writes what is queued, and another reads what arrives. A peer that is lost
//! is the watch's business, which ends this process.

use crate::error::{KernelError, RuntimeError, WatchError};
use crate::ranks::World;
use crate::ranks::connect::{Address, Channel, Hello, Hub, host_name};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A value on its way: a head that tells what it is, and its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Letter {
    pub head: [u64; 2],
    pub bytes: Vec<u8>,
}

/// This process's connections to its peers. Dropping them waits until all letters were written.
pub(crate) struct Post {
    writers: BTreeMap<usize, (Sender<Letter>, JoinHandle<()>)>,
    /// Letters of all peers. Those of one peer are in the order in which it sent them.
    arrived: Receiver<Letter>,
}

impl Post {
    /// Connects this process to its peers. All processes must call it, and each must be a peer of its peers.
    pub(crate) fn open(world: &World, peers: &BTreeSet<usize>) -> Result<Post, RuntimeError> {
        let failed = |error: WatchError| RuntimeError::Watch(Box::new(error));
        let hub = Hub::listen(world.listens_at()).map_err(failed)?;
        let addresses = world.tell_text(&hub.address.encode())?;
        let (me, size) = (world.rank(), world.size());
        let hello = Hello { channel: Channel::Words, rank: me, size, pid: std::process::id(), host: host_name() };
        // A process connects to lower peers, and higher ones connect to it.
        let join = |&rank: &usize| {
            let address = addresses.get(rank).and_then(|text| Address::decode(text)).ok_or(WatchError::NoAddress)?;
            Ok((rank, address.join(&hello)?))
        };
        let lower = peers.range(..me).map(join).collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let higher = hub.those(&peers.range(me + 1..).copied().collect()).map_err(failed)?;
        Post::over(lower.into_iter().chain(higher)).map_err(|error| failed(WatchError::Listen(error)))
    }

    /// Starts the threads of each peer's connection.
    fn over(links: impl IntoIterator<Item = (usize, TcpStream)>) -> io::Result<Post> {
        let (arrives, arrived) = channel();
        let mut writers = BTreeMap::new();
        for (rank, stream) in links {
            // The watch notices a peer that does not read.
            stream.set_write_timeout(None)?;
            let (mut incoming, arrives) = (BufReader::new(stream.try_clone()?), arrives.clone());
            std::thread::Builder::new().name(format!("letters of rank {rank}")).spawn(move || {
                while let Ok(letter) = read(&mut incoming) {
                    if arrives.send(letter).is_err() {
                        break;
                    }
                }
            })?;
            let (send, queued) = channel();
            let write = move || deliver(stream, &queued);
            let writer = std::thread::Builder::new().name(format!("letters to rank {rank}")).spawn(write)?;
            writers.insert(rank, (send, writer));
        }
        Ok(Post { writers, arrived })
    }

    /// Queues a letter to a peer.
    pub(crate) fn send(&self, to: usize, letter: Letter) -> Result<(), KernelError> {
        let sent = self.writers.get(&to).is_some_and(|(queue, _)| queue.send(letter).is_ok());
        if sent { Ok(()) } else { Err(KernelError::Disconnected) }
    }

    /// Waits for the next letter of any peer.
    pub(crate) fn receive(&self) -> Result<Letter, KernelError> {
        self.arrived.recv().map_err(|_| KernelError::Disconnected)
    }

    /// The next letter that has arrived, if there is one.
    pub(crate) fn arrived(&self) -> Option<Letter> {
        self.arrived.try_recv().ok()
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        for (queue, writer) in std::mem::take(&mut self.writers).into_values() {
            drop(queue);
            // A writer that panicked has nothing more to send.
            let _ = writer.join();
        }
    }
}

/// Writes the queued letters until there are no more senders, or the peer is gone.
fn deliver(mut stream: TcpStream, queued: &Receiver<Letter>) {
    for Letter { head, bytes } in queued {
        let frame = [head[0], head[1], bytes.len() as u64].map(u64::to_le_bytes).concat();
        if stream.write_all(&frame).and_then(|()| stream.write_all(&bytes)).is_err() {
            return;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
}

fn read(from: &mut impl Read) -> io::Result<Letter> {
    let mut frame = [0; 24];
    from.read_exact(&mut frame)?;
    let (numbers, _) = frame.as_chunks::<8>();
    let [first, second, length] = [numbers[0], numbers[1], numbers[2]].map(u64::from_le_bytes);
    // The buffer grows with what arrives, whatever length was said.
    let mut bytes = Vec::new();
    let count = from.by_ref().take(length).read_to_end(&mut bytes)?;
    if count as u64 == length {
        Ok(Letter { head: [first, second], bytes })
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn letters_arrive_whole_and_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = listener.accept().unwrap();
        let (one, two) = (Post::over([(1, here)]).unwrap(), Post::over([(0, there)]).unwrap());
        // Both send more than sockets hold before either receives.
        let letter = |i: u64| Letter { head: [i, i * i], bytes: vec![i as u8; 1 << (2 * i)] };
        for i in 0..12 {
            one.send(1, letter(i)).unwrap();
            two.send(0, letter(i)).unwrap();
        }
        for i in 0..12 {
            assert_eq!(two.receive().unwrap(), letter(i));
        }
        assert!(one.send(7, letter(1)).is_err(), "there is no such peer");
        // Letters that were sent before the end arrive.
        drop(two);
        for i in 0..12 {
            assert_eq!(one.receive().unwrap(), letter(i));
        }
        assert_eq!(one.receive(), Err(KernelError::Disconnected));
    }
}
