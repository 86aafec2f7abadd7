//! Ranks as threads of one process.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::group::{Group, absent, elsewhere};
use crate::error::Result;

/// One rank of a group whose ranks are threads of one process.
#[derive(Debug)]
pub struct ThreadGroup {
    rank: u32,
    world: u32,
    patience: Duration,
    room: Arc<Room>,
}

#[derive(Debug, Default)]
struct Room {
    rounds: Mutex<Rounds>,
    changed: Condvar,
}

/// Two rounds are open at most: nobody can be in the one after next before all have left this one.
#[derive(Debug, Default)]
struct Rounds {
    /// Round of each rank: gatherings it has come to.
    come: Vec<u64>,
    /// What each rank brought to the rounds of each parity.
    brought: [Vec<(String, Vec<u8>)>; 2],
}

impl ThreadGroup {
    /// The ranks of a group; each waits for the others up to `patience`.
    pub fn all(world: u32, patience: Duration) -> Vec<Arc<ThreadGroup>> {
        let empty = || vec![Default::default(); world as usize];
        let rounds = Rounds { come: vec![0; world as usize], brought: [empty(), empty()] };
        let room = Arc::new(Room { rounds: Mutex::new(rounds), changed: Condvar::new() });
        (0..world).map(|rank| Arc::new(ThreadGroup { rank, world, patience, room: room.clone() })).collect()
    }
}

impl Group for ThreadGroup {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.world
    }

    fn all_gather(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        let mut rounds = self.room.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        let own = self.rank as usize;
        rounds.come[own] += 1;
        let round = rounds.come[own];
        let parity = (round % 2) as usize;
        rounds.brought[parity][own] = (label.to_string(), bytes.to_vec());
        self.room.changed.notify_all();
        while let Some(late) = rounds.come.iter().position(|&come| come < round) {
            let Some(left) = self.patience.checked_sub(start.elapsed()) else {
                return Err(absent(label, late as u32, self.patience.as_secs_f64()));
            };
            rounds = self.room.changed.wait_timeout(rounds, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let all = &rounds.brought[parity];
        if let Some(other) = all.iter().position(|(other, _)| other != label) {
            return Err(elsewhere(label, other as u32, &all[other].0));
        }
        Ok(all.iter().map(|(_, bytes)| bytes.clone()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::peers::agree;

    fn each<T: Send>(groups: &[Arc<ThreadGroup>], run: impl Fn(&ThreadGroup) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = groups.iter().map(|group| scope.spawn(|| run(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn everyone_gets_what_everyone_brought() {
        let groups = ThreadGroup::all(4, Duration::from_secs(10));
        let sums = each(&groups, |group| {
            let rounds = (0..500u32).map(|round| {
                let all = group.all_gather("numbers", &(round * 4 + group.rank()).to_le_bytes()).unwrap();
                all.iter().map(|bytes| u32::from_le_bytes(bytes[..].try_into().unwrap())).eq(round * 4..round * 4 + 4)
            });
            rounds.filter(|&right| right).count()
        });
        assert_eq!(sums, [500; 4]);
    }

    #[test]
    fn who_is_late_elsewhere_or_different_is_named_on_every_rank() {
        let groups = ThreadGroup::all(3, Duration::from_millis(30));
        let errors = each(&groups[..2], |group| group.all_gather("limits", b"").unwrap_err());
        assert!(errors.iter().all(|error| error.message().contains("rank 2") && error.kind() == ErrorKind::Peer));

        let groups = ThreadGroup::all(2, Duration::from_secs(10));
        let labels = ["capture", "drain"];
        let errors = each(&groups, |group| group.all_gather(labels[group.rank() as usize], b"").unwrap_err());
        assert!(errors.iter().all(|error| error.message().contains("capture") && error.message().contains("drain")));

        let groups = ThreadGroup::all(2, Duration::from_secs(10));
        let errors = each(&groups, |group| agree(group, "rows", [b"8", b"9"][group.rank() as usize], "help").unwrap_err());
        assert!(errors.iter().all(|error| error.message().contains("rank 0 has 8") || error.message().contains("rank 0 has 8")));
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::Invariant("RANK-1")));
    }
}
