//! Connections of all ranks to the first one, the *hub*: where it listens, and a handshake that keeps strangers from
//! being taken for ranks.

use crate::error::WatchError;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// The address of a hub. The token proves that this is the right hub and that the peer was told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub hosts: Vec<IpAddr>,
    pub port: u16,
    pub token: [u8; TOKEN],
}

pub const TOKEN: usize = 16;

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channel {
    /// Only checks that the hub is there.
    Probe,
    Watch,
    Words,
}

/// The identity that a rank sends when it connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub channel: Channel,
    pub rank: usize,
    /// The number of ranks with which it was started.
    pub size: usize,
    pub pid: u32,
    pub host: String,
}

/// The first rank's end, which accepts connections.
pub struct Hub {
    listener: TcpListener,
    pub address: Address,
}

/// Time limit for the ranks' first connection, if all know where the hub is.
const CONNECT: Duration = Duration::from_secs(8);
/// Time limit for a peer's greeting at the hub, and for a host to accept a connection.
const GREETING: Duration = Duration::from_secs(1);
/// Time limit for the answer of a hub, which may be greeting many ranks.
const ANSWER: Duration = Duration::from_secs(5);
/// Maximum number of bytes of a host's name; longer names are cut.
const LONGEST_NAME: usize = 255;

impl Address {
    /// Encodes the token in hex, the port and the hosts in one line.
    pub fn encode(&self) -> String {
        let token: String = self.token.iter().map(|byte| format!("{byte:02x}")).collect();
        let hosts: Vec<String> = self.hosts.iter().map(ToString::to_string).collect();
        format!("{token} {} {}", self.port, hosts.join(" "))
    }

    pub fn decode(text: &str) -> Option<Address> {
        let mut words = text.split(' ');
        let (hex, port) = (words.next()?, words.next()?.parse().ok()?);
        let mut token = [0; TOKEN];
        for (i, byte) in token.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(2 * i..2 * i + 2)?, 16).ok()?;
        }
        Some(Address { hosts: words.filter_map(|host| host.parse().ok()).collect(), port, token })
    }

    /// Connects to the hub at the first of its addresses that answers. If none does, returns the error of the last.
    pub fn connect(&self, hello: &Hello) -> Result<TcpStream, WatchError> {
        let mut last = WatchError::NoAddress;
        for &host in &self.hosts {
            match self.greet(SocketAddr::new(host, self.port), hello) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = WatchError::Join { host, error },
            }
        }
        Err(last)
    }

    /// As [`Address::connect`], but retries for as long as a running hub may take to answer.
    pub fn join(&self, hello: &Hello) -> Result<TcpStream, WatchError> {
        let end = Instant::now() + CONNECT;
        loop {
            match self.connect(hello) {
                Err(WatchError::Join { .. }) if Instant::now() < end => std::thread::sleep(Duration::from_millis(50)),
                done => return done,
            }
        }
    }

    fn greet(&self, place: SocketAddr, hello: &Hello) -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(&place, GREETING)?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.write_all(&[self.token.to_vec(), hello.encode()].concat())?;
        let mut answer = [0; TOKEN];
        stream.read_exact(&mut answer)?;
        if answer == self.token { Ok(stream) } else { Err(ErrorKind::InvalidData.into()) }
    }
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut length = self.host.len().min(LONGEST_NAME);
        while !self.host.is_char_boundary(length) {
            length -= 1;
        }
        let mut bytes = vec![self.channel as u8, length as u8];
        [self.rank as u32, self.size as u32, self.pid].iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        bytes.extend(&self.host.as_bytes()[..length]);
        bytes
    }

    fn read(mut from: impl Read) -> Option<Hello> {
        let mut head = [0; 14];
        from.read_exact(&mut head).ok()?;
        let channel = match head[0] {
            0 => Channel::Probe,
            1 => Channel::Watch,
            2 => Channel::Words,
            _ => return None,
        };
        let number = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?));
        let (rank, size, pid) = (number(2)? as usize, number(6)? as usize, number(10)?);
        let mut host = vec![0; head[1].into()];
        from.read_exact(&mut host).ok()?;
        Some(Hello { channel, rank, size, pid, host: String::from_utf8_lossy(&host).into_owned() })
    }
}

