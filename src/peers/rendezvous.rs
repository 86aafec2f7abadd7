//! Where the ranks of a group meet: the variables that torchrun, mpirun, srun and `capstan launch` set.

use std::fmt;

use crate::error::{Error, Result};

/// Port of rank 0 unless `MASTER_PORT` says otherwise.
const PORT: u16 = 29_517;

/// A process's place in its group, and where the group meets.
#[derive(Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub world: u32,
    /// Rank among those of this host: the device to open.
    pub local_rank: u32,
    /// Host of rank 0. Loopback unless told otherwise.
    pub address: String,
    /// Port of rank 0.
    pub port: u16,
    /// What every rank must bring.
    pub secret: String,
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rendezvous { rank, world, address, port, .. } = self;
        write!(f, "rank {rank} of {world} at {address}:{port}")
    }
}

impl Rendezvous {
    /// Reads the environment; `None` if it names no group.
    ///
    /// Errors: a variable that is no number or contradicts another; no secret.
    pub fn from_env() -> Result<Option<Rendezvous>> {
        Rendezvous::read(|name| std::env::var(name).ok())
    }

    /// Holds a world size that was asked for against that of the group; 1 asks for none.
    ///
    /// Errors: they differ.
    pub fn check_world(&self, asked: u32) -> Result<()> {
        if asked == 1 || asked == self.world {
            return Ok(());
        }
        Err(Error::config(format!("--world {asked}, but this process was started as rank {} of {}", self.rank, self.world))
            .help("leave --world out: WORLD_SIZE says it"))
    }

    fn read(get: impl Fn(&str) -> Option<String>) -> Result<Option<Rendezvous>> {
        // torchrun and `capstan launch`; Open MPI; Slurm.
        let rank = ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"];
        let world = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"];
        let local = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"];
        let number = |names: [&'static str; 3]| -> Result<Option<u32>> {
            let Some((name, text)) = names.into_iter().find_map(|name| Some((name, get(name)?))) else { return Ok(None) };
            let parsed = text.trim().parse();
            parsed
                .map(Some)
                .map_err(|_| Error::config(format!("{name} = {text:?} is no number")).help("unset it, or set it right"))
        };
        let (rank, world) = match (number(rank)?, number(world)?) {
            (None, None) => return Ok(None),
            (Some(rank), Some(world)) => (rank, world),
            _ => {
                return Err(Error::config("one of RANK and WORLD_SIZE is set, the other is not")
                    .help("set both, or run under `capstan launch`, torchrun, mpirun or srun"));
            }
        };
        if rank >= world {
            return Err(Error::config(format!("RANK = {rank}: expected below WORLD_SIZE = {world}")).help("ranks count from 0"));
        }
        let port = match get("MASTER_PORT") {
            None => PORT,
            Some(text) => match text.parse() {
                Ok(port) if port > 0 => port,
                _ => return Err(Error::config(format!("MASTER_PORT = {text:?} is no port")).help("set it to 1 to 65535")),
            },
        };
        let secret = get("CAPSTAN_SECRET").filter(|secret| !secret.is_empty()).ok_or_else(|| {
            Error::config("CAPSTAN_SECRET is not set: nobody could tell a rank from a stranger")
                .help("set it to one random text on every rank; `capstan launch` does")
        })?;
        let address = get("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".into());
        Ok(Some(Rendezvous { rank, world, local_rank: number(local)?.unwrap_or(rank), address, port, secret }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Option<Rendezvous>> {
        Rendezvous::read(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn launchers_are_understood_and_bad_values_named() {
        assert_eq!(read(&[]).unwrap(), None);
        let torch = read(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "99"), ("CAPSTAN_SECRET", "s")]).unwrap().unwrap();
        assert_eq!((torch.rank, torch.world, torch.local_rank, &*torch.address, torch.port), (1, 2, 1, "127.0.0.1", 99));
        assert!(!format!("{torch:?}").contains('s'), "the secret is not shown");
        let mpi = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
        let mpi = read(&[&mpi[..], &[("CAPSTAN_SECRET", "s")]].concat()).unwrap().unwrap();
        assert_eq!((mpi.rank, mpi.world, mpi.local_rank), (3, 4, 1));
        for (key, bad) in [
            ("WORLD_SIZE", vec![("RANK", "0")]),
            ("RANK", vec![("RANK", "x"), ("WORLD_SIZE", "2")]),
            ("RANK = 2", vec![("RANK", "2"), ("WORLD_SIZE", "2")]),
            ("MASTER_PORT", vec![("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "70000")]),
            ("MASTER_PORT", vec![("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "0")]),
            ("CAPSTAN_SECRET", vec![("RANK", "0"), ("WORLD_SIZE", "2")]),
        ] {
            let error = read(&bad).unwrap_err();
            assert!(error.message().contains(key) && error.help_line().is_some(), "{error}");
        }
    }
}
