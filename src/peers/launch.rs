//! Starts the ranks of a group as processes of this host.

use std::ffi::OsStr;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// How long ranks may live after one has failed: they end by themselves, within the timeout of their steps.
const GRACE: Duration = Duration::from_secs(10);

/// The processes of a group; those still running are killed when it is dropped.
#[derive(Debug)]
pub struct Launched {
    children: Vec<(Child, Option<ExitStatus>)>,
}

impl Launched {
    /// Starts `world` processes of one command, with the variables that [`Rendezvous`](super::Rendezvous) reads: a fresh secret
    /// and a free port of the loopback.
    ///
    /// Errors: the command cannot be started, no port is free.
    pub fn start(world: u32, command: &[impl AsRef<OsStr>]) -> Result<Launched> {
        let (program, arguments) =
            command.split_first().ok_or_else(|| Error::config("no command to start").help("pass one after --"))?;
        let port = free_port()?;
        let secret = secret()?;
        let mut launched = Launched { children: Vec::with_capacity(world as usize) };
        for rank in 0..world {
            let mut command = Command::new(program);
            command
                .args(arguments)
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", world.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("CAPSTAN_SECRET", &secret);
            let child = command.spawn().map_err(|error| {
                Error::input(format!("{}: {error}", program.as_ref().display())).help("name a program that is there")
            })?;
            launched.children.push((child, None));
        }
        Ok(launched)
    }

    /// The process of a rank.
    pub fn id(&self, rank: u32) -> u32 {
        self.children[rank as usize].0.id()
    }

    /// Waits for all of them; gives how each ended. Once one has failed the others get a few seconds.
    pub fn wait(mut self) -> Result<Vec<ExitStatus>> {
        let mut failed: Option<Instant> = None;
        loop {
            for (child, status) in self.children.iter_mut().filter(|(_, status)| status.is_none()) {
                *status = child.try_wait().map_err(|error| Error::peer(format!("waiting for a rank: {error}")))?;
                if status.is_some_and(|status| !status.success()) {
                    failed.get_or_insert_with(Instant::now);
                }
            }
            if failed.is_some_and(|since| since.elapsed() > GRACE) {
                self.kill();
            }
            if let Some(all) = self.children.iter().map(|(_, status)| *status).collect() {
                return Ok(all);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn kill(&mut self) {
        for (child, status) in &mut self.children {
            if status.is_none() {
                // One that has just ended by itself is as good.
                let _ = child.kill();
                *status = child.wait().ok();
            }
        }
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_port() -> Result<u16> {
    let bound = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    bound.map(|address| address.port()).map_err(|error| Error::unavailable(format!("no port of the loopback is free: {error}")))
}

/// 128 random bits.
fn secret() -> Result<String> {
    let mut bits = [0u8; 16];
    rustix::rand::getrandom(&mut bits, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::unavailable(format!("no random bits for a secret: {error}")))?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bits)))
}
