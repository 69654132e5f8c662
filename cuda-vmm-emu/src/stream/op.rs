//! The operations of a stream.

use super::{Event, Stream, TICK, bounded};
use crate::core::{Core, as_host_function};
use crate::kernel::Launched;
use crate::memory::access::{Accessor, Need};
use crate::memory::raw;
use crate::memory::space::Space;
use crate::status::{Outcome, code, read};
use cuda_vmm_sys::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Where a copy comes from.
#[derive(Debug)]
pub(crate) enum Source {
    Address(u64),
    /// Pageable host memory, taken when the copy was submitted: its owner may change it afterwards.
    Bytes(Vec<u8>),
}

/// Whose memory an end of a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The driver's, used by this accessor.
    Driver(Accessor),
    /// The caller's own, which it keeps until the copy is done.
    Caller,
}

/// When a wait for a value ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// The difference, as a signed number, is not negative.
    Geq,
    Eq,
    And,
    Nor,
}

/// One operation. Addresses are checked again when it runs: what was mapped may have been unmapped since.
#[derive(Debug)]
pub(crate) enum Op {
    Copy { to: u64, to_for: Whose, from: Source, from_for: Whose, length: u64 },
    Set8 { to: u64, value: u8, count: u64, who: Accessor },
    Set32 { to: u64, value: u32, count: u64, who: Accessor },
    Write { to: u64, value: u64, wide: bool, who: Accessor },
    Wait { at: u64, value: u64, wide: bool, until: Waiting, who: Accessor },
    Call { function: unsafe extern "C" fn(*mut c_void), data: usize },
    Record { event: Arc<Event>, generation: u64 },
    WaitEvent { event: Arc<Event>, generation: u64 },
    Join(Vec<(Arc<Stream>, u64)>),
    Launch(Launched),
    Graph(Arc<Vec<Op>>),
}

impl Op {
    /// Whether the operation may run on the thread that submits it: it need not wait, and is no call into the user's code, which may
    /// wait for what that thread does next.
    pub(super) fn runs_at_once(&self, core: &Core) -> bool {
        match self {
            Self::Call { .. } | Self::Launch(_) | Self::Graph(_) => false,
            Self::Wait { .. } | Self::WaitEvent { .. } | Self::Join(_) => {
                self.is_ready(core).unwrap_or(false)
            }
            _ => true,
        }
    }

    /// Whether what the operation waits for has come.
    fn is_ready(&self, core: &Core) -> Outcome<bool> {
        match self {
            Self::Wait { at, value, wide, until, who } => {
                let seen = load(core, *at, *wide, *who)?;
                Ok(until.holds(seen, *value, *wide))
            }
            Self::WaitEvent { event, generation } => Ok(event.has_happened(*generation)),
            Self::Join(streams) => Ok(streams.iter().all(|(stream, ticket)| stream.is_done(*ticket))),
            _ => Ok(true),
        }
    }

    /// Waits for what the operation waits for, and runs it.
    pub(super) fn await_and_run(&self, core: &Core) -> Outcome {
        match self {
            Self::Wait { .. } => {
                let mut pause = Duration::from_micros(1);
                bounded(core, || {
                    let ready = self.is_ready(core)?;
                    if !ready {
                        std::thread::sleep(pause);
                        pause = (pause * 2).min(Duration::from_millis(1));
                    }
                    Ok(ready)
                })
            }
            Self::WaitEvent { event, generation } => {
                bounded(core, || Ok(event.wait_a_tick(*generation, TICK)))
            }
            // Each stream that is waited for ends in bounded time.
            Self::Join(streams) => {
                for (stream, ticket) in streams {
                    stream.await_ticket(core, *ticket);
                }
                Ok(())
            }
            Self::Graph(ops) => ops.iter().try_for_each(|op| op.await_and_run(core)),
            Self::Launch(launched) => {
                let (device, blocks) = launched.place();
                let _resident = core.residency[device].enter(core, blocks)?;
                self.run(core)
            }
            _ => self.run(core),
        }
    }

