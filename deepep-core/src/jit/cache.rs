//! Machine code on disk, shared by all processes of a user.
//!
//! An entry is a file of its own, written beside and renamed into place, so that readers see a whole entry or none. It starts with a
//! digest of the rest: a broken entry is removed and built again. No failure of the file system is an error here, not even a full disk.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

/// Marks an entry and the version of its form.
const MAGIC: &[u8; 8] = b"deepep\x00\x01";
const HEADER: usize = MAGIC.len() + 32;
/// Unfinished files older than this were left behind by a process that died.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A directory of compiled kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    directory: Option<PathBuf>,
    limit: u64,
}

impl Cache {
    /// Most bytes a cache holds, unless [`with_limit`](Self::with_limit) says otherwise.
    pub const LIMIT: u64 = 128 << 20;

    /// The user's cache: `$XDG_CACHE_HOME/deepep-core`, or `~/.cache/deepep-core`. Without either, nothing is kept.
    pub fn default_location() -> Self {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
        Self { directory: base.map(|base| base.join("deepep-core")), limit: Self::LIMIT }
    }

    /// A cache in a directory, which is made when something is put into it.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self { directory: Some(directory.into()), limit: Self::LIMIT }
    }

    /// No cache: everything is compiled each time.
    pub fn disabled() -> Self {
        Self { directory: None, limit: 0 }
    }

    /// The same cache, holding at most `bytes`. Entries that were not used for longest are removed first.
    #[must_use]
    pub fn with_limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Where entries are kept.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// An entry's image, if there is one and it is whole.
    pub(super) fn get(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.directory.as_ref()?.join(key);
        let bytes = fs::read(&path).ok()?;
        let image = image_of(&bytes).map(<[u8]>::to_vec);
        match image {
            // Used now, for the order of removal; a read-only cache stays in its order.
            Some(_) => {
                let _ = fs::File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
            }
            None => {
                let _ = fs::remove_file(&path);
            }
        }
        image
    }

    /// Keeps an image, if the file system lets it.
    pub(super) fn put(&self, key: &str, image: &[u8]) {
        let Some(directory) = &self.directory else { return };
        if image.len() as u64 + HEADER as u64 > self.limit {
            return;
        }
        static UNIQUE: AtomicU64 = AtomicU64::new(0);
        let number = UNIQUE.fetch_add(1, Ordering::Relaxed);
        let unfinished = directory.join(format!(".{}-{number}.tmp", std::process::id()));
        let done = fs::create_dir_all(directory)
            .and_then(|()| write_entry(&unfinished, image))
            .and_then(|()| fs::rename(&unfinished, directory.join(key)));
        if done.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        self.prune(directory);
    }

    /// Removes what is over the limit, oldest first, and files that nobody will finish.
    fn prune(&self, directory: &Path) {
        let Ok(entries) = fs::read_dir(directory) else { return };
        let now = SystemTime::now();
        let mut kept = Vec::new();
        for entry in entries.flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if entry.file_name().to_string_lossy().starts_with('.') {
                if now.duration_since(used).is_ok_and(|age| age > ABANDONED) {
                    let _ = fs::remove_file(entry.path());
                }
            } else if meta.is_file() {
                kept.push((used, meta.len(), entry.path()));
            }
        }
        let mut total: u64 = kept.iter().map(|(_, bytes, _)| bytes).sum();
        kept.sort();
        for (_, bytes, path) in kept {
            if total <= self.limit {
                break;
            }
            if fs::remove_file(path).is_ok() {
                total -= bytes;
            }
        }
    }
}

fn write_entry(path: &Path, image: &[u8]) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(MAGIC)?;
    file.write_all(&Sha256::digest(image))?;
    file.write_all(image)?;
    // Without this a crash of the machine may leave an empty file under the final name; the digest would find it.
    file.sync_data()
}

fn image_of(entry: &[u8]) -> Option<&[u8]> {
    let (header, image) = entry.split_at_checked(HEADER)?;
    let digest = header.strip_prefix(MAGIC)?;
    (Sha256::digest(image).as_slice() == digest).then_some(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path().join("made/on/demand"));
        (dir, cache)
    }

    #[test]
    fn keeps_and_returns() {
        let (_dir, cache) = cache();
        assert_eq!(cache.get("a"), None);
        cache.put("a", b"code");
        cache.put("b", b"");
        assert_eq!(cache.get("a").as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.get("b").as_deref(), Some(&b""[..]));
        assert_eq!(fs::read_dir(cache.directory().unwrap()).unwrap().count(), 2);
    }

    #[test]
    fn broken_entries_are_removed() {
        let (_dir, cache) = cache();
        for (i, damage) in [0usize, 9, 45, usize::MAX].into_iter().enumerate() {
            let key = format!("k{i}");
            cache.put(&key, b"machine code");
            let path = cache.directory().unwrap().join(&key);
            let mut bytes = fs::read(&path).unwrap();
            match bytes.get_mut(damage) {
                Some(byte) => *byte ^= 1,
                None => bytes.truncate(20),
            }
            fs::write(&path, bytes).unwrap();
            assert_eq!(cache.get(&key), None);
            assert!(!path.exists());
            cache.put(&key, b"machine code");
            assert!(cache.get(&key).is_some());
        }
    }

    #[test]
    fn the_oldest_goes_first() {
        let (_dir, cache) = cache();
        let cache = cache.with_limit(3 * (100 + HEADER as u64));
        for (age, key) in [(30, "a"), (20, "b"), (10, "c")] {
            cache.put(key, &[0; 100]);
            let file = fs::File::open(cache.directory().unwrap().join(key)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        }
        assert!(cache.get("a").is_some()); // used again
        cache.put("d", &[0; 100]);
        assert!(cache.get("b").is_none());
        for key in ["a", "c", "d"] {
            assert!(cache.get(key).is_some(), "{key}");
        }
        cache.put("large", &[0; 4000]);
        assert!(cache.get("large").is_none());
    }

    #[test]
    fn a_file_system_that_refuses_costs_nothing_but_time() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"in the way").unwrap();
        let cache = Cache::at(file.join("below a file"));
        cache.put("a", b"code");
        assert_eq!(cache.get("a"), None);
        // Every write to this device fails as on a full disk.
        assert_eq!(
            fs::OpenOptions::new()
                .write(true)
                .open("/dev/full")
                .and_then(|mut f| f.write_all(b"x"))
                .unwrap_err()
                .kind(),
            io::ErrorKind::StorageFull
        );
        Cache::disabled().put("a", b"code");
        assert_eq!(Cache::disabled().get("a"), None);
    }

    #[test]
    fn abandoned_files_are_cleared() {
        let (_dir, cache) = cache();
        cache.put("a", b"code");
        let directory = cache.directory().unwrap();
        let (old, young) = (directory.join(".1-0.tmp"), directory.join(".2-0.tmp"));
        for path in [&old, &young] {
            fs::write(path, b"half").unwrap();
        }
        let two_hours = Duration::from_secs(7200);
        fs::File::open(&old).unwrap().set_modified(SystemTime::now() - two_hours).unwrap();
        cache.put("b", b"code");
        assert!(!old.exists() && young.exists());
    }
}
