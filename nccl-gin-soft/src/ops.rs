//! Puts, gets, flushes and their completion: what NCCL's progress threads call. None of it makes a CUDA call or waits.

use crate::abi::{SIGNAL_ADD, SIGNAL_INC};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::region::{Region, in_bounds};
use crate::ring::{Command, INLINE, Kind, NONE};
use crate::send::{Operation, Outbound};
use crate::ticket::Ticket;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// Memory that an operation names: handle and offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) handle: usize,
    pub(crate) offset: u64,
}

/// A word to add to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signal {
    pub(crate) word: Place,
    pub(crate) value: u64,
    pub(crate) operation: u32,
}

impl Comm {
    fn check_rank(&self, rank: u32) -> Result<usize> {
        let ranks = self.ranks();
        let index = rank as usize;
        if index < ranks { Ok(index) } else { Err(Error::Argument(format!("rank {rank} of {ranks}"))) }
    }

    /// A range of a rank's memory, for errors before anything is sent.
    fn check_range(&self, region: &Region, rank: usize, offset: u64, size: u64) -> Result<()> {
        let whole = region.peers[rank].size;
        if in_bounds(whole, offset, size) {
            return Ok(());
        }
        Err(Error::Argument(format!(
            "{size} bytes at offset {offset} of registration {}, which has {whole} bytes on rank {rank}",
            region.id
        )))
    }

    /// Copies from here to a rank, and adds to a word of it.
    pub(crate) fn put(
        &self,
        context: usize,
        from: Place,
        size: u64,
        to: Place,
        rank: u32,
        signal: Option<Signal>,
    ) -> Result<Ticket> {
        self.failure.check()?;
        let rank = self.check_rank(rank)?;
        let mut command = Command::new(Kind::Signal, context);
        let mut source = None;
        let regions = self.regions.read();
        if size > 0 {
            let region = regions.of_handle(from.handle)?;
            self.check_range(region, self.rank, from.offset, size)?;
            let target = regions.of_handle(to.handle)?;
            self.check_range(target, rank, to.offset, size)?;
            command.kind = self.route(region, rank, size)?;
            command.size = size;
            command.to = (target.id, to.offset);
            command.from = (region.id, from.offset);
            command.source_rank = self.rank as u16;
            if matches!(command.kind, Kind::Inline | Kind::Staged) {
                source = Some((Arc::clone(region), from.offset));
            }
        }
        if let Some(Signal { word, value, operation }) = signal {
            command.add = match operation {
                SIGNAL_INC => 1,
                SIGNAL_ADD => value,
                other => return Err(Error::Argument(format!("signal operation {other}"))),
            };
            let region = regions.of_handle(word.handle)?;
            self.check_range(region, rank, word.offset, 8)?;
            if word.offset % 8 != 0 {
                return Err(Error::Argument(format!("a signal at offset {}, no multiple of 8", word.offset)));
            }
            command.signal = (region.id, word.offset);
        } else if size == 0 {
            return Ok(Ticket::Done);
        }
        drop(regions);
        self.submit(rank, Operation { command, source, posted: 0 })
    }

    /// How payload of a registration gets to a rank.
    pub(crate) fn route(&self, region: &Region, rank: usize, size: u64) -> Result<Kind> {
        let staging = self.outbound[rank].channel.staging().is_some();
        if region.cpu && size <= INLINE {
            return Ok(Kind::Inline);
        }
        // A rank's own memory need not be mapped; pageable memory is not for the copy engines.
        if region.peers[rank].maps_ours || (rank == self.rank && region.device) {
            return Ok(Kind::Pull);
        }
        if staging {
            return Ok(Kind::Staged);
        }
        if region.cpu {
            return Ok(Kind::Inline);
        }
        Err(Error::Argument(format!("memory of registration {} cannot reach rank {rank}", region.id)))
    }

    /// Copies from a rank to here.
    pub(crate) fn get(&self, context: usize, from: Place, size: u64, to: Place, rank: u32) -> Result<Ticket> {
        self.failure.check()?;
        let rank = self.check_rank(rank)?;
        if size == 0 {
            return Ok(Ticket::Done);
        }
        let regions = self.regions.read();
        let source = regions.of_handle(from.handle)?;
        self.check_range(source, rank, from.offset, size)?;
        let target = regions.of_handle(to.handle)?;
        self.check_range(target, self.rank, to.offset, size)?;
        let mapped = rank == self.rank || source.peers[rank].mapping.is_some();
        let command = Command {
            size,
            to: (target.id, to.offset),
            from: (source.id, from.offset),
            source_rank: rank as u16,
            ..Command::new(if mapped { Kind::Get } else { Kind::Fetch }, context)
        };
        drop(regions);
        if mapped {
            // The own agent fetches it.
            return self.submit(self.rank, Operation { command, source: None, posted: 0 });
        }
        let index = {
            let mut fetches = self.fetches.lock().unwrap_or_else(PoisonError::into_inner);
            match fetches.free.pop_front() {
                Some(index) => index,
                None => {
                    fetches.answers.push(0);
                    (fetches.answers.len() - 1) as u32
                }
            }
        };
        let command = Command { ticket: index.into(), ..command };
        self.submit(rank, Operation { command, source: None, posted: 0 })?;
        Ok(Ticket::Fetch { rank, stream: command.stream.into(), index })
    }

