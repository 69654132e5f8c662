//! Operations on CPUs: ranks are processes or threads, the heap is memory that all of them map, and the protocol is that of
//! `docs/protocol.md` with one sending block for each rank. An operation has run when its call returns.

mod collective;
mod combine;
mod dispatch;
mod exchange;
mod memory;
mod sum;
mod wait;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) use self::collective::HostCollectives;
use self::exchange::Over;
use self::memory::Area;
use self::wait::Waits;
use super::{Backend, CombineCall, Copy2d, DispatchCall, DispatchOutcome, Order, Problem, Ran};
use crate::config::BackendKind;
use crate::error::{Error, Result};
use crate::layout::{HandleLayout, HeapLayout, Operation, Phase, WorkspaceLayout};
use crate::stream::{Event, StreamRef};
use crate::symmetric::Heap;

/// One rank on a CPU.
pub(crate) struct HostBackend {
    heap: Arc<Heap>,
    layout: HeapLayout,
    timeout: Duration,
    state: Mutex<State>,
}

/// Epochs of the newest calls.
#[derive(Default)]
struct State {
    dispatch: u32,
    combine: u32,
    barrier: u32,
    /// The newest dispatch over capacity.
    over: Option<Over>,
    /// The newest one with wrong ids, and its number.
    wrong: Option<(u32, Problem)>,
}

/// What an operation works with.
struct Rank<'a> {
    me: usize,
    layout: &'a HeapLayout,
    areas: Vec<Area<'a>>,
    waits: Waits<'a>,
}

impl<'a> Rank<'a> {
    fn own(&self) -> &Area<'a> {
        &self.areas[self.me]
    }

    fn ranks(&self) -> usize {
        self.areas.len()
    }

    fn workspace(&self) -> &'a WorkspaceLayout {
        &self.layout.workspace
    }

    /// The other ranks, starting with the next one, so that not everybody writes to the same rank at once.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, ranks) = (self.me, self.ranks());
        (1..ranks).map(move |i| (me + i) % ranks)
    }
}

impl HostBackend {
    pub(crate) fn new(heap: Arc<Heap>, layout: HeapLayout, timeout: Duration) -> Result<Self> {
        if heap.bytes() < layout.bytes || heap.ranks() != layout.ranks {
            let need = format!("the layout needs {} bytes on {} ranks", layout.bytes, layout.ranks);
            return Err(Error::invalid("heap", format!("{heap:?}"), need));
        }
        Area::new(&heap, heap.rank())?;
        Ok(Self { heap, layout, timeout, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rank(&self, operation: Operation, epoch: u32) -> Result<Rank<'_>> {
        let me = self.heap.rank();
        let areas: Vec<_> =
            (0..self.heap.ranks()).map(|r| Area::new(&self.heap, r)).collect::<Result<_>>()?;
        let waits = Waits::new(me, &areas, self.layout.workspace.abort, self.timeout, operation, epoch)?;
        Ok(Rank { me, layout: &self.layout, areas, waits })
    }
}

impl Backend for HostBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn dispatch(&self, call: DispatchCall<'_>) -> Result<Result<DispatchOutcome>> {
        if let Err(e) = call.order.require_implicit() {
            return Ok(Err(e));
        }
        let mut state = self.state();
        state.dispatch = state.dispatch.wrapping_add(1);
        let number = state.dispatch;
        let (shape, exact) = (call.shape, call.exact);
        let ran = dispatch::run(&self.rank(Operation::Dispatch, number)?, call, number)?;
        state.over = ran.over.or(state.over);
        if let Some(wrong) = &ran.wrong {
            state.wrong = Some((number, wrong.clone()));
        }
        let problem = ran.over.map(|over| Problem::capacity(&shape, over.rank, over.needed)).or(ran.wrong);
        let counts = exact.then_some(ran.counts);
        Ok(Ok(DispatchOutcome { number, counts, problem, event: Event::complete() }))
    }

    fn combine(&self, call: CombineCall<'_>) -> Result<Result<Event>> {
        if let Err(e) = call.order.require_implicit() {
            return Ok(Err(e));
        }
        let mut state = self.state();
        state.combine = state.combine.wrapping_add(1);
        combine::run(&self.rank(Operation::Combine, state.combine)?, call, state.combine)?;
        Ok(Ok(Event::complete()))
    }

    fn barrier(&self, order: Order<'_>) -> Result<Result<Event>> {
        if let Err(e) = order.require_implicit() {
            return Ok(Err(e));
        }
        let mut state = self.state();
        state.barrier = state.barrier.wrapping_add(1);
        let epoch = state.barrier;
        let rank = self.rank(Operation::Barrier, epoch)?;
        let cell = |r: usize| rank.workspace().barrier + r * WorkspaceLayout::LINE;
        for peer in rank.peers() {
            rank.areas[peer].cell32(cell(rank.me))?.store(epoch, std::sync::atomic::Ordering::Release);
        }
        for peer in rank.peers() {
            rank.waits.at_least(rank.own().cell32(cell(peer))?, epoch, Phase::Barrier, peer)?;
        }
        Ok(Ok(Event::complete()))
    }

    fn problem(&self, ran: Ran<'_>) -> Result<Option<Problem>> {
        if ran.cached {
            return Ok(None);
        }
        let (me, slot) = (self.heap.rank(), self.layout.handles.at(ran.handle_slot));
        let cells =
            Area::new(&self.heap, me)?.table::<i32>(slot + ran.handle.counts, HandleLayout::COUNTS)?;
        let needed = [cells.get(2)? as u32, cells.get(3)? as u32];
        let state = self.state();
        if needed != [0, 0] {
            // The numbers are the call's own; the rank is that of the newest one with these numbers.
            let rank = state.over.filter(|over| over.needed == needed).map_or(me, |over| over.rank);
            return Ok(Some(Problem::capacity(ran.shape, rank, needed)));
        }
        Ok(state.wrong.clone().filter(|(of, _)| *of == ran.number).map(|(_, problem)| problem))
    }

    unsafe fn copy(&self, copy: Copy2d, order: Order<'_>) -> Result<Event> {
        order.require_implicit()?;
        for row in 0..copy.height as isize {
            let from = (copy.from as *const u8).wrapping_offset(row * copy.from_pitch);
            let to = (copy.to as *mut u8).wrapping_offset(row * copy.to_pitch);
            // SAFETY: the caller vouches for both sides.
            unsafe { std::ptr::copy_nonoverlapping(from, to, copy.width) };
        }
        Ok(Event::complete())
    }

    fn synchronize(&self, _: Duration) -> Result<()> {
        Ok(())
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }

    fn stream(&self) -> Option<StreamRef<'_>> {
        None
    }
}
