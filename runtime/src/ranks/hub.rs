//! Exchanges words between processes without MPI: each has a connection to the first, which collects and distributes
//! them. Messages are short (losses, signals, ids), except for tensors of a checkpoint, which only the first receives.

use crate::error::KernelError;
use crate::files::available_memory;
use crate::ranks::world::Carrier;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::TcpStream;

/// One process's end of the connections. The first process has one to each other, in order; each other has one to the
/// first.
pub struct HubLinks {
    rank: usize,
    size: usize,
    links: Vec<TcpStream>,
}

impl HubLinks {
    /// `links` are those to ranks 1, 2, ... on the first process, and the one to the first on the others. Reads block
    /// without a time limit, since the watch notices lost processes.
    pub fn new(rank: usize, size: usize, links: Vec<TcpStream>) -> std::io::Result<HubLinks> {
        for link in &links {
            link.set_nonblocking(false)?;
            link.set_nodelay(true)?;
            link.set_read_timeout(None)?;
            link.set_write_timeout(None)?;
        }
        Ok(HubLinks { rank, size, links })
    }

    /// Collects all words by rank, on the first process alone.
    fn heard(&self, own: Vec<u64>) -> Result<Vec<Vec<u64>>, KernelError> {
        let others = (1..).zip(&self.links).map(|(rank, link)| read(link).map_err(|e| lost("hearing", rank, e)));
        std::iter::once(Ok(own)).chain(others).collect()
    }
}

/// Bytes of a message for which memory is not looked at.
const SHORT: u64 = 64 << 20;

fn lost(what: &str, rank: usize, error: Error) -> KernelError {
    KernelError::Carrier { call: format!("{what} rank {rank}"), message: error.to_string() }
}

fn write(mut link: &TcpStream, words: &[u64]) -> Result<(), Error> {
    let mut bytes = Vec::with_capacity(8 + 8 * words.len());
    bytes.extend((words.len() as u64).to_le_bytes());
    words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    link.write_all(&bytes)
}

fn read(mut link: &TcpStream) -> Result<Vec<u64>, Error> {
    let mut length = [0; 8];
    link.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    // Read incrementally, so that a corrupt length allocates no memory, and no message takes what the run needs.
    let fits = |bytes: &u64| *bytes <= SHORT || available_memory().is_none_or(|most| *bytes <= most);
    let wanted = length.checked_mul(8).filter(fits).ok_or(ErrorKind::InvalidData)?;
    let mut bytes = Vec::new();
    link.take(wanted).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != wanted {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect())
}

impl Carrier for HubLinks {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn tell(&self, words: &[u64]) -> Result<Vec<Vec<u64>>, KernelError> {
        if self.rank > 0 {
            let to_first = |error| lost("telling", 0, error);
            self.links.iter().try_for_each(|link| write(link, words)).map_err(to_first)?;
            // The lengths of all words, then the words.
            let all = read(&self.links[0]).map_err(|error| lost("hearing", 0, error))?;
            let garbled = || lost("hearing", 0, ErrorKind::InvalidData.into());
            let (lengths, mut rest) = all.split_at_checked(self.size).ok_or_else(garbled)?;
            let mut said = Vec::with_capacity(self.size);
            for &length in lengths {
                let (words, after) = rest.split_at_checked(length as usize).ok_or_else(garbled)?;
                said.push(words.to_vec());
                rest = after;
            }
            return Ok(said);
        }
        let all = self.heard(words.to_vec())?;
        let mut told: Vec<u64> = all.iter().map(|words| words.len() as u64).collect();
        told.extend(all.iter().flatten());
        let tell = |(rank, link): (usize, &TcpStream)| write(link, &told).map_err(|error| lost("telling", rank, error));
        (1..).zip(&self.links).try_for_each(tell)?;
        Ok(all)
    }

    fn gather(&self, words: Vec<u64>) -> Result<Option<Vec<Vec<u64>>>, KernelError> {
        if self.rank > 0 {
            let to_first = |error| lost("telling", 0, error);
            self.links.iter().try_for_each(|link| write(link, &words)).map_err(to_first)?;
            return Ok(None);
        }
        self.heard(words).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Connected processes of a test.
    fn hub_links(size: usize) -> Vec<HubLinks> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let place = listener.local_addr().expect("an address");
        let pairs = (1..size).map(|_| {
            let near = TcpStream::connect(place).expect("a connection");
            (listener.accept().expect("a connection").0, near)
        });
        let (of_first, of_others): (Vec<_>, Vec<_>) = pairs.unzip();
        let first = HubLinks::new(0, size, of_first).expect("a hub_links");
        let other = |(rank, link)| HubLinks::new(rank, size, vec![link]).expect("a hub_links");
        std::iter::once(first).chain((1..).zip(of_others).map(other)).collect()
    }

    #[test]
    fn all_hear_what_all_say_and_the_first_alone_gathers() {
        let threads: Vec<_> = hub_links(3)
            .into_iter()
            .map(|hub_links| {
                std::thread::spawn(move || {
                    let rank = hub_links.rank();
                    let words: Vec<u64> = (0..10_000 * rank as u64).collect();
                    let told = hub_links.tell(&words).expect("words");
                    let texts = hub_links.tell_text(&"é".repeat(rank)).expect("texts");
                    (rank, told, texts, hub_links.gather(words).expect("words"))
                })
            })
            .collect();
        for thread in threads {
            let (rank, told, texts, gathered) = thread.join().expect("it ends");
            let lengths = |all: &[Vec<u64>]| all.iter().map(Vec::len).collect::<Vec<_>>();
            assert_eq!(lengths(&told), [0, 10_000, 20_000]);
            assert_eq!(told[2].last(), Some(&19_999));
            assert_eq!(texts, ["", "é", "éé"]);
            assert_eq!(gathered.as_deref().map(lengths), (rank == 0).then(|| vec![0, 10_000, 20_000]));
        }
    }

    #[test]
    fn a_message_that_is_longer_than_memory_is_not_read() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut far = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let near = listener.accept().expect("a connection").0;
        for words in [u64::MAX, u64::MAX / 8, 1 << 50] {
            far.write_all(&words.to_le_bytes()).expect("it is sent");
            assert_eq!(read(&near).map_err(|error| error.kind()), Err(ErrorKind::InvalidData), "{words} words");
        }
    }

    #[test]
    fn who_is_gone_is_named() {
        let mut all = hub_links(3);
        drop(all.pop());
        let first = all.swap_remove(0);
        let second = all.pop().expect("the second");
        let said = std::thread::spawn(move || second.gather(vec![1]).expect("it is heard"));
        let error = first.gather(Vec::new()).expect_err("the third is gone").to_string();
        assert!(error.starts_with("hearing rank 2: "), "{error}");
        assert_eq!(said.join().expect("it ends"), None);
    }
}
