//! Adding to words that others may write as well: the device resets them, or another connection of this process adds to them.
//!
//! No copy engine adds. So the word is read, added to and written, one update after the other in the whole process, whichever
//! connection it comes from. A CPU does it where it can reach the word.

use super::queue::Add;
use super::wait_for;
use crate::comm::Comm;
use crate::cuda::{Copies, Cuda, Pinned, Stream, Words};
use crate::error::Result;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The last update of this process: it has been written when the word in this memory has this value.
type Last = Option<(Arc<Pinned>, u64)>;

static LAST: Mutex<Last> = Mutex::new(None);

/// "The stream has come this far."
const REACHED: usize = 0;
/// "The updated words are written."
const WRITTEN: usize = 64;
/// Values that were read.
const VALUES: usize = 128;
const SIZE: usize = 4096;
/// Words that are read at a time.
const ROOM: usize = (SIZE - VALUES) / 8;

pub(crate) struct Adder {
    scratch: Arc<Pinned>,
    reached: u64,
    written: u64,
    timeout: Duration,
    copies: Copies,
    words: Words,
}

impl Adder {
    /// The context must be current.
    pub(crate) fn new(cuda: &Arc<Cuda>, timeout: Duration) -> Result<Self> {
        let scratch = Arc::new(Pinned::create(cuda, SIZE)?);
        let (copies, words) = Default::default();
        Ok(Self { scratch, reached: 0, written: 0, timeout, copies, words })
    }

    /// Applies the updates behind all that the stream was given so far.
    pub(crate) fn apply(&mut self, comm: &Comm, stream: &Stream, adds: &mut Vec<Add>) -> Result<()> {
        let (by_cpu, by_device): (Vec<Add>, Vec<Add>) = adds.drain(..).partition(|one| one.cpu);
        for part in by_device.chunks(ROOM) {
            let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((scratch, value)) = &*last {
                wait_for(stream, comm, scratch.word(WRITTEN), *value, self.timeout)?;
            }
            for (index, one) in part.iter().enumerate() {
                self.copies.push(self.scratch.device(VALUES + index * 8), one.word, 8, false);
            }
            stream.copy(&mut self.copies)?;
            self.reach(comm, stream)?;
            for (index, one) in part.iter().enumerate() {
                let value = self.scratch.word(VALUES + index * 8).load(Ordering::Relaxed);
                self.words.push64(one.word, value.wrapping_add(one.add));
            }
            self.written += 1;
            self.words.push64(self.scratch.device(WRITTEN), self.written);
            stream.write(&mut self.words)?;
            // The next reader waits for the write only when it comes to read.
            *last = Some((Arc::clone(&self.scratch), self.written));
        }
        if !by_cpu.is_empty() && by_device.is_empty() {
            self.reach(comm, stream)?;
        }
        for one in &by_cpu {
            // SAFETY: an aligned word inside a registration that this process can write (the agent checked both); all who use it while it is
            // registered treat it as an atomic word.
            let word = unsafe { AtomicU64::from_ptr(one.word as *mut u64) };
            word.fetch_add(one.add, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Waits until the stream has come this far. The GPU says so itself, whatever kernels spin meanwhile.
    pub(crate) fn reach(&mut self, comm: &Comm, stream: &Stream) -> Result<()> {
        self.reached += 1;
        let mut flag = Words::default();
        flag.push64(self.scratch.device(REACHED), self.reached);
        stream.write(&mut flag)?;
        wait_for(stream, comm, self.scratch.word(REACHED), self.reached, self.timeout)
    }

    /// The streams are at rest, and this agent ends.
    pub(crate) fn forget(&mut self) {
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_some_and(|(scratch, _)| Arc::ptr_eq(scratch, &self.scratch)) {
            *last = None;
        }
    }
}