    pub(crate) fn submit(&self, rank: usize, operation: Operation) -> Result<Ticket> {
        let stream = operation.command.stream.into();
        let (end, staged) = self.outbound[rank].submit(operation).inspect_err(|error| {
            self.failure.set(error.clone());
        })?;
        if staged {
            self.wake_agent();
        }
        Ok(Ticket::Post { rank, stream, end })
    }

    /// Wakes the own agent if it sleeps.
    fn wake_agent(&self) {
        self.inbound[self.rank].ring_bell();
    }

    /// Whether a request is done. A done one is forgotten.
    pub(crate) fn test(&self, request: usize) -> Result<bool> {
        let unknown = || Error::Argument(format!("{request:#x} is no request"));
        let (rank, done) = match Ticket::decode(request).ok_or_else(unknown)? {
            Ticket::Done => return Ok(true),
            Ticket::Post { rank, stream, end } => {
                let outbound = self.outbound.get(rank).ok_or_else(unknown)?;
                // Acquire: what the other side reports as done is done.
                (rank, outbound.channel.done(stream).load(Ordering::Acquire) >= end)
            }
            Ticket::Fetch { rank, stream, index } => {
                let inbound = self.inbound.get(rank).ok_or_else(unknown)?;
                let mut fetches = self.fetches.lock().unwrap_or_else(PoisonError::into_inner);
                let answer = *fetches.answers.get(index as usize).ok_or_else(unknown)?;
                let done = answer != 0 && inbound.done(stream).load(Ordering::Acquire) >= answer;
                if done {
                    fetches.answers[index as usize] = 0;
                    fetches.free.push_back(index);
                }
                (rank, done)
            }
        };
        if done {
            return Ok(true);
        }
        self.check_peer(rank)?;
        self.move_on(&self.outbound[rank])?;
        Ok(false)
    }

    /// Posts what has room by now, and leaves what is to be staged to the agent.
    fn move_on(&self, outbound: &Outbound) -> Result<()> {
        if outbound.has_waiting() {
            let (_, staged) = outbound.pump(None)?;
            if staged {
                self.wake_agent();
            }
        }
        Ok(())
    }

    fn check_peer(&self, rank: usize) -> Result<()> {
        if self.outbound[rank].channel.failed().load(Ordering::Acquire) != 0 {
            self.failure.set(Error::PeerFailed { rank });
        }
        self.failure.check()
    }

    /// Moves on what waits for room.
    pub(crate) fn progress(&self) -> Result<()> {
        self.outbound.iter().try_for_each(|outbound| self.move_on(outbound))?;
        self.failure.check()
    }

    /// Whether this connection can work no more, or another rank's end of it.
    pub(crate) fn has_failed(&self) -> bool {
        (0..self.ranks()).any(|rank| self.check_peer(rank).is_err())
    }

    /// Keeps where the answer to a fetch ends. Called by the agent.
    pub(crate) fn answer(&self, rank: usize, ticket: u64, below: u64) -> Result<()> {
        let mut fetches = self.fetches.lock().unwrap_or_else(PoisonError::into_inner);
        match usize::try_from(ticket).ok().and_then(|index| fetches.answers.get_mut(index)) {
            Some(answer) => {
                *answer = below;
                Ok(())
            }
            None => Err(Error::Protocol {
                rank,
                reason: format!("an answer to get {ticket}, which nobody asked"),
            }),
        }
    }

    /// Sends a rank what it asked for. Called by the agent.
    pub(crate) fn reply(&self, rank: usize, ask: &Command, source: Arc<Region>) -> Result<()> {
        let kind = self.route(&source, rank, ask.size)?;
        let command =
            Command { kind, source_rank: self.rank as u16, answers: true, signal: (NONE, 0), ..*ask };
        let offset = ask.from.1;
        self.submit(rank, Operation { command, source: Some((source, offset)), posted: 0 }).map(drop)
    }
}
