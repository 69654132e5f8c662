//! Collectives on CPUs. Each rank puts a chunk of what it gives into its own stage, says so, waits for the others, and reads theirs.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use half::{bf16, f16};

use super::memory::Area;
use super::wait::Waits;
use crate::backend::abort::calls_differ;
use crate::backend::collective::{CollectiveBackend, CollectiveCall};
use crate::config::BackendKind;
use crate::error::{Error, Result};
use crate::jit::CollectiveKind;
use crate::layout::{CollectiveLayout, Operation, Phase};
use crate::stream::{Event, StreamRef};
use crate::symmetric::Heap;
use crate::tensor::DType;

/// One rank on a CPU.
pub(crate) struct HostCollectives {
    /// A rank that is alone has none.
    memory: Option<(Arc<Heap>, CollectiveLayout)>,
    timeout: Duration,
    state: Mutex<State>,
}

/// Numbers of the newest call and step.
#[derive(Default)]
struct State {
    epoch: u32,
    step: u32,
}

impl HostCollectives {
    pub(crate) fn new(memory: Option<(Arc<Heap>, CollectiveLayout)>, timeout: Duration) -> Result<Self> {
        if let Some((heap, layout)) = &memory {
            if heap.bytes() < layout.bytes || heap.ranks() != layout.config.ranks {
                let need =
                    format!("the layout needs {} bytes on {} ranks", layout.bytes, layout.config.ranks);
                return Err(Error::invalid("heap", format!("{heap:?}"), need));
            }
            Area::new(heap, heap.rank())?;
        }
        Ok(Self { memory, timeout, state: Mutex::default() })
    }
}

impl CollectiveBackend for HostCollectives {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    unsafe fn run(&self, call: CollectiveCall<'_>) -> Result<Result<Event>> {
        debug_assert!(call.order.is_implicit(), "checked when the call was planned");
        let Some((heap, layout)) = &self.memory else {
            // What one rank gathers, scatters or sums is what it gives.
            // SAFETY: the caller vouches for both tensors; they may be the same.
            unsafe { std::ptr::copy(call.input as *const u8, call.output as *mut u8, call.bytes) };
            return Ok(Ok(Event::complete()));
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.epoch = state.epoch.wrapping_add(1);
        let (me, operation) = (heap.rank(), call.operation());
        let areas: Vec<_> = (0..heap.ranks()).map(|r| Area::new(heap, r)).collect::<Result<_>>()?;
        let waits = Waits::new(me, &areas, layout.workspace.abort, self.timeout, operation, state.epoch)?;
        let mut rank = Rank { me, layout, areas, waits, step: state.step };
        if let Err(differ) = rank.compare(operation, state.epoch, call.digest)? {
            return Ok(Err(differ));
        }
        let outcome = rank.move_all(&call);
        state.step = rank.step;
        outcome.map(|()| Ok(Event::complete()))
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }

    fn stream(&self) -> Option<StreamRef<'_>> {
        None
    }
}

/// What a call works with.
struct Rank<'a> {
    me: usize,
    layout: &'a CollectiveLayout,
    areas: Vec<Area<'a>>,
    waits: Waits<'a>,
    step: u32,
}

