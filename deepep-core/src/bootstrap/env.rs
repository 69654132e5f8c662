//! Which rank a process is, as its launcher says it.

use std::env;

use crate::error::{Error, Result};

/// A process's place in its group, and where the group meets.
///
/// | launcher | rank | world size | on this host | address | port |
/// |---|---|---|---|---|---|
/// | torchrun and by hand | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` | `MASTER_ADDR` | `MASTER_PORT` |
/// | Slurm | `SLURM_PROCID` | `SLURM_NTASKS` | `SLURM_LOCALID` | first host of `SLURM_STEP_NODELIST` | from the job id |
/// | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` | `127.0.0.1` on one host | from the job id |
///
/// `MASTER_ADDR` and `MASTER_PORT` win where a launcher's own value would be used, and `DEEPEP_MASTER_PORT` wins over both:
/// torchrun's own store occupies `MASTER_PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process's rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// This process's number among those of its host, where the launcher says it.
    pub local_rank: Option<usize>,
    /// Host name or address of rank 0.
    pub master_addr: String,
    /// Port that rank 0 listens on.
    pub master_port: u16,
}

impl Launch {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// [`Environment`](Error::Environment) if no launcher's variables are set, some are missing, or a value makes no sense.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(|name| env::var(name).ok())
    }

    /// As [`from_env`](Self::from_env), with another source of variables.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let vars = Vars(&lookup);
        let launch = if vars.has("RANK") || vars.has("WORLD_SIZE") {
            Self {
                rank: vars.number("RANK")?,
                world_size: vars.number("WORLD_SIZE")?,
                local_rank: vars.optional("LOCAL_RANK")?,
                master_addr: vars.text("MASTER_ADDR")?,
                master_port: vars.port(None)?,
            }
        } else if vars.has("SLURM_PROCID") {
            let size = if vars.has("SLURM_STEP_NUM_TASKS") { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
            let nodes =
                if vars.has("SLURM_STEP_NODELIST") { "SLURM_STEP_NODELIST" } else { "SLURM_NODELIST" };
            Self {
                rank: vars.number("SLURM_PROCID")?,
                world_size: vars.number(size)?,
                local_rank: vars.optional("SLURM_LOCALID")?,
                master_addr: match vars.get("MASTER_ADDR") {
                    Some(address) => address,
                    None => first_host(&vars.text(nodes)?)?,
                },
                master_port: vars.port(vars.get("SLURM_JOB_ID").map(|id| derived_port(&id)))?,
            }
        } else if vars.has("OMPI_COMM_WORLD_RANK") {
            let world_size = vars.number("OMPI_COMM_WORLD_SIZE")?;
            let one_host = vars.optional("OMPI_COMM_WORLD_LOCAL_SIZE")? == Some(world_size);
            let job = vars.get("PMIX_NAMESPACE").or_else(|| vars.get("OMPI_MCA_ess_base_jobid"));
            Self {
                rank: vars.number("OMPI_COMM_WORLD_RANK")?,
                world_size,
                local_rank: vars.optional("OMPI_COMM_WORLD_LOCAL_RANK")?,
                master_addr: match vars.get("MASTER_ADDR") {
                    Some(address) => address,
                    None if one_host => "127.0.0.1".into(),
                    None => return Err(missing("MASTER_ADDR (the ranks are on several hosts)")),
                },
                master_port: vars.port(job.map(|id| derived_port(&id)))?,
            }
        } else {
            return Err(missing(
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or Slurm's or Open MPI's variables",
            ));
        };
        launch.check()?;
        Ok(launch)
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.rank >= self.world_size {
            let problem = format!("rank {} is not below the world size {}", self.rank, self.world_size);
            return Err(Error::Environment { problem });
        }
        Ok(())
    }
}

struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn text(&self, name: &str) -> Result<String> {
        self.get(name).ok_or_else(|| missing(name))
    }

    fn number(&self, name: &str) -> Result<usize> {
        self.optional(name)?.ok_or_else(|| missing(name))
    }

    fn optional(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(Error::Environment { problem: format!("{name} = {value:?} is not a number") }),
        }
    }

    fn port(&self, derived: Option<u16>) -> Result<u16> {
        let name = ["DEEPEP_MASTER_PORT", "MASTER_PORT"].into_iter().find(|name| self.has(name));
        match (name, derived) {
            (Some(name), _) => {
                let value = self.text(name)?;
                value
                    .parse()
                    .map_err(|_| Error::Environment { problem: format!("{name} = {value:?} is not a port") })
            }
            (None, Some(port)) => Ok(port),
            (None, None) => Err(missing("MASTER_PORT")),
        }
    }
}

fn missing(what: &str) -> Error {
    Error::Environment { problem: format!("not set: {what}") }
}

/// The same port for every process of a job, and probably another one for another job: FNV-1a over the job's name, in
/// 20000..28192, below the range that Linux hands out by itself.
fn derived_port(job: &str) -> u16 {
    let hash = job.bytes().fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
    20000 + (hash % 8192) as u16
}

/// The first host of a Slurm host list such as `gpu[03-07,12],login1`.
fn first_host(list: &str) -> Result<String> {
    let problem = || Error::Environment { problem: format!("can't read the host list {list:?}") };
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let host = match rest.strip_prefix('[') {
        None => name.to_owned(),
        Some(ranges) => {
            let (inside, after) = ranges.split_once(']').ok_or_else(problem)?;
            let first = inside.split([',', '-']).next().unwrap_or_default();
            let suffix = after.split(',').next().unwrap_or_default();
            if first.is_empty() || suffix.contains('[') {
                return Err(problem());
            }
            format!("{name}{first}{suffix}")
        }
    };
    if host.is_empty() { Err(problem()) } else { Ok(host) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(vars: &[(&str, &str)]) -> Result<Launch> {
        Launch::from_lookup(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn torchrun() {
        let vars = [
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "h"),
            ("MASTER_PORT", "29500"),
        ];
        let expected = Launch {
            rank: 3,
            world_size: 8,
            local_rank: Some(1),
            master_addr: "h".into(),
            master_port: 29500,
        };
        assert_eq!(launch(&vars).unwrap(), expected);
        let mut own_port = vars.to_vec();
        own_port.push(("DEEPEP_MASTER_PORT", "4000"));
        assert_eq!(launch(&own_port).unwrap().master_port, 4000);
        for missing in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            let rest: Vec<_> = vars.into_iter().filter(|(name, _)| *name != missing).collect();
            let error = launch(&rest).unwrap_err().to_string();
            assert!(error.contains(missing), "{error}");
        }
    }

    #[test]
    fn slurm() {
        let vars = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_NODELIST", "gpu[03-07,12],x"),
        ];
        let found = launch(&vars).unwrap();
        assert_eq!((found.rank, found.world_size, found.master_addr.as_str()), (5, 16, "gpu03"));
        assert!((20000..28192).contains(&found.master_port));
        assert_eq!(found.master_port, launch(&vars).unwrap().master_port);
    }

    #[test]
    fn open_mpi() {
        let one_host = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "prterun-a-1"),
        ];
        assert_eq!(launch(&one_host).unwrap().master_addr, "127.0.0.1");
        let error = launch(&one_host[..2]).unwrap_err().to_string();
        assert!(error.contains("MASTER_ADDR"), "{error}");
    }

    #[test]
    fn values_that_make_no_sense() {
        for vars in [
            [("RANK", "x"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")],
            [("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")],
            [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "70000")],
            [("RANK", "-1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")],
        ] {
            assert!(matches!(launch(&vars), Err(Error::Environment { .. })), "{vars:?}");
        }
        assert!(matches!(launch(&[]), Err(Error::Environment { .. })));
    }

    #[test]
    fn host_lists() {
        assert_eq!(first_host("a").unwrap(), "a");
        assert_eq!(first_host("a,b").unwrap(), "a");
        assert_eq!(first_host("n[1-4]").unwrap(), "n1");
        assert_eq!(first_host("n[001,005-9]-ib,z").unwrap(), "n001-ib");
        for bad in ["", "n[", "n[]", ",a", "n[1]m[2]"] {
            assert!(first_host(bad).is_err(), "{bad}");
        }
    }
}
