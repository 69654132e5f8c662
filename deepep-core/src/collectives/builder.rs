//! How collectives are made.

use std::sync::Arc;
use std::time::Duration;

use cuda_vmm::Cuda;

use super::{Collectives, Tensors};
use crate::backend::collective::CollectiveBackend;
use crate::backend::cuda::{CollectiveOptions, CudaCollectives};
use crate::backend::host::HostCollectives;
use crate::backend::platform::{Platform, Seat};
use crate::bootstrap::Bootstrap;
use crate::bootstrap::agree::{Settings, agree, agree_with, compare};
use crate::config::BackendKind;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::layout::{COLLECTIVE_BLOCKS, CollectiveConfig, CollectiveLayout};
use crate::ops::Site;
use crate::symmetric::{self, Heap, Request};
use crate::tune::CollectiveLimits;

const CONFIGURATION: &str = "configuration of collectives";

/// Settings of [`Collectives`] to be built. All but the device, the number of multiprocessors and the driver must be the same on all ranks.
#[derive(Clone, Debug)]
#[must_use]
pub struct CollectivesBuilder {
    backend: BackendKind,
    device: Option<usize>,
    multiprocessors: Option<usize>,
    timeout: Duration,
    cell_bytes: Option<usize>,
    slice: Option<usize>,
    tensor_bytes: usize,
    limits: CollectiveLimits,
    multicast: bool,
    cuda: Option<Cuda>,
}

impl CollectivesBuilder {
    pub(super) fn new() -> Self {
        Self {
            backend: BackendKind::Auto,
            device: None,
            multiprocessors: None,
            timeout: Duration::from_secs(100),
            cell_bytes: None,
            slice: None,
            tensor_bytes: 0,
            limits: CollectiveLimits::DEFAULT,
            multicast: false,
            cuda: None,
        }
    }

    /// Which processors run the operations.
    pub fn backend(mut self, backend: BackendKind) -> Self {
        self.backend = backend;
        self
    }

    /// Device ordinal of this rank, modulo the number of devices; without it the ranks of a host take turns with the devices that
    /// kernels run on.
    pub fn device(mut self, device: usize) -> Self {
        self.device = Some(device);
        self
    }

    /// Most multiprocessors of a GPU that a call may use; all if not set. Ranks that share a GPU get equal shares of it. Of all ranks' numbers the
    /// least counts, since blocks of different ranks meet by number.
    pub fn multiprocessors(mut self, most: usize) -> Self {
        self.multiprocessors = Some(most);
        self
    }

    /// The longest that an operation waits for another rank; 100 seconds if not set.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Most bytes of a rank that travel in cells, the way for small messages (see [`CollectiveConfig::cell_bytes`]).
    pub fn cell_bytes(mut self, bytes: usize) -> Self {
        self.cell_bytes = Some(bytes);
        self
    }

    /// Bytes that a block moves at a time (see [`CollectiveConfig::slice`]); most of the memory is proportional to it.
    pub fn slice(mut self, bytes: usize) -> Self {
        self.slice = Some(bytes);
        self
    }

    /// Bytes of symmetric memory for the caller's own tensors: see [`Collectives::tensors`].
    pub fn tensor_bytes(mut self, bytes: usize) -> Self {
        self.tensor_bytes = bytes;
        self
    }

