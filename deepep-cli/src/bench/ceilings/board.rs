//! All devices of this process, ready to be measured.

use std::cell::Cell;
use std::time::Duration;

use cuda_vmm::sys::CUdevice_attribute;
use cuda_vmm::{Context, Cuda, Memory, PeerAccess, PlainMemory};
use deepep_core::jit::{Arch, Cache, Compiler};

use super::boxes::Boxes;
use super::kernels::{self, Meeting};
use super::{CeilingError, EPOCH_BLOCKS, Kind};
use crate::gpu::{Event, Module, PinnedWord, Shape, Stream};

/// Longest wait of a kernel, and of the host for all kernels of a sample.
pub(super) const KERNEL_TIMEOUT: Duration = Duration::from_secs(2);
const SAMPLE_TIMEOUT: Duration = Duration::from_secs(20);

/// Where a device's words lie: one for each place of a meeting, two of rings, two counters, and the epochs of exchanges.
pub(super) const RING_WORDS: [usize; 2] = [128, 256];
const WRONG: usize = 384;
const LATE: usize = 392;
const EPOCHS: usize = 512;
const WORDS_BYTES: usize = EPOCHS + 2 * 4 * EPOCH_BLOCKS as usize;

/// One device.
pub(super) struct Unit {
    pub(super) stream: Stream,
    /// For a second kernel at the same time.
    pub(super) second: Stream,
    pub(super) module: Module,
    pub(super) inbox: PlainMemory,
    outbox: PlainMemory,
    words: PlainMemory,
    pub(super) start: Event,
    pub(super) stop: Event,
    pub(super) sms: u32,
    pub(super) context: Context,
}

impl Unit {
    fn new(context: Context, compiler: &Compiler, cache: &Cache, bytes: usize) -> Result<Self, CeilingError> {
        let device = context.device();
        let number = |attribute| device.attribute(attribute).map(|n| n.max(0) as u32);
        let major = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let sms = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let cubin = kernels::compile(compiler, Arch::new(major, minor), cache)?;
        let unit = Self {
            stream: Stream::new(&context)?,
            second: Stream::new(&context)?,
            module: Module::load(&context, cubin.image())?,
            inbox: PlainMemory::new(&context, bytes)?,
            outbox: PlainMemory::new(&context, bytes)?,
            words: PlainMemory::new(&context, WORDS_BYTES)?,
            start: Event::new(&context)?,
            stop: Event::new(&context)?,
            sms,
            context: context.clone(),
        };
        context.fill(&unit.words, 0, WORDS_BYTES, 0)?;
        // Kernels are loaded now, not while another waits for them.
        for entry in kernels::ENTRIES {
            unit.module.function(entry, 0)?;
        }
        Ok(unit)
    }

    pub(super) fn word(&self, offset: usize) -> u64 {
        self.words.address().get() + offset as u64
    }

    pub(super) fn late(&self) -> u64 {
        self.word(LATE)
    }

    /// As if no kernel had exchanged packets.
    pub(super) fn clear_epochs(&self) -> Result<(), CeilingError> {
        Ok(self.context.fill(&self.words, EPOCHS, WORDS_BYTES - EPOCHS, 0)?)
    }

    fn counters(&self) -> Result<[u64; 2], CeilingError> {
        let mut bytes = [0; 16];
        self.context.download(&self.words, WRONG, &mut bytes)?;
        self.context.fill(&self.words, WRONG, 16, 0)?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok([u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])])
    }
}

/// Devices that reach each other's memory, with buffers and kernels on each.
pub struct Board {
    pub(super) units: Vec<Unit>,
    pub(super) boxes: Boxes,
    _access: Vec<PeerAccess>,
    go: PinnedWord,
    meetings: Cell<u32>,
    pub(super) rounds: Cell<u32>,
}