impl Hub {
    /// Listens on a free port, with a new token.
    pub fn listen() -> Result<Hub, WatchError> {
        let listener = TcpListener::bind("0.0.0.0:0").map_err(WatchError::Listen)?;
        listener.set_nonblocking(true).map_err(WatchError::Listen)?;
        let port = listener.local_addr().map_err(WatchError::Listen)?.port();
        let mut token = [0; TOKEN];
        let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut token));
        random.map_err(WatchError::Listen)?;
        let interfaces = nix::ifaddrs::getifaddrs().map_err(|error| WatchError::Listen(error.into()))?;
        let address = |i: nix::ifaddrs::InterfaceAddress| i.address?.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        let mut hosts: Vec<IpAddr> = interfaces.filter_map(address).collect();
        // Loopback addresses come last; on a machine without a network there are no others.
        hosts.sort_by_key(|host| host.is_loopback());
        hosts.dedup();
        Ok(Hub { listener, address: Address { hosts, port, token } })
    }

    /// Accepts a pending connection and returns the peer's identity. `None` if none is pending or the token is wrong.
    pub fn next(&self) -> Result<Option<(Hello, TcpStream)>, Error> {
        match self.listener.accept() {
            Ok((stream, _)) => Ok(self.greeted(&stream).map(|hello| (hello, stream))),
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => Ok(None),
            // The peer may have disconnected already.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads a greeting and acknowledges it.
    fn greeted(&self, mut stream: &TcpStream) -> Option<Hello> {
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(GREETING)).ok()?;
        let mut token = [0; TOKEN];
        stream.read_exact(&mut token).ok()?;
        if token != self.address.token {
            return None;
        }
        let hello = Hello::read(stream)?;
        stream.write_all(&self.address.token).ok()?;
        Some(hello)
    }

    /// Accepts the connections of all other ranks, which know where the hub is.
    pub fn all(&self, ranks: usize) -> Result<Vec<(usize, TcpStream)>, WatchError> {
        let end = Instant::now() + CONNECT;
        let mut links: Vec<(usize, TcpStream)> = Vec::new();
        while links.len() + 1 < ranks {
            match self.next().map_err(WatchError::Listen)? {
                Some((Hello { rank, .. }, stream)) => {
                    if rank > 0 && rank < ranks && links.iter().all(|(other, _)| *other != rank) {
                        links.push((rank, stream));
                    }
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
            if Instant::now() > end {
                return Err(WatchError::NotAll { joined: links.len() + 1, ranks });
            }
        }
        Ok(links)
    }
}

/// The name of this host.
pub fn host_name() -> String {
    let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| "an unnamed host".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_greetings_are_read_as_they_were_written() {
        let address = Address { hosts: vec!["10.0.0.7".parse().expect("an address")], port: 40_000, token: [7; TOKEN] };
        assert_eq!(Address::decode(&address.encode()), Some(address));
        assert_eq!(Address::decode("00 1 ::1"), None);
        for (channel, host) in [(Channel::Probe, ""), (Channel::Watch, "node-b"), (Channel::Words, "é")] {
            let hello = Hello { channel, rank: 70_000, size: 1 << 20, pid: u32::MAX, host: host.to_string() };
            let bytes = hello.encode();
            assert_eq!(Hello::read(&bytes[..bytes.len() - 1]), None);
            assert_eq!(Hello::read(&bytes[..]), Some(hello));
        }
    }

    #[test]
    fn a_hub_takes_nobody_without_its_token() {
        let hub = Hub::listen().expect("a hub");
        let hello = Hello { channel: Channel::Watch, rank: 1, size: 2, pid: 3, host: "here".to_string() };
        let mut other = hub.address.clone();
        other.token[0] ^= 1;
        let (known, said) = (hub.address.clone(), hello.clone());
        let joins = std::thread::spawn(move || (other.connect(&said).is_err(), known.connect(&said).is_ok()));
        let mut come = Vec::new();
        while come.is_empty() {
            come.extend(hub.next().expect("it listens").map(|(hello, _)| hello));
        }
        assert_eq!(come, [hello]);
        assert_eq!(joins.join().expect("it ends"), (true, true));
    }
}
