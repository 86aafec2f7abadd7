//! Ranks as processes: gathering over TCP through rank 0.
//!
//! Every rank holds one connection to rank 0, which collects what each brings and sends all of it back. A connection starts with
//! the group's secret and a rank; whoever brings another secret is turned away. The messages are small and come before the
//! first step and around captures, never during a step.

use std::fmt;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::door::{Answer, ClosedDoor, HELLO, greet};
use super::group::{Group, absent, elsewhere};
use super::rendezvous::Rendezvous;
use crate::error::{Error, Result};

/// Bytes of one message at most: a dump of a chain's ops is far below.
const MESSAGE_BYTES: u64 = 64 << 20;

/// One rank of a group whose ranks are processes.
pub struct TcpGroup {
    rank: u32,
    world: u32,
    patience: Duration,
    // Rank 0: a connection to every other rank, by rank - 1. Others: one connection, to rank 0.
    links: Mutex<Vec<TcpStream>>,
    // Rank 0's.
    _door: Option<ClosedDoor>,
}

impl fmt::Debug for TcpGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpGroup").field("rank", &self.rank).field("world", &self.world).finish_non_exhaustive()
    }
}

impl TcpGroup {
    /// Meets the other ranks; waits for all of them up to `patience`.
    ///
    /// Errors: the address cannot be bound or reached, a rank is missing or there twice, secrets differ.
    pub fn join(rendezvous: &Rendezvous, patience: Duration) -> Result<TcpGroup> {
        let Rendezvous { rank, world, .. } = *rendezvous;
        let address = resolve(rendezvous)?;
        let (links, door) = match rank {
            _ if world == 1 => (Vec::new(), None),
            0 => gather_links(rendezvous, address, patience).map(|(links, door)| (links, Some(door)))?,
            _ => (vec![reach(rendezvous, address, patience)?], None),
        };
        for link in &links {
            let set = link.set_nodelay(true).and_then(|()| link.set_read_timeout(Some(patience)));
            set.map_err(|error| broken("joining", &error))?;
        }
        Ok(TcpGroup { rank, world, patience, links: Mutex::new(links), _door: door })
    }
}

impl Group for TcpGroup {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.world
    }

    fn all_gather(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = |rank| absent(label, rank, self.patience.as_secs_f64());
        if self.rank > 0 {
            let link = &mut links[0];
            let sent = send(link, label.as_bytes()).and_then(|()| send(link, bytes));
            sent.map_err(|error| broken(label, &error))?;
            // A rank that is missing ends rank 0, and with it this link.
            let all = (0..self.world).map(|_| Ok((receive(link)?, receive(link)?)));
            let all: Vec<_> = all.collect::<std::io::Result<_>>().map_err(|_| missing(0))?;
            return alike(label, all);
        }
        let mut all = vec![(label.as_bytes().to_vec(), bytes.to_vec())];
        for (link, rank) in links.iter_mut().zip(1..) {
            all.push(receive(link).and_then(|label| Ok((label, receive(link)?))).map_err(|_| missing(rank))?);
        }
        // Sent back even if they differ, so that every rank sees the same.
        for link in links.iter_mut() {
            for (label, bytes) in &all {
                let sent = send(link, label).and_then(|()| send(link, bytes));
                sent.map_err(|error| broken("all_gather", &error))?;
            }
        }
        alike(label, all)
    }
}

/// What each rank brought, if all brought the same thing.
fn alike(label: &str, all: Vec<(Vec<u8>, Vec<u8>)>) -> Result<Vec<Vec<u8>>> {
    if let Some(other) = all.iter().position(|(other, _)| other != label.as_bytes()) {
        return Err(elsewhere(label, other as u32, &String::from_utf8_lossy(&all[other].0)));
    }
    Ok(all.into_iter().map(|(_, bytes)| bytes).collect())
}