    /// Sizes at which one way of moving values replaces another.
    pub fn limits(mut self, limits: CollectiveLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Tries a multicast address on the CUDA backend, where the NVLink switches store to all ranks and add: all ranks have one, or none, and then values
    /// go to the peers' addresses; [`Collectives::multicast`] says which and why. Not tried unless asked for: multicast objects are a scarce
    /// resource of the whole NVLink fabric, and the authors have not run one on hardware. Never created where the environment switches them off (see
    /// [`cuda_vmm::multicast_disabled_by`]).
    pub fn multicast(mut self, wanted: bool) -> Self {
        self.multicast = wanted;
        self
    }

    /// Uses this driver instead of the process's, for example a `cuda-vmm-emu` with faults for a test.
    pub fn driver(mut self, cuda: Cuda) -> Self {
        self.cuda = Some(cuda);
        self
    }

    fn config(&self, ranks: usize) -> CollectiveConfig {
        let config = CollectiveConfig::new(ranks);
        CollectiveConfig {
            cell_bytes: self.cell_bytes.unwrap_or(config.cell_bytes),
            slice: self.slice.unwrap_or(config.slice),
            tensor_bytes: self.tensor_bytes,
            ..config
        }
    }

    fn settings(&self, kind: BackendKind, config: &CollectiveConfig) -> Settings {
        Settings::new()
            .with("backend", kind.name())
            .with("timeout", format!("{:?}", self.timeout))
            .with("cell_bytes", config.cell_bytes)
            .with("slice", config.slice)
            .with("tensor_bytes", config.tensor_bytes)
            .with("limits", format!("{:?}", self.limits))
            .with("multicast", self.multicast)
    }

    /// Compares the settings of all ranks, and allocates and maps the symmetric memory. Collective: every rank builds them.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid), [`RanksDisagree`](Error::RanksDisagree), [`Vmm`](Error::Vmm); a failure on one rank is an error on all of
    /// them, and nothing is left behind.
    pub fn build(self, bootstrap: impl Bootstrap + 'static) -> Result<Collectives> {
        let bootstrap: Box<dyn Bootstrap> = Box::new(bootstrap);
        let config = self.config(bootstrap.world_size());
        let layout = match config.ranks {
            1 => Ok(None),
            _ => CollectiveLayout::new(config).map(Some),
        };
        let local =
            layout.and_then(|layout| Ok((layout, Platform::choose(self.backend, self.cuda.clone())?)));
        // An error goes to the others as text, and comes back here as it is.
        let told = match &local {
            Ok((_, platform)) => Ok(self.settings(platform.kind, &config)),
            Err(error) => Err(Error::PeerFailed {
                phase: CONFIGURATION.into(),
                rank: bootstrap.rank(),
                message: error.to_string(),
            }),
        };
        let compared = compare(&*bootstrap, CONFIGURATION, told);
        let (layout, platform) = local?;
        compared?;
        let domain = Domain::discover(&*bootstrap)?;
        let hosts = domain.logical()?.scale_out;
        if hosts != 1 {
            let need = "this version connects the ranks of one host; start one group on each host";
            return Err(Error::invalid("hosts", hosts, need));
        }
        let seat = platform.seat(&*bootstrap, self.device, domain.local_rank())?;
        // A rank that is alone has nothing but tensors.
        let (bytes, tensors) = layout.map_or((config.tensor_bytes, 0), |l| (l.bytes, l.tensors));
        let heap = match bytes {
            0 => None,
            device_bytes => {
                let (device, space) = (seat.device.ordinal(), platform.space());
                let request = Request { device_bytes, host_bytes: 0, hybrid: false, device, space };
                Some(Arc::new(symmetric::allocate(&*bootstrap, &domain, &platform.cuda, &request)?))
            }
        };
        let multicast = match &heap {
            Some(heap) if self.multicast && layout.is_some() && seat.gpu.is_some() => {
                symmetric::join(&*bootstrap, &domain, heap)?
            }
            _ if self.multicast => Err(String::from("only several ranks on GPUs use one")),
            _ => Err(String::from("it was not asked for")),
        };
        let blocks = self.blocks(&*bootstrap, &seat)?;
        let address = multicast.as_ref().ok().map(symmetric::Multicast::address);
        let memory = heap.clone().zip(layout);
        let backend = agree(&*bootstrap, "starting collectives", self.start(&seat, memory, blocks, address))?;
        bootstrap.barrier()?;
        let tensors = heap.filter(|_| config.tensor_bytes > 0).map(|heap| Tensors {
            heap,
            offset: tensors,
            bytes: config.tensor_bytes,
        });
        let site = Site::new(backend.kind(), &seat.device, None);
        let (device, timeout) = (seat.device, self.timeout);
        Ok(Collectives {
            backend,
            tensors,
            multicast,
            site,
            device,
            domain,
            timeout,
            broken: None,
            bootstrap,
        })
    }

    /// Blocks of the largest grid, the same on all ranks.
    fn blocks(&self, bootstrap: &dyn Bootstrap, seat: &Seat) -> Result<usize> {
        let Some(gpu) = &seat.gpu else { return Ok(1) };
        let own = gpu.blocks(self.multiprocessors).map(|blocks| blocks.min(COLLECTIVE_BLOCKS));
        let share = |blocks: &usize| (*blocks as u32).to_le_bytes().to_vec();
        let (own, all) = agree_with(bootstrap, "sharing out multiprocessors", own, share)?;
        let number = |bytes: &Vec<u8>| bytes.first_chunk().map(|four| u32::from_le_bytes(*four) as usize);
        Ok(all.iter().filter_map(number).fold(own, usize::min).max(1))
    }

    fn start(
        &self,
        seat: &Seat,
        memory: Option<(Arc<Heap>, CollectiveLayout)>,
        blocks: usize,
        multicast: Option<u64>,
    ) -> Result<Box<dyn CollectiveBackend>> {
        let Some(gpu) = &seat.gpu else {
            return Ok(Box::new(HostCollectives::new(memory, self.timeout)?));
        };
        let options = CollectiveOptions { timeout: self.timeout, ways: self.limits, blocks, multicast };
        Ok(Box::new(CudaCollectives::new(memory, gpu, &options)?))
    }
}
