//! Rank 0's end of the rendezvous: who comes is greeted, and let in or told why not.
//!
//! It stays open as long as the group lives, so that a rank that was started anew is told at once that it cannot join any more.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::rendezvous::Rendezvous;

/// First bytes of a connection; a program that speaks something else is turned away.
pub(super) const HELLO: &[u8; 8] = b"capstan1";
/// How long whoever comes may take to say who it is.
const GREETING: Duration = Duration::from_secs(2);

/// Bytes of a secret at most.
const SECRET_BYTES: u64 = 4096;

/// Rank 0's answer to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Answer {
    /// It is in.
    Welcome = b'K',
    /// The secrets differ.
    Secret = b'S',
    /// The world sizes differ, or there are two ranks 0.
    World = b'W',
    /// All ranks were there already.
    Begun = b'B',
}

impl Answer {
    pub fn read(byte: u8) -> Option<Answer> {
        [Answer::Welcome, Answer::Secret, Answer::World, Answer::Begun].into_iter().find(|&answer| answer as u8 == byte)
    }
}

/// Reads who is there, and answers: `good` if it is a rank of this group.
pub(super) fn greet(rendezvous: &Rendezvous, mut link: TcpStream, good: Answer) -> Result<(u32, TcpStream), &'static str> {
    let until = Instant::now() + GREETING;
    let mut hello = [0; 16];
    let read = link.set_nonblocking(false).and_then(|()| read_until(&mut link, &mut hello, until));
    read.map_err(|_| "it said nothing in time")?;
    let word = |at: usize| u32::from_le_bytes([hello[at], hello[at + 1], hello[at + 2], hello[at + 3]]);
    let (rank, world) = (word(8), word(12));
    if &hello[..8] != HELLO {
        return Err("it is no rank of this version");
    }
    let secret = read_secret(&mut link, until).map_err(|_| "it brought no secret in time, or one too long")?;
    let (answer, why) = if !same(&secret, rendezvous.secret.as_bytes()) {
        (Answer::Secret, Some("it has another secret"))
    } else if rank == 0 || world != rendezvous.world {
        (Answer::World, Some("its rank or world size is another"))
    } else {
        (good, None)
    };
    let sent = link.write_all(&[answer as u8]);
    match why {
        Some(why) => Err(why),
        None => sent.map(|()| (rank, link)).map_err(|_| "it is gone"),
    }
}

fn read_secret(link: &mut TcpStream, until: Instant) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 8];
    read_until(link, &mut len, until)?;
    let len = u64::from_le_bytes(len);
    if len > SECRET_BYTES {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut secret = vec![0; len as usize];
    read_until(link, &mut secret, until)?;
    Ok(secret)
}

/// Fills `bytes` by `until`: whoever sends a byte now and then gets no longer than others.
fn read_until(link: &mut TcpStream, mut bytes: &mut [u8], until: Instant) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        link.set_read_timeout(Some(left))?;
        match link.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Compares without telling by the time taken where two secrets differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// Tells late ranks that the group has begun, until it is dropped.
#[derive(Debug)]
pub(super) struct ClosedDoor {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ClosedDoor {
    /// Takes over a listener that does not block.
    pub fn new(rendezvous: &Rendezvous, listener: TcpListener) -> ClosedDoor {
        let over = Arc::new(AtomicBool::new(false));
        let (rendezvous, ends) = (rendezvous.clone(), over.clone());
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((link, from)) => match greet(&rendezvous, link, Answer::Begun) {
                        Ok((rank, _)) => tracing::warn!(%from, rank, "a rank came after all had come"),
                        Err(why) => tracing::warn!(%from, why, "a connection was turned away"),
                    },
                    Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(20)),
                    // Nobody depends on it: late ranks then wait until their patience ends.
                    Err(error) => {
                        tracing::warn!(%error, "late ranks are not answered any more");
                        return;
                    }
                }
            }
        });
        ClosedDoor { over, thread: Some(thread) }
    }
}

impl Drop for ClosedDoor {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It cannot panic, and its end is all that matters: the port is free again.
            let _ = thread.join();
        }
    }
}