fn resolve(rendezvous: &Rendezvous) -> Result<SocketAddr> {
    let Rendezvous { address, port, .. } = rendezvous;
    let found = (address.as_str(), *port).to_socket_addrs().ok().and_then(|mut found| found.next());
    found.ok_or_else(|| Error::config(format!("MASTER_ADDR = {address:?}: no such host")).help("set it to rank 0's address"))
}

/// Rank 0: listens until every other rank is there.
fn gather_links(rendezvous: &Rendezvous, address: SocketAddr, patience: Duration) -> Result<(Vec<TcpStream>, ClosedDoor)> {
    let until = Instant::now() + patience;
    let unbound = |error: std::io::Error| {
        Error::peer(format!("rank 0 cannot listen on {address}: {error}"))
            .help("set MASTER_ADDR to an address of this host, and MASTER_PORT to a free port")
    };
    let listener = TcpListener::bind(address).map_err(unbound)?;
    listener.set_nonblocking(true).map_err(unbound)?;
    let mut links: Vec<Option<TcpStream>> = (1..rendezvous.world).map(|_| None).collect();
    while let Some(missing) = links.iter().position(Option::is_none) {
        if Instant::now() > until {
            return Err(nobody_came(missing as u32 + 1, address, patience));
        }
        match listener.accept() {
            // A stranger is turned away; the ranks of the group still come.
            Ok((link, from)) => match greet(rendezvous, link, Answer::Welcome) {
                Ok((rank, link)) => match links.get_mut(rank as usize - 1) {
                    Some(place @ None) => *place = Some(link),
                    _ => {
                        return Err(Error::peer(format!(
                            "rank {rank} is there twice, or not below the world of {}",
                            rendezvous.world
                        ))
                        .help("give each process its own RANK, below WORLD_SIZE"));
                    }
                },
                Err(why) => tracing::warn!(%from, why, "a connection was turned away"),
            },
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => return Err(unbound(error)),
        }
    }
    Ok((links.into_iter().flatten().collect(), ClosedDoor::new(rendezvous, listener)))
}

