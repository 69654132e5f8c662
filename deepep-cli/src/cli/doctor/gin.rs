//! GIN: whether NCCL's kernels can reach other hosts, by which backend, and how to get one.

use std::path::{Path, PathBuf};

use nccl_gin::sys::Version;
use nccl_gin::{GinType, Support};

use super::Finding;

const AREA: &str = "GIN";
/// The plugin of this project that needs no network card.
const SOFT: &str = "libnccl_gin_soft.so";
/// The first NCCL that has GIN plugins as that one is.
const OLDEST: Version = Version::from_code(22907);
/// The first NCCL that takes the plugin by its newer name.
const RMA: Version = Version::from_code(23005);

/// Says what is there. `support` is what a communicator told, if there could be one.
pub(super) fn check(version: Version, support: Option<&Support>, findings: &mut Vec<Finding>) {
    let environment = |name: &str| std::env::var(name).ok();
    let beside = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.join(SOFT)));
    let plugin = Plugin::new(version, environment, beside.filter(|path| path.is_file()));
    let Some(support) = support else {
        findings.push(Finding::info(AREA, "plugin", plugin.describe()));
        return;
    };
    for (what, gin) in [("to every rank", support.gin), ("along rails", support.railed_gin)] {
        findings.push(match gin {
            Some(kind) => Finding::yes(AREA, what, plugin.backend(kind)),
            None => Finding::no(AREA, what, "none", plugin.remedy()),
        });
    }
}

/// The plugin that the environment names for the loaded NCCL, and the one that could be named.
struct Plugin {
    version: Version,
    variable: &'static str,
    named: Option<PathBuf>,
    beside: Option<PathBuf>,
}

impl Plugin {
    fn new(version: Version, environment: impl Fn(&str) -> Option<String>, beside: Option<PathBuf>) -> Self {
        let variable = if version >= RMA { "NCCL_RMA_PLUGIN" } else { "NCCL_GIN_PLUGIN" };
        let named = environment(variable).filter(|name| !name.is_empty()).map(PathBuf::from);
        Self { version, variable, named, beside }
    }

    fn describe(&self) -> String {
        match &self.named {
            Some(path) => format!("{}={}", self.variable, path.display()),
            None => format!("{} is not set", self.variable),
        }
    }

    fn backend(&self, kind: GinType) -> String {
        match (&self.named, kind) {
            (Some(path), GinType::Proxy) if is_soft(path) => {
                format!("{kind}, by nccl-gin-soft ({}): for tests, not for speed", self.describe())
            }
            (Some(_), GinType::Proxy) => format!("{kind}, with {}", self.describe()),
            _ => format!("{kind}, by NCCL itself"),
        }
    }

    fn remedy(&self) -> String {
        if self.version < OLDEST {
            return format!(
                "needed between hosts only: an RDMA network card; NCCL {OLDEST} and newer also take nccl-gin-soft, which needs none"
            );
        }
        match (&self.named, &self.beside) {
            (Some(path), _) if path.is_absolute() && !path.is_file() => {
                format!("{} names a file that is not there", self.variable)
            }
            (Some(_), _) => format!(
                "NCCL has not taken {}: NCCL_DEBUG=INFO says why; the GPU must have \"GPUDirect RDMA\" above, and NCCL_GIN_ENABLE must not be 0",
                self.describe()
            ),
            (None, Some(path)) => format!(
                "needed between hosts only: an RDMA network card, or, for tests without one, {}={}",
                self.variable,
                path.display()
            ),
            (None, None) => format!(
                "needed between hosts only: an RDMA network card, or, for tests without one, nccl-gin-soft: \
                 cargo build --release -p nccl-gin-soft --lib, and {} set to the path of {SOFT}",
                self.variable
            ),
        }
    }
}

fn is_soft(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == SOFT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(version: u32, named: Option<&str>, beside: Option<&str>) -> Plugin {
        let named = named.map(str::to_owned);
        Plugin::new(Version::from_code(version), |_| named.clone(), beside.map(PathBuf::from))
    }

    #[test]
    fn the_backend_is_named() {
        let soft = plugin(23203, Some("/opt/lib/libnccl_gin_soft.so"), None);
        assert!(soft.backend(GinType::Proxy).contains("by nccl-gin-soft (NCCL_RMA_PLUGIN=/opt/lib/"));
        assert!(soft.backend(GinType::Gdaki).contains("by NCCL itself"));
        let other = plugin(22907, Some("libnccl-gin-other.so"), None);
        assert_eq!(other.backend(GinType::Proxy), "proxy, with NCCL_GIN_PLUGIN=libnccl-gin-other.so");
        assert_eq!(plugin(23203, None, None).backend(GinType::Proxy), "proxy, by NCCL itself");
    }

    #[test]
    fn every_remedy_says_what_to_do_next() {
        let remedy = |version, named, beside| plugin(version, named, beside).remedy();
        assert!(remedy(23203, None, None).contains("NCCL_RMA_PLUGIN set to the path of libnccl_gin_soft.so"));
        assert!(remedy(22907, None, None).contains("NCCL_GIN_PLUGIN set to the path"));
        assert!(remedy(23203, None, Some("/opt/libnccl_gin_soft.so")).contains("NCCL_RMA_PLUGIN=/opt/"));
        assert!(remedy(23203, Some("/none/such.so"), None).contains("not there"));
        assert!(remedy(23203, Some("such.so"), None).contains("NCCL_DEBUG=INFO"));
        assert!(remedy(22809, None, None).contains("NCCL 2.29.7 and newer"));
    }

    #[test]
    fn an_empty_variable_names_nothing() {
        assert_eq!(plugin(23203, Some(""), None).describe(), "NCCL_RMA_PLUGIN is not set");
    }
}
