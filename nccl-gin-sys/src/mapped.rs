//! Which NCCLs are mapped into this process.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The different NCCL files that are mapped into this process, by name (`libnccl.so`, with or without a version).
pub(crate) fn libraries() -> Vec<PathBuf> {
    // Without /proc there is nothing to be found out, and the dynamic linker's own answer has to do.
    find_libraries(&std::fs::read_to_string("/proc/self/maps").unwrap_or_default())
}

/// The file that is mapped at an address of this process.
pub(crate) fn file_at(address: usize) -> Option<PathBuf> {
    if address == 0 {
        return None;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    lines(&maps).find_map(|(range, path)| range.contains(&address).then(|| path.into()))
}

/// Whether two paths are of one file.
pub(crate) fn same_file(one: &Path, other: &Path) -> bool {
    if one == other {
        return true;
    }
    match (std::fs::metadata(one), std::fs::metadata(other)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}

/// The mappings of files in a table such as `/proc/self/maps`.
fn lines(maps: &str) -> impl Iterator<Item = (std::ops::Range<usize>, &str)> {
    maps.lines().filter_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        Some((range, line.get(line.find('/')?..)?))
    })
}

fn find_libraries(maps: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for (_, path) in lines(maps) {
        let name = path.rsplit('/').next().unwrap_or_default();
        let ours = name
            .strip_prefix("libnccl.so")
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ' ']));
        let path = Path::new(path);
        if ours && !found.iter().any(|seen| same_file(seen, path)) {
            found.push(path.into());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f00-7f80 r--p 00000000 00:00 0
7f80-8000 r--p 00000000 08:01 42   /x/libnccl.so.2
8000-8100 r-xp 00001000 08:01 42   /x/libnccl.so.2
8100-8200 r-xp 00001000 08:01 43   /x/libnccl-net.so
8200-8300 r-xp 00001000 08:01 44   /x/libnccl.so.backup/other
8300-8400 r-xp 00001000 08:01 45   /y z/libnccl.so.2.28.9
8400-8500 r-xp 00001000 08:01 46   /w/libnccl.so.2 (deleted)
";

    #[test]
    fn libraries_are_found_by_name_and_once() {
        let found = find_libraries(MAPS);
        assert_eq!(
            found,
            ["/x/libnccl.so.2", "/y z/libnccl.so.2.28.9", "/w/libnccl.so.2 (deleted)"].map(PathBuf::from)
        );
    }

    #[test]
    fn an_address_is_found() {
        let here = file_at(file_at as *const () as usize).expect("the test's own executable is mapped");
        assert!(same_file(&here, &std::env::current_exe().unwrap()));
        assert_eq!(file_at(0), None);
    }

    #[test]
    fn links_to_a_file_are_that_file() {
        let exe = std::env::current_exe().unwrap();
        assert!(same_file(&exe, Path::new("/proc/self/exe")));
        assert!(!same_file(&exe, Path::new("/proc/self/maps")));
        assert!(!same_file(&exe, Path::new("/nonexistent")));
    }
}
