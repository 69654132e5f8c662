//! What a build is asked for: architectures and numbers of ranks, from the environment.

use std::env;

use crate::layout::MAX_RANKS;

/// Architectures to compile for. Set but empty: none, and no nvcc is needed.
const ARCHS: (&str, &str) = ("DEEPEP_AOT_ARCHS", "sm_90a,sm_100a");
/// Numbers of ranks to compile for.
const RANKS: (&str, &str) = ("DEEPEP_AOT_RANKS", "1,2,3,4,5,6,7,8");

/// Which kernels to embed.
pub(crate) struct Request {
    /// As nvcc names them.
    pub(crate) archs: Vec<String>,
    pub(crate) ranks: Vec<usize>,
}

impl Request {
    pub(crate) fn from_environment() -> Result<Self, String> {
        // The documentation is built where there is no compiler, and needs no kernels.
        println!("cargo::rerun-if-env-changed=DOCS_RS");
        let documentation = env::var_os("DOCS_RS").is_some();
        let archs = if documentation { Vec::new() } else { list(ARCHS)? };
        if let Some(bad) = archs.iter().find(|arch| !is_arch(arch)) {
            let need = "architectures are sm_90a and later, with the a: sm_100a, sm_103a, sm_120a";
            return Err(format!("{} names {bad:?}; {need}", ARCHS.0));
        }
        let ranks = list(RANKS)?
            .iter()
            .map(|text| {
                let number = text.parse().ok().filter(|n| (1..=MAX_RANKS).contains(n));
                number.ok_or(format!("{} names {text:?}; numbers of ranks are 1 to {MAX_RANKS}", RANKS.0))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { archs, ranks })
    }
}

/// The entries of a comma-separated variable, each once.
fn list((name, default): (&str, &str)) -> Result<Vec<String>, String> {
    println!("cargo::rerun-if-env-changed={name}");
    let text = match env::var(name) {
        Ok(text) => text,
        Err(env::VarError::NotPresent) => default.to_owned(),
        Err(env::VarError::NotUnicode(text)) => return Err(format!("{name} is not UTF-8: {text:?}")),
    };
    let mut all = Vec::new();
    for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        if !all.iter().any(|known| known == entry) {
            all.push(entry.to_owned());
        }
    }
    Ok(all)
}

/// Exactly one architecture from Hopper on, as the crate asks for it at run time. It becomes an option of nvcc and a file's name.
fn is_arch(text: &str) -> bool {
    let number = text.strip_prefix("sm_").and_then(|rest| rest.strip_suffix('a'));
    number.is_some_and(|digits| digits.len() <= 3 && digits.parse().is_ok_and(|n: u32| n >= 90))
}
