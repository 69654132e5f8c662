//! What a multicast object is to be like.

use crate::cuda::Cuda;
use crate::error::{Attempt, Error, Result};
use crate::granularity::{Granularities, Granularity};
use crate::properties::{HandleTypes, Shareable};
use cuda_vmm_sys::{CUmulticastGranularity_flags, CUmulticastObjectProp};

/// ObjectProperties of a multicast object: for how many devices, how many bytes of each, and how it can be exported. It stays in the process
/// unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ObjectProperties {
    devices: u32,
    size: usize,
    shareable: Shareable,
}

impl ObjectProperties {
    /// An object for a number of devices, with `size` bytes of each. The size must be a multiple of the minimum
    /// [granularity](Self::granularities).
    #[must_use]
    pub const fn new(devices: u32, size: usize) -> Self {
        Self { devices, size, shareable: Shareable::Exactly(HandleTypes::empty()) }
    }

    /// An object of at least `bytes`, rounded up so that an object and the memory bound to it can both have the size: to the larger of
    /// the minimum granularities of multicast and of `memory`.
    ///
    /// # Errors
    /// As [`common_granularities`](Self::common_granularities), and [`Error::Overflow`].
    pub fn fitting(cuda: &Cuda, devices: u32, bytes: usize, memory: &crate::Properties) -> Result<Self> {
        let granularity = Self::new(devices, bytes).common_granularities(cuda, memory)?.minimum;
        Ok(Self::new(devices, granularity.round_up(bytes)?))
    }

    /// Can be exported as exactly these handle types. Memory must then be exportable, too, to be bound to it.
    #[must_use]
    pub const fn handle_types(mut self, types: HandleTypes) -> Self {
        self.shareable = Shareable::Exactly(types);
        self
    }

    /// Can be exported to other processes in the best way that the driver offers ([`Shareable::BestAvailable`]).
    #[must_use]
    pub const fn shareable(mut self) -> Self {
        self.shareable = Shareable::BestAvailable;
        self
    }

    /// Number of devices.
    #[must_use]
    pub const fn devices(&self) -> u32 {
        self.devices
    }

    /// Bytes of each device.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// How the object can be exported.
    #[must_use]
    pub const fn shareability(&self) -> Shareable {
        self.shareable
    }

    /// Granularities of multicast: of an object's size, of bindings and their offsets, and of the addresses that it is mapped at. The
    /// query creates nothing, and works where multicast is switched off.
    ///
    /// Calls `cuMulticastGetGranularity`.
    ///
    /// # Errors
    /// [`Error::Zero`] for no devices or no bytes; [`Error::Call`] if the driver refuses, for example `CUDA_ERROR_NOT_SUPPORTED`.
    #[doc(alias = "cuMulticastGetGranularity")]
    pub fn granularities(&self, cuda: &Cuda) -> Result<Granularities> {
        self.check()?;
        let types = match self.shareable {
            Shareable::Exactly(types) => types,
            Shareable::BestAvailable => HandleTypes::POSIX_FD,
        };
        let raw = self.as_raw(types);
        let ask = |option| {
            let mut bytes = 0;
            // SAFETY: `bytes` is valid for one write and `raw` for one read; the call has no other effect.
            unsafe { cuda.driver().cuMulticastGetGranularity(&mut bytes, &raw, option) }.attempt(|| {
                format!(
                    "asking for the granularity of a multicast object of {} bytes for {} devices",
                    self.size, self.devices
                )
            })?;
            Granularity::new(bytes)
        };
        Ok(Granularities {
            minimum: ask(CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_MINIMUM)?,
            recommended: ask(CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_RECOMMENDED)?,
        })
    }

    /// Granularities that suit both the object and memory that is to be bound to it: the larger of multicast's and the memory's.
    ///
    /// # Errors
    /// As [`granularities`](Self::granularities), and as [`Granularities::of`].
    pub fn common_granularities(&self, cuda: &Cuda, memory: &crate::Properties) -> Result<Granularities> {
        let (object, memory) = (self.granularities(cuda)?, Granularities::of(cuda, memory)?);
        Ok(Granularities {
            minimum: object.minimum.max(memory.minimum),
            recommended: object.recommended.max(memory.recommended),
        })
    }

    /// Refuses what no object can have.
    pub(super) fn check(&self) -> Result<()> {
        if self.devices == 0 {
            return Err(Error::Zero { what: "number of devices of a multicast object" });
        }
        if self.size == 0 {
            return Err(Error::Zero { what: "size of a multicast object" });
        }
        Ok(())
    }

    pub(super) fn as_raw(&self, types: HandleTypes) -> CUmulticastObjectProp {
        CUmulticastObjectProp {
            numDevices: self.devices,
            size: self.size,
            handleTypes: u64::from(types.bits()),
            flags: 0,
        }
    }
}