impl<'a> Rank<'a> {
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, ranks) = (self.me, self.areas.len());
        (1..ranks).map(move |i| (me + i) % ranks)
    }

    /// Whether all ranks make the same call. Nothing has been moved.
    fn compare(&self, operation: Operation, epoch: u32, digest: u32) -> Result<Result<()>> {
        let cell = |from: usize| {
            let parity = (epoch & 1) as usize * self.areas.len();
            self.layout.cells + (parity + from) * self.layout.cell_count() * 8
        };
        for peer in self.peers() {
            let value = u64::from(epoch) << 32 | u64::from(digest);
            self.areas[peer].cell64(cell(self.me))?.store(value, Ordering::Release);
        }
        let mut digests = vec![digest; self.areas.len()];
        for peer in self.peers() {
            let own = self.areas[self.me].cell64(cell(peer))?;
            digests[peer] = self.waits.value(own, epoch, Phase::Started, peer)?;
        }
        let same = digests.iter().all(|&d| d == digest);
        Ok(if same { Ok(()) } else { Err(calls_differ(operation, &digests)) })
    }

    /// Steps of chunks. A step's chunk is in the half of the stages that its number says: a rank fills a half again two steps later, and in
    /// between has waited for a step that the others say only after they have read it.
    fn move_all(&mut self, call: &CollectiveCall<'_>) -> Result<()> {
        let ranks = self.areas.len();
        let half = (self.layout.tensors - self.layout.stages) / 2;
        let slots = if call.kind == CollectiveKind::ReduceScatter { ranks } else { 1 };
        let most = half / slots / 64 * 64;
        let mut start = 0;
        while start < call.bytes {
            let length = most.min(call.bytes - start);
            self.step = self.step.wrapping_add(1);
            let stage = self.layout.stages + (self.step & 1) as usize * half;
            for slot in 0..slots {
                let from = call.input as usize + slot * call.bytes + start;
                let to = self.areas[self.me].rows(stage + slot * most, 1, length)?.at(0)?;
                // SAFETY: the input has these bytes (the caller's promise), the stage as well (checked); nobody reads this half of the
                // stages now, as said above, and the two do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, length) };
            }
            let flag = |from: usize| self.layout.flags + 4 * from;
            for peer in self.peers() {
                self.areas[peer].cell32(flag(self.me))?.store(self.step, Ordering::Release);
            }
            for peer in self.peers() {
                let own = self.areas[self.me].cell32(flag(peer))?;
                self.waits.at_least(own, self.step, Phase::Stage, peer)?;
            }
            let slot = if slots == 1 { 0 } else { self.me * most };
            let chunks: Vec<&[u8]> =
                self.areas.iter().map(|area| chunk(area, stage + slot, length)).collect::<Result<_>>()?;
            let out = |offset: usize| {
                // SAFETY: the output has these bytes, and nobody else uses them (the caller's promise); the stages are other memory.
                unsafe { std::slice::from_raw_parts_mut((call.output as usize + offset) as *mut u8, length) }
            };
            match call.kind {
                CollectiveKind::AllGather => {
                    for (rank, chunk) in chunks.iter().enumerate() {
                        out(rank * call.bytes + start).copy_from_slice(chunk);
                    }
                }
                _ => add(call.dtype, &chunks, out(start))?,
            }
            start += length;
        }
        Ok(())
    }
}

/// A chunk in a rank's stage.
fn chunk<'a>(area: &Area<'a>, offset: usize, length: usize) -> Result<&'a [u8]> {
    let start = area.rows(offset, 1, length)?.at(0)?;
    // SAFETY: inside the rank's range (checked), which outlives 'a; its rank has said that the chunk is there, and does not write it
    // before this rank has said the next step.
    Ok(unsafe { std::slice::from_raw_parts(start, length) })
}

/// Sums in FP32, in rank order, rounded once.
fn add(dtype: DType, terms: &[&[u8]], out: &mut [u8]) -> Result<()> {
    macro_rules! add {
        ($bytes:literal, $read:expr, $write:expr) => {
            for (at, to) in out.chunks_exact_mut($bytes).enumerate() {
                let term = |bytes: &&[u8]| {
                    let mut one = [0; $bytes];
                    one.copy_from_slice(&bytes[at * $bytes..][..$bytes]);
                    ($read)(one)
                };
                let (first, rest) = terms.split_first().map_or((0.0, terms), |(f, rest)| (term(f), rest));
                let sum: f32 = rest.iter().fold(first, |sum, bytes| sum + term(bytes));
                to.copy_from_slice(&($write)(sum));
            }
        };
    }
    match dtype {
        DType::F32 => add!(4, f32::from_le_bytes, f32::to_le_bytes),
        DType::Bf16 => add!(2, |b| bf16::from_le_bytes(b).to_f32(), |s| bf16::from_f32(s).to_le_bytes()),
        DType::F16 => add!(2, |b| f16::from_le_bytes(b).to_f32(), |s| f16::from_f32(s).to_le_bytes()),
        got => return Err(Error::DType { tensor: "input", got, expected: "F32, BF16 or F16" }),
    }
    Ok(())
}
