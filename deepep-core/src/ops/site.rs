//! Where operations run, and which tensors they can use.

use cuda_vmm::Device;

use crate::config::BackendKind;
use crate::error::{Error, Result};
use crate::layout::ROW_GRANULARITY;
use crate::tensor::{Extent, Home, Space};

/// Where the operations of one buffer, or of one group of collectives, run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    kind: BackendKind,
    home: Home,
}

impl Site {
    /// `buffer` is the number of the buffer whose operations these are.
    pub(crate) fn new(kind: BackendKind, device: &Device, buffer: Option<u64>) -> Self {
        let home = match kind {
            BackendKind::Cuda => Home { space: Space::Device, device: Some(device.ordinal()), buffer },
            BackendKind::Host | BackendKind::Auto => Home { space: Space::Host, device: None, buffer },
        };
        Self { kind, home }
    }

    /// Whose memory the views of results and handles are of.
    pub(crate) fn home(&self) -> Home {
        self.home
    }

    /// Checks that the operations can use a tensor where it lies, and that it stays there until they have run.
    pub(crate) fn require(&self, tensor: &'static str, extent: &Extent) -> Result<()> {
        // A tensor without elements is never touched.
        if extent.bytes() == 0 {
            return Ok(());
        }
        if extent.space() != self.home.space {
            let (got, expected) = (extent.space().name(), self.home.space.name());
            return Err(Error::Memory { tensor, got, expected, backend: self.kind.name() });
        }
        require_device(tensor, extent, self.home.device)?;
        match extent.buffer() {
            Some(owner) if self.home.buffer != Some(owner) => {
                Err(Error::ForeignView { tensor, owner, buffer: self.home.buffer })
            }
            _ => Ok(()),
        }
    }

    /// As [`require`](Self::require), for rows that kernels move in bulk.
    pub(crate) fn require_rows(&self, tensor: &'static str, extent: &Extent) -> Result<()> {
        self.require(tensor, extent)?;
        let granularity = ROW_GRANULARITY as u64;
        if self.kind != BackendKind::Cuda
            || extent.bytes() == 0
            || extent.address().is_multiple_of(granularity)
        {
            return Ok(());
        }
        let problem = format!(
            "starts at {:#x}; rows on a GPU start at multiples of {granularity} bytes",
            extent.address()
        );
        Err(Error::Tensor { tensor, problem })
    }
}

/// Checks the device of a tensor, where it is known.
pub(crate) fn require_device(tensor: &'static str, extent: &Extent, expected: Option<i32>) -> Result<()> {
    match (extent.device(), expected) {
        (Some(got), Some(expected)) if got != expected => Err(Error::OtherDevice { tensor, got, expected }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use cuda_vmm::Cuda;
    use cuda_vmm_emu::{Config, Emulator};

    use super::*;
    use crate::device::DeviceMemory;
    use crate::tensor::{DType, TensorRef};

    #[test]
    fn memory_of_another_device_is_refused() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        {
            let cuda = Cuda::with_driver(emulator.driver()).unwrap();
            let [own, other] = [0, 1].map(|ordinal| cuda.device(ordinal).unwrap());
            let memory = DeviceMemory::new(&other, 1).unwrap();
            // SAFETY: no operation gets the views.
            let (view, out, none, raw) = unsafe {
                (
                    memory.view(0, DType::U8, [4, 16]).unwrap(),
                    memory.view_mut(64, DType::U8, [4, 16]).unwrap(),
                    memory.view(0, DType::U8, [0, 16]).unwrap(),
                    TensorRef::from_raw(memory.address(), Space::Device, DType::U8, [4, 16], [16, 1])
                        .unwrap(),
                )
            };
            assert_eq!((view.device(), out.device(), raw.device()), (Some(1), Some(1), None));
            assert_eq!((view.first_rows(2).device(), out.as_ref().device()), (Some(1), Some(1)));
            let site = Site::new(BackendKind::Cuda, &own, Some(7));
            for extent in [&*view, &*out] {
                let refused = site.require_rows("x", extent).unwrap_err();
                assert!(
                    matches!(refused, Error::OtherDevice { tensor: "x", got: 1, expected: 0 }),
                    "{refused}"
                );
                assert!(Site::new(BackendKind::Cuda, &other, None).require_rows("x", extent).is_ok());
            }
            // What nobody knows is the caller's promise, and what has no elements is never touched.
            assert!(site.require_rows("x", &raw).is_ok());
            assert!(site.require_rows("x", &none).is_ok());
        }
        emulator.assert_empty();
    }

    #[test]
    fn views_belong_to_one_buffer() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        {
            let cuda = Cuda::with_driver(emulator.driver()).unwrap();
            let device = cuda.device(1).unwrap();
            let site = |buffer| Site::new(BackendKind::Cuda, &device, buffer);
            let home = site(Some(3)).home();
            // SAFETY: nobody uses the addresses.
            let (view, none) = unsafe {
                (
                    TensorRef::heap(0x1000, home, DType::F32, [4, 4]),
                    TensorRef::heap(0x1000, home, DType::F32, [4, 0]),
                )
            };
            assert_eq!(
                (view.buffer(), view.device(), view.first_rows(1).buffer()),
                (Some(3), Some(1), Some(3))
            );
            assert!(site(Some(3)).require("x", &view).is_ok());
            for (other, named) in [(Some(4), "buffer #4"), (None, "collectives")] {
                let refused = site(other).require("x", &view).unwrap_err();
                let text = refused.to_string();
                assert!(
                    matches!(refused, Error::ForeignView { tensor: "x", owner: 3, buffer } if buffer == other),
                    "{text}"
                );
                assert!(text.contains("buffer #3") && text.contains(named), "{text}");
                assert!(site(other).require("x", &none).is_ok());
            }
        }
        emulator.assert_empty();
    }
}