    /// Runs an operation that need not wait.
    pub(super) fn run(&self, core: &Core) -> Outcome {
        match self {
            Self::Copy { to, to_for, from, from_for, length } => {
                let space = read(&core.space);
                check_end(&space, *to, *length, *to_for, Need::Write)?;
                let source = match from {
                    Source::Bytes(bytes) => bytes.as_ptr(),
                    Source::Address(address) => {
                        check_end(&space, *address, *length, *from_for, Need::Read)?;
                        *address as *const u8
                    }
                };
                // SAFETY: both ranges are mapped with the access that this needs, as was just checked, and `space` is held, so that they
                // stay so; or they are the caller's own memory, valid by the contract of the copy. They may overlap.
                unsafe { std::ptr::copy(source, *to as *mut u8, *length as usize) };
                Ok(())
            }
            Self::Set8 { to, value, count, who } => {
                let space = read(&core.space);
                check(&space, *to, *count, *who, Need::Write)?;
                // SAFETY: the range is mapped writable, as was just checked, and stays so while `space` is held.
                unsafe { std::ptr::write_bytes(*to as *mut u8, *value, *count as usize) };
                Ok(())
            }
            Self::Set32 { to, value, count, who } => {
                let space = read(&core.space);
                check(&space, *to, *count * 4, *who, Need::Write)?;
                for index in 0..*count as usize {
                    // SAFETY: as above; the address was checked to be aligned when the operation was submitted.
                    unsafe { (*to as *mut u32).add(index).write_volatile(*value) };
                }
                Ok(())
            }
            Self::Write { to, value, wide, who } => {
                let space = read(&core.space);
                check(&space, *to, if *wide { 8 } else { 4 }, *who, Need::Write)?;
                // SAFETY: the word is mapped writable, as was just checked, stays so while `space` is held, and is aligned, as was
                // checked when the operation was submitted. Others access it as device memory: by whole words.
                unsafe {
                    if *wide {
                        AtomicU64::from_ptr(*to as *mut u64).store(*value, Ordering::SeqCst);
                    } else {
                        AtomicU32::from_ptr(*to as *mut u32).store(*value as u32, Ordering::SeqCst);
                    }
                }
                Ok(())
            }
            Self::Call { function, data } => {
                core.while_mapped(|| {
                    // SAFETY: whoever submitted the call promised that the function may be called with this argument in stream order.
                    as_host_function(|| unsafe { function(*data as *mut c_void) });
                    Ok(())
                })
            }
            Self::Record { event, generation } => {
                event.happen(*generation);
                Ok(())
            }
            Self::Launch(launched) => core.while_mapped(|| launched.run()),
            Self::Graph(ops) => ops.iter().try_for_each(|op| op.run(core)),
            Self::Wait { .. } | Self::WaitEvent { .. } | Self::Join(_) => Ok(()),
        }
    }

    /// Ends an operation that will not run, so that nobody waits for it.
    pub(super) fn skip(&self) {
        if let Self::Record { event, generation } = self {
            event.happen(*generation);
        }
    }
}

impl Waiting {
    fn holds(self, seen: u64, value: u64, wide: bool) -> bool {
        match (self, wide) {
            (Self::Geq, true) => seen.wrapping_sub(value) as i64 >= 0,
            (Self::Geq, false) => (seen as u32).wrapping_sub(value as u32) as i32 >= 0,
            (Self::Eq, _) => seen == value,
            (Self::And, _) => seen & value != 0,
            (Self::Nor, true) => !(seen | value) != 0,
            (Self::Nor, false) => !(seen as u32 | value as u32) != 0,
        }
    }
}

/// The check of an operation that runs: memory that has gone since it was submitted is an illegal address.
fn check(space: &Space, address: u64, length: u64, who: Accessor, need: Need) -> Outcome {
    match space.check(address, length, who, need) {
        Ok(true) => Ok(()),
        Ok(false) | Err(_) => Err(code::ILLEGAL_ADDRESS),
    }
}

fn check_end(space: &Space, address: u64, length: u64, whose: Whose, need: Need) -> Outcome {
    match whose {
        Whose::Driver(who) => check(space, address, length, who, need),
        // Its owner may have given it back since: a graph runs when it likes.
        Whose::Caller if raw::is_mapped(address, length) => Ok(()),
        Whose::Caller => Err(code::ILLEGAL_ADDRESS),
    }
}

fn load(core: &Core, at: u64, wide: bool, who: Accessor) -> Outcome<u64> {
    let space = read(&core.space);
    check(&space, at, if wide { 8 } else { 4 }, who, Need::Read)?;
    // SAFETY: the word is mapped readable, as was just checked, stays so while `space` is held, and is aligned, as was checked when the
    // operation was submitted. An atomic load of it writes nothing.
    Ok(unsafe {
        if wide {
            AtomicU64::from_ptr(at as *mut u64).load(Ordering::SeqCst)
        } else {
            AtomicU32::from_ptr(at as *mut u32).load(Ordering::SeqCst).into()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_end_as_the_driver_says() {
        assert!(Waiting::Geq.holds(7, 7, false) && Waiting::Geq.holds(8, 7, true));
        assert!(!Waiting::Geq.holds(6, 7, false));
        // Cyclic: a counter that wrapped is ahead.
        assert!(Waiting::Geq.holds(1, 0xffff_fff0, false));
        assert!(!Waiting::Geq.holds(1, 0xffff_fff0, true));
        assert!(Waiting::Geq.holds(1, u64::MAX - 3, true));
        assert!(Waiting::Eq.holds(5, 5, true) && !Waiting::Eq.holds(5, 6, true));
        assert!(Waiting::And.holds(6, 2, false) && !Waiting::And.holds(4, 2, false));
        assert!(Waiting::Nor.holds(1, 2, false) && !Waiting::Nor.holds(0xffff_fffe, 1, false));
        assert!(Waiting::Nor.holds(0xffff_fffe, 1, true));
    }
}
