//! Where machine code comes from: this build, the cache, or NVRTC.

use std::path::PathBuf;

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
}

/// A header's name and text to its new text.
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
        }
    }

    #[cfg(test)]
    pub(crate) fn altered(mut self, alter: Option<Alter>) -> Self {
        self.alter = alter;
        self
    }

    /// Machine code of a program.
    ///
    /// # Errors
    /// Those of [`Compiler::find`] and [`Compiler::compile`], for a program that is not embedded. With the feature `aot` the former are inside
    /// [`JitError::NotEmbedded`].
    pub fn get(&self, program: Program, arch: Arch) -> Result<Cubin, JitError> {
        #[cfg(test)]
        if let Some(alter) = self.alter {
            return Compiler::find(self.nvrtc.as_deref())?.compile_altered(program, arch, alter);
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
}
