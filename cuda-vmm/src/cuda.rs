//! The entry: an initialised driver and what is worth remembering about it.

use crate::error::{Attempt, Error, Result};
use crate::granularity::Granularities;
use crate::location::Location;
use crate::properties::Properties;
use cuda_vmm_sys::{Driver, ffi::c_int};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// An initialised CUDA driver: where everything starts. A handle of one pointer; clones are the same driver.
#[derive(Clone)]
pub struct Cuda {
    inner: Arc<Inner>,
}

struct Inner {
    driver: Driver,
    devices: c_int,
    /// Granularities by properties: asked of the driver once for each kind of memory.
    granularities: Mutex<Vec<(Properties, Granularities)>>,
    /// Locations whose memory the driver refused to make exportable as FABRIC, whatever it claims.
    without_fabric: Mutex<Vec<Location>>,
    /// Number of guards by (accessing, accessed) device, where this crate enabled the access of their primary contexts.
    peer_guards: Mutex<BTreeMap<(i32, i32), usize>>,
}

impl Cuda {
    /// The process's driver, found and initialised on the first call.
    ///
    /// # Errors
    /// [`Error::Load`] where there is no driver, [`Error::Call`] where `cuInit` fails. A later call tries again.
    #[doc(alias = "cuInit")]
    pub fn get() -> Result<&'static Self> {
        static CUDA: once_cell::sync::OnceCell<Cuda> = once_cell::sync::OnceCell::new();
        CUDA.get_or_try_init(|| Self::with_driver(Driver::get()?.clone()))
    }

    /// Initialises a driver of the caller's choice: a file of [`Driver::open`], or a driver in software.
    ///
    /// # Errors
    /// [`Error::Call`] where `cuInit` or `cuDeviceGetCount` fails.
    #[doc(alias = "cuInit")]
    #[doc(alias = "cuDeviceGetCount")]
    pub fn with_driver(driver: Driver) -> Result<Self> {
        let mut devices = 0;
        // SAFETY: cuInit takes no pointer and may be called any number of times; `devices` is valid for one write.
        unsafe {
            driver.cuInit(0).attempt(|| "initialising the driver".into())?;
            driver.cuDeviceGetCount(&mut devices).attempt(|| "counting devices".into())?;
        }
        Ok(Self {
            inner: Arc::new(Inner {
                driver,
                devices,
                granularities: Mutex::default(),
                without_fabric: Mutex::default(),
                peer_guards: Mutex::default(),
            }),
        })
    }

    /// The raw table of driver functions.
    #[inline]
    #[must_use]
    pub fn driver(&self) -> &Driver {
        &self.inner.driver
    }

    /// Number of devices that the driver shows to this process.
    #[must_use]
    pub fn device_count(&self) -> i32 {
        self.inner.devices
    }

    pub(crate) fn check_device(&self, ordinal: i32) -> Result<()> {
        if (0..self.inner.devices).contains(&ordinal) {
            Ok(())
        } else {
            Err(Error::UnknownDevice { ordinal, count: self.inner.devices })
        }
    }

    /// Whether two handles are the same driver: objects of both may be used together.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) || self.driver().is_same(other.driver())
    }

    pub(crate) fn check_same(&self, other: &Self, what: &'static str) -> Result<()> {
        if self.is_same(other) { Ok(()) } else { Err(Error::ForeignDriver { what }) }
    }

    /// Guards of peer access, locked while access is enabled or disabled.
    pub(crate) fn peer_guards(&self) -> std::sync::MutexGuard<'_, BTreeMap<(i32, i32), usize>> {
        self.inner.peer_guards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether creating FABRIC memory at a location is worth a try.
    pub(crate) fn may_have_fabric(&self, location: Location) -> bool {
        !self.inner.without_fabric.lock().unwrap_or_else(PoisonError::into_inner).contains(&location)
    }

    /// Remembers that the driver refused it.
    pub(crate) fn has_no_fabric(&self, location: Location) {
        let mut refused = self.inner.without_fabric.lock().unwrap_or_else(PoisonError::into_inner);
        if !refused.contains(&location) {
            refused.push(location);
        }
    }

    pub(crate) fn granularities(&self, properties: &Properties) -> Result<Granularities> {
        let known = |cache: &[(Properties, Granularities)]| {
            cache.iter().find(|(key, _)| key == properties).map(|&(_, value)| value)
        };
        let lock = || self.inner.granularities.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = known(&lock()) {
            return Ok(value);
        }
        let value = Granularities::query(self, properties)?;
        let mut cache = lock();
        if known(&cache).is_none() {
            cache.push((*properties, value));
        }
        Ok(value)
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda")
            .field("driver", &self.inner.driver)
            .field("devices", &self.inner.devices)
            .finish_non_exhaustive()
    }
}
