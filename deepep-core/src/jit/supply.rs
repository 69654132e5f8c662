//! Where machine code comes from: this build, the cache, or NVRTC.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use once_cell::sync::OnceCell;

use super::{Arch, Cache, Compiler, Cubin, Embedded, JitError, Program};

/// Gives machine code for programs: what was compiled into this build (see [`Embedded`]), or else what the cache holds or NVRTC compiles. NVRTC is
/// looked for when it is first needed.
#[derive(Debug)]
pub struct Supply {
    nvrtc: Option<PathBuf>,
    cache: Cache,
    compiler: OnceCell<Compiler>,
    /// Tests compile kernels with a mistake in them: what becomes of each header.
    #[cfg(test)]
    alter: Option<Alter>,
    /// For drivers that run nothing.
    #[cfg(test)]
    blank: bool,
}

/// A header's name and text, or `kernel.cu` and the kernel's, to the new text.
#[cfg(test)]
pub(crate) type Alter = fn(&str, String) -> String;

impl Supply {
    /// A supply that uses this NVRTC, or the one that [`Compiler::find`] finds, and this cache.
    #[must_use]
    pub fn new(nvrtc: Option<PathBuf>, cache: Cache) -> Self {
        Self {
            nvrtc,
            cache,
            compiler: OnceCell::new(),
            #[cfg(test)]
            alter: None,
            #[cfg(test)]
            blank: false,
        }
    }

    /// Gives empty machine code, and compiles nothing.
    #[cfg(test)]
    pub(crate) fn blank_if(mut self, blank: bool) -> Self {
        self.blank = blank;
        self
    }

    #[cfg(test)]
    pub(crate) fn altered(mut self, alter: Option<Alter>) -> Self {
        self.alter = alter;
        self
    }

    #[cfg(test)]
    pub(crate) fn is_altered(&self) -> bool {
        self.alter.is_some()
    }

    /// Machine code of a program.
    ///
    /// # Errors
    /// Those of [`Compiler::find`] and [`Compiler::compile`], for a program that is not embedded. With the feature `aot` the former are inside
    /// [`JitError::NotEmbedded`].
    pub fn get(&self, program: Program, arch: Arch) -> Result<Cubin, JitError> {
        #[cfg(test)]
        if self.blank {
            return Ok(Cubin::from_embedded(&[]));
        }
        #[cfg(test)]
        if let Some(alter) = self.alter {
            let compiler = self.compiler.get_or_try_init(|| Compiler::find(self.nvrtc.as_deref()))?;
            return compiler.compile_altered(program, arch, alter, &self.cache);
        }
        if let Some(kernel) = Embedded::find(program, arch) {
            return Ok(kernel.cubin());
        }
        let compiler = self.compiler.get_or_try_init(|| Compiler::find(self.nvrtc.as_deref()));
        let compiler = compiler.map_err(|error| match cfg!(feature = "aot") {
            true => JitError::NotEmbedded {
                program: format!("{program:?}"),
                arch: arch.to_string(),
                embedded: Embedded::summary(),
                compiler: Box::new(error),
            },
            false => error,
        })?;
        compiler.compile_cached(program, arch, &self.cache)
    }

    /// Machine code of several programs, made side by side. If `parties` of them ask for the same programs at the same time, each starts at another
    /// one, and finds in the cache what the others have made.
    ///
    /// # Errors
    /// As [`get`](Self::get), the first that happens.
    pub(crate) fn get_all(
        &self,
        programs: &[Program],
        arch: Arch,
        party: usize,
        parties: usize,
    ) -> Result<Vec<(Program, Cubin)>, JitError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = (cores / parties.max(1)).clamp(1, programs.len().max(1));
        let (first, taken) = (programs.len() * party / parties.max(1), AtomicUsize::new(0));
        let done = Mutex::new(Ok(Vec::with_capacity(programs.len())));
        let work = || {
            loop {
                let turn = taken.fetch_add(1, Ordering::Relaxed);
                if turn >= programs.len() {
                    return;
                }
                let program = programs[(first + turn) % programs.len()];
                let made = self.get(program, arch);
                let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                match (&mut *done, made) {
                    (Ok(all), Ok(cubin)) => all.push((program, cubin)),
                    (Ok(_), Err(error)) => *done = Err(error),
                    (Err(_), _) => return,
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..workers {
                scope.spawn(work);
            }
            work();
        });
        done.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a compiler the error is the compiler's, once, however many programs and workers there are.
    #[test]
    fn a_missing_compiler_is_one_error() {
        let supply = Supply::new(Some(PathBuf::from("/absent/libnvrtc.so")), Cache::disabled());
        let programs = Program::all(2);
        let arch = Arch::new(1, 0);
        // Where kernels are embedded, the error names the program, too.
        let expected: Vec<_> =
            programs.iter().map(|&program| supply.get(program, arch).unwrap_err().to_string()).collect();
        for (party, parties) in [(0, 1), (1, 2), (6, 7)] {
            let error = supply.get_all(&programs, arch, party, parties).unwrap_err().to_string();
            assert!(expected.contains(&error), "{error}");
        }
        assert!(supply.get_all(&[], arch, 0, 1).unwrap().is_empty());
    }

    #[test]
    fn kernels_made_side_by_side_are_the_same() {
        let supply = Supply::new(None, Cache::disabled());
        let arch = Arch::new(9, 0);
        let programs: Vec<_> = (1..=4).map(|ranks| Program::Barrier { ranks }).collect();
        let made = match supply.get_all(&programs, arch, 1, 2) {
            Ok(made) => made,
            Err(error @ (JitError::NotFound { .. } | JitError::NotEmbedded { .. })) => {
                use std::io::Write as _;
                // Past the test runner's capture of what passing tests print.
                writeln!(std::io::stderr(), "skipped: kernels_made_side_by_side_are_the_same: {error}").ok();
                return;
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(made.len(), programs.len());
        for (program, cubin) in made {
            assert_eq!(cubin.image(), supply.get(program, arch).unwrap().image(), "{program:?}");
        }
    }
}
