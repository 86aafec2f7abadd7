//! Context parallelism on the host: the ranks of a group, and how they find each other's memory.
//!
//! A [`Group`] is who takes part; it gathers small messages before the first step and never during one. [`connect`] exchanges
//! the handles of the peer slabs, so that every rank's ledger holds the words of all. What the devices then do by themselves is
//! in `kernels::exchange`; docs/cp.md has the protocol and its proof.

mod connect;
mod door;
mod fingerprint;
mod group;
mod launch;
mod rendezvous;
mod tcp;
mod threads;

pub use connect::{connect, end_group, pretend_connected};
pub use fingerprint::{agree_on_chain, fingerprint, normalised};
pub use group::{Group, agree};
pub use launch::Launched;
pub use rendezvous::Rendezvous;
pub use tcp::TcpGroup;
pub use threads::ThreadGroup;
