//! The headers that belong to the loaded library.

use crate::error::{HeadersError, Tried};
use crate::{Origin, Version};
use std::path::{Path, PathBuf};

/// Finds the folder of the headers of `version` beside the library at `origin`.
pub(crate) fn find(origin: &Origin, version: Version) -> Result<PathBuf, HeadersError> {
    let mut tried = Vec::new();
    if let Origin::File(library) = origin {
        for folder in candidates(library) {
            match check(&folder, version) {
                Ok(()) => return Ok(folder),
                Err(reason) => tried.push(Tried { name: folder.display().to_string(), reason }),
            }
        }
    }
    Err(HeadersError { version, origin: origin.clone(), tried })
}

/// Folders where headers lie, by the library's place: `…/nccl/lib` → `…/nccl/include` (wheels, NVIDIA's archives, conda),
/// `/usr/lib/<architecture>` and `/usr/lib64` → `/usr/include` (distributions), a build folder → its `include`.
fn candidates(library: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    // Where a link leads to other headers than the link's own place, those of the place that was named come first.
    for file in [Some(library.to_owned()), library.canonicalize().ok()].into_iter().flatten() {
        let Some(folder) = file.parent() else { continue };
        for above in folder.ancestors().skip(1).take(2).chain([folder]) {
            let candidate = above.join("include");
            if !folders.contains(&candidate) {
                folders.push(candidate);
            }
        }
    }
    folders
}

/// Whether `folder` holds the headers of exactly this version.
fn check(folder: &Path, version: Version) -> Result<(), String> {
    let text = std::fs::read_to_string(folder.join("nccl.h")).map_err(|error| format!("nccl.h: {error}"))?;
    let found = declared(&text).ok_or_else(|| "its nccl.h does not tell its version".to_owned())?;
    if found != version {
        return Err(format!("its nccl.h is that of NCCL {found}"));
    }
    if !folder.join("nccl_device.h").is_file() {
        return Err("it has no nccl_device.h".into());
    }
    Ok(())
}

/// `NCCL_VERSION_CODE` of a header's text.
fn declared(text: &str) -> Option<Version> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        if words.next() != Some("#define") || words.next() != Some("NCCL_VERSION_CODE") {
            return None;
        }
        words.next()?.parse().ok().map(Version::from_code)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const VERSION: Version = Version::from_code(23203);

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("nccl-headers-{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn put(&self, path: &str, text: &str) {
            let file = self.0.join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }

        fn headers(&self, folder: &str, code: u32) {
            self.put(
                &format!("{folder}/nccl.h"),
                &format!("#define NCCL_MAJOR 2\n#define NCCL_VERSION_CODE {code}\n"),
            );
            self.put(&format!("{folder}/nccl_device.h"), "");
        }

        fn find(&self, library: &str) -> Result<PathBuf, HeadersError> {
            find(&Origin::File(self.0.join(library)), VERSION)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    #[test]
    fn wheels_and_distributions_are_found() {
        let folder = Folder::new("layouts");
        folder.headers("nvidia/nccl/include", 23203);
        assert_eq!(folder.find("nvidia/nccl/lib/libnccl.so.2"), Ok(folder.0.join("nvidia/nccl/include")));
        folder.headers("usr/include", 23203);
        assert_eq!(folder.find("usr/lib/x86_64-linux-gnu/libnccl.so.2"), Ok(folder.0.join("usr/include")));
        assert_eq!(folder.find("usr/lib64/libnccl.so.2.32.3"), Ok(folder.0.join("usr/include")));
    }

    #[test]
    fn a_link_is_followed() {
        let folder = Folder::new("link");
        folder.headers("real/include", 23203);
        folder.put("real/lib/libnccl.so.2", "");
        fs::create_dir_all(folder.0.join("links")).unwrap();
        std::os::unix::fs::symlink(
            folder.0.join("real/lib/libnccl.so.2"),
            folder.0.join("links/libnccl.so.2"),
        )
        .unwrap();
        let found = folder.find("links/libnccl.so.2").unwrap();
        assert_eq!(found.canonicalize().unwrap(), folder.0.join("real/include").canonicalize().unwrap());
    }

    #[test]
    fn headers_of_another_version_are_refused_by_name() {
        let folder = Folder::new("other");
        folder.headers("include", 22809);
        let error = folder.find("lib/libnccl.so.2").unwrap_err();
        assert!(error.to_string().contains("its nccl.h is that of NCCL 2.28.9"), "{error}");
        folder.put("include/nccl.h", "#define NCCL_VERSION_CODE 23203\n");
        fs::remove_file(folder.0.join("include/nccl_device.h")).unwrap();
        let error = folder.find("lib/libnccl.so.2").unwrap_err();
        assert!(error.to_string().contains("it has no nccl_device.h"), "{error}");
        let error = find(&Origin::Custom, VERSION).unwrap_err();
        assert!(error.tried.is_empty() && error.to_string().contains("a custom loader"), "{error}");
    }
}
