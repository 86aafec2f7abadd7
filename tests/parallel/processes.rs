//! Ranks of a group as processes of the `capstan` command, started as torchrun would.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A process of a group; killed if it is dropped.
pub struct Rank {
    child: Child,
    replays: Receiver<()>,
    stderr: Option<JoinHandle<String>>,
}

/// How a process ended.
pub struct Ended {
    pub code: Option<i32>,
    pub stderr: String,
    pub at: Instant,
}

/// A port that nobody listens on now.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// All ranks of a group.
pub fn start_all(world: u32, args: &[&str], timeout_ms: u32) -> Vec<Rank> {
    let port = free_port();
    (0..world).map(|rank| start(port, rank, world, args, timeout_ms)).collect()
}

/// One rank: `capstan verify --ranks processes` with these arguments.
pub fn start(port: u16, rank: u32, world: u32, args: &[&str], timeout_ms: u32) -> Rank {
    let mut child = Command::new(env!("CARGO_BIN_EXE_capstan"))
        .args(["verify", "--device", "cpu", "--ranks", "processes", "--compare-every", "5"])
        .args(["--world", &world.to_string(), "--peer-timeout-ms", &timeout_ms.to_string()])
        .args(args)
        .env("RUST_LOG", "info")
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world.to_string())
        .env("MASTER_PORT", port.to_string())
        .env("CAPSTAN_SECRET", "of this test")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program runs");
    let lines = BufReader::new(child.stderr.take().expect("it was asked for")).lines();
    let (replaying, replays) = channel();
    let stderr = std::thread::spawn(move || {
        let mut text = String::new();
        for line in lines.map_while(Result::ok) {
            if line.contains("replaying") {
                // Nobody listens in tests that do not wait for it.
                let _ = replaying.send(());
            }
            text += &line;
            text.push('\n');
        }
        text
    });
    Rank { child, replays, stderr: Some(stderr) }
}

impl Rank {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it replays.
    pub fn await_replays(&mut self) {
        if self.replays.recv_timeout(Duration::from_secs(60)).is_err() {
            self.kill();
            panic!("it never replayed: {}", self.stderr.take().unwrap().join().unwrap());
        }
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is still there");
    }

    /// Waits for its end; panics if it takes longer than `most`.
    pub fn end(self, most: Duration) -> Ended {
        end_all(vec![self], most).remove(0)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // One that has ended is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for the end of all, noting when each ended.
pub fn end_all(mut ranks: Vec<Rank>, most: Duration) -> Vec<Ended> {
    let start = Instant::now();
    let mut ends = vec![None; ranks.len()];
    while ends.iter().any(Option::is_none) {
        for (rank, end) in ranks.iter_mut().zip(&mut ends).filter(|(_, end)| end.is_none()) {
            *end = rank.child.try_wait().unwrap().map(|status| (status.code(), Instant::now()));
        }
        if start.elapsed() > most {
            ranks.iter_mut().for_each(|rank| drop(rank.child.kill()));
            let said: Vec<String> = ranks.iter_mut().map(|rank| rank.stderr.take().unwrap().join().unwrap()).collect();
            panic!("not all ranks ended: {ends:?}; they say {said:#?}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let said = ranks.iter_mut().map(|rank| rank.stderr.take().unwrap().join().unwrap());
    ends.into_iter().flatten().zip(said).map(|((code, at), stderr)| Ended { code, stderr, at }).collect()
}