impl Board {
    /// Prepares devices, at most 8, with `bytes` bytes to move in and out of each.
    ///
    /// # Errors
    /// [`CeilingError`]; among them that two devices don't reach each other, and that there is no NVRTC.
    pub fn new(cuda: &Cuda, devices: &[i32], bytes: usize) -> Result<Self, CeilingError> {
        let compiler = Compiler::find(None)?;
        let cache = Cache::default_location();
        let contexts: Vec<Context> = devices
            .iter()
            .take(8)
            .map(|&d| cuda.device(d)?.primary_context())
            .collect::<cuda_vmm::Result<_>>()?;
        let mut access = Vec::new();
        for from in &contexts {
            for to in &contexts {
                if from.device() == to.device() {
                    continue;
                }
                if !from.device().can_access(to.device())? {
                    let (from, to) = (from.device().ordinal(), to.device().ordinal());
                    return Err(CeilingError::Unreachable { from, to });
                }
                access.push(from.enable_peer_access(to)?);
            }
        }
        let go = match contexts.first() {
            Some(context) => PinnedWord::new(context)?,
            None => return Err(cuda_vmm::Error::UnknownDevice { ordinal: 0, count: 0 }.into()),
        };
        let units: Vec<Unit> = contexts
            .into_iter()
            .map(|context| Unit::new(context, &compiler, &cache, bytes))
            .collect::<Result<_, _>>()?;
        let of = |address: fn(&Unit) -> u64| units.iter().map(address).collect();
        let boxes = Boxes {
            inboxes: of(|unit| unit.inbox.address().get()),
            outboxes: of(|unit| unit.outbox.address().get()),
            bytes: bytes as u64,
            wrong: of(|unit| unit.word(WRONG)),
            late: of(Unit::late),
            epochs: of(|unit| unit.word(EPOCHS)),
            timeout_ns: KERNEL_TIMEOUT.as_nanos() as u64,
        };
        let (meetings, rounds) = (Cell::new(0), Cell::new(0));
        Ok(Self { units, boxes, _access: access, go, meetings, rounds })
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        self.units.len()
    }

    /// Waits for all devices, and that nothing was late or wrong.
    pub(super) fn settle(&self, kind: Kind) -> Result<(), CeilingError> {
        for unit in &self.units {
            for stream in [&unit.stream, &unit.second] {
                stream.wait(SAMPLE_TIMEOUT, || format!("measuring {kind}"))?;
            }
        }
        // All are read, and zeroed, before anything is said of one.
        let counters: Vec<_> = self.units.iter().map(Unit::counters).collect::<Result<_, _>>()?;
        for (unit, counters) in self.units.iter().zip(counters) {
            let device = unit.context.device().ordinal();
            match counters {
                [0, 0] => {}
                [_, late] if late > 0 => return Err(CeilingError::GaveUp { kind, device }),
                [wrong, _] => return Err(CeilingError::Wrong { kind, device, wrong }),
            }
        }
        Ok(())
    }

    /// Runs work on all devices, which start together, and returns each device's microseconds from event to event.
    pub(super) fn sample(
        &self,
        kind: Kind,
        work: impl Fn(&Unit, usize) -> Result<(), CeilingError>,
    ) -> Result<Vec<f64>, CeilingError> {
        let round = self.meetings.get().wrapping_add(1);
        self.meetings.set(round);
        let mut words = [0; 8];
        for (word, unit) in words.iter_mut().zip(&self.units) {
            *word = unit.word(0);
        }
        for (place, unit) in self.units.iter().enumerate() {
            let meeting = Meeting {
                words,
                go: self.go.address(),
                late: unit.late(),
                timeout_ns: KERNEL_TIMEOUT.as_nanos() as u64,
                places: self.units.len() as u32,
                place: place as u32,
                round,
                pad: 0,
            };
            let shape = Shape { blocks: 1, threads: 32, shared: 0 };
            // SAFETY: the kernel takes a Meeting; its words are this board's, whose devices reach each other, and `settle` waits below.
            unsafe { unit.module.function(c"ceiling_meet", 0)?.launch(&unit.stream, shape, &meeting) }?;
            unit.start.record(&unit.stream)?;
            work(unit, place)?;
            unit.stop.record(&unit.stream)?;
        }
        self.go.set(round);
        self.settle(kind)?;
        self.units.iter().map(|unit| Ok(unit.stop.microseconds_since(&unit.start)?)).collect()
    }
}