/// Other ranks: connects to rank 0, which may not be there yet.
fn reach(rendezvous: &Rendezvous, address: SocketAddr, patience: Duration) -> Result<TcpStream> {
    let until = Instant::now() + patience;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(nobody_came(0, address, patience));
        }
        if let Ok(mut link) = TcpStream::connect_timeout(&address, left.min(Duration::from_secs(1))) {
            let mut hello = HELLO.to_vec();
            hello.extend_from_slice(&rendezvous.rank.to_le_bytes());
            hello.extend_from_slice(&rendezvous.world.to_le_bytes());
            let mut answer = [0];
            let said = link
                .set_read_timeout(Some(left))
                .and_then(|()| link.write_all(&hello))
                .and_then(|()| send(&mut link, rendezvous.secret.as_bytes()))
                .and_then(|()| link.read_exact(&mut answer));
            // One that hangs up without an answer may be another program's; rank 0 may still come.
            match said.ok().and_then(|()| Answer::read(answer[0])) {
                Some(Answer::Welcome) => return Ok(link),
                Some(refused) => return Err(turned_away(refused)),
                None => {}
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn nobody_came(rank: u32, address: SocketAddr, patience: Duration) -> Error {
    Error::peer(format!("rank {rank} did not come to the rendezvous at {address} within {:.1} s", patience.as_secs_f64()))
        .help("start every rank, each with the same WORLD_SIZE, MASTER_ADDR, MASTER_PORT and CAPSTAN_SECRET")
}

fn turned_away(answer: Answer) -> Error {
    match answer {
        Answer::Secret => Error::peer("rank 0 has another secret").help("set CAPSTAN_SECRET alike on every rank"),
        Answer::World => Error::peer("rank 0 has another WORLD_SIZE, or this rank's number is 0 as well")
            .help("give every process the same WORLD_SIZE and its own RANK"),
        Answer::Begun | Answer::Welcome => Error::peer("the group has begun: every rank was there already")
            .help("a rank that restarts cannot come back; end all ranks and start them anew"),
    }
}

fn send(link: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    link.write_all(&(bytes.len() as u64).to_le_bytes())?;
    link.write_all(bytes)
}

fn receive(link: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 8];
    link.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if len > MESSAGE_BYTES {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len as usize];
    link.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn broken(label: &str, error: &std::io::Error) -> Error {
    Error::peer(format!("{label:?}: the connection between ranks broke: {error}")).help("look for what ended that rank")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::agree;

    /// A port that nobody listens on now.
    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    fn at(port: u16, rank: u32, world: u32, secret: &str) -> Rendezvous {
        Rendezvous { rank, world, local_rank: rank, address: "127.0.0.1".into(), port, secret: secret.into() }
    }

    #[test]
    fn ranks_meet_gather_and_turn_strangers_away() {
        let port = free_port();
        let patience = Duration::from_secs(30);
        std::thread::scope(|scope| {
            // Comes first, and says nothing a rank would say.
            let stranger = scope.spawn(move || {
                while TcpStream::connect(("127.0.0.1", port)).and_then(|mut link| link.write_all(&[7; 64])).is_err() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let wrong = scope.spawn(move || TcpGroup::join(&at(port, 1, 3, "guess"), patience).unwrap_err());
            std::thread::sleep(Duration::from_millis(20));
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    scope.spawn(move || {
                        if rank > 0 {
                            std::thread::sleep(Duration::from_millis(200));
                        }
                        let group = TcpGroup::join(&at(port, rank, 3, "secret"), patience).unwrap();
                        for round in 0..100u32 {
                            let all = group.all_gather("round", &(round * 3 + rank).to_le_bytes()).unwrap();
                            let numbers = all.iter().map(|bytes| u32::from_le_bytes(bytes[..].try_into().unwrap()));
                            assert!(numbers.eq(round * 3..round * 3 + 3));
                        }
                        // All have come to the last round: the door is closed.
                        if rank == 1 {
                            let error = TcpGroup::join(&at(port, 1, 3, "secret"), patience).unwrap_err();
                            assert!(error.message().contains("has begun") && error.help_line().is_some(), "{error}");
                        }
                        agree(&group, "rows", [b"8", b"8", b"9"][rank as usize], "help").unwrap_err()
                    })
                })
                .collect();
            for rank in ranks {
                let error = rank.join().unwrap();
                assert!(error.message().contains("has 8") && error.message().contains("has 9"), "{error}");
            }
            assert!(wrong.join().unwrap().message().contains("secret"));
            stranger.join().unwrap();
        });
    }

    #[test]
    fn a_stranger_that_says_little_at_a_time_keeps_nobody_waiting() {
        let port = free_port();
        std::thread::scope(|scope| {
            let rank = scope.spawn(move || TcpGroup::join(&at(port, 0, 2, "s"), Duration::from_millis(500)).unwrap_err());
            let mut stranger = loop {
                match TcpStream::connect(("127.0.0.1", port)) {
                    Ok(stranger) => break stranger,
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            let start = Instant::now();
            // A greeting that claims a secret of many bytes, one at a time, until it is hung up on.
            let greeting = [&HELLO[..], &1u32.to_le_bytes(), &2u32.to_le_bytes(), &4000u64.to_le_bytes()].concat();
            for byte in greeting.iter().chain(&[7; 4000]) {
                if rank.is_finished() || stranger.write_all(&[*byte]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(rank.join().unwrap().message().contains("rank 1 did not come"));
            assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        });
    }

    #[test]
    fn a_rank_that_never_comes_is_named_in_time() {
        let error = TcpGroup::join(&at(free_port(), 0, 2, "s"), Duration::from_millis(60)).unwrap_err();
        assert!(error.message().contains("rank 1"), "{error}");
        let error = TcpGroup::join(&at(free_port(), 1, 2, "s"), Duration::from_millis(60)).unwrap_err();
        assert!(error.message().contains("rank 0"), "{error}");
    }
}
