//! The two threads of a link to another host.

use super::frame::{self, Frame, FrameError, Sink};
use crate::error::{Error, Result};
use crate::failure::Failure;
use crate::idle::Idle;
use crate::ring::{Channel, Command, Kind, SLOTS, STREAMS};
use std::io::{BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// Frames are collected up to this many bytes before they are written.
const BUFFER: usize = 64 << 10;
/// How long closing waits for the other side to have heard of it.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long one write may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A link to another host.
pub(crate) struct Bridge {
    rank: usize,
    socket: TcpStream,
    inbound: Arc<Channel>,
    outbound: Arc<Channel>,
    failure: Arc<Failure>,
    spin: Duration,
    /// Sequence number behind the last command that came, for each stream.
    received: [AtomicU64; STREAMS],
    /// This side closes.
    closing: AtomicBool,
    /// The other side closes and wants an answer.
    answer: AtomicBool,
    /// The other side has heard that this one closes.
    heard: AtomicBool,
}

impl Bridge {
    pub(crate) fn new(
        rank: usize,
        socket: TcpStream,
        inbound: Arc<Channel>,
        outbound: Arc<Channel>,
        failure: Arc<Failure>,
        spin: Duration,
    ) -> Result<Self> {
        let set = "setting up the data path to another host";
        socket.set_nonblocking(false).map_err(Error::io(set))?;
        socket.set_write_timeout(Some(WRITE_TIMEOUT)).map_err(Error::io(set))?;
        Ok(Self {
            rank,
            socket,
            inbound,
            outbound,
            failure,
            spin,
            received: Default::default(),
            closing: AtomicBool::new(false),
            answer: AtomicBool::new(false),
            heard: AtomicBool::new(false),
        })
    }

    /// Asks both threads to end, in order.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.outbound.bell().ring();
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    fn lost(&self, reason: String) {
        let expected = self.is_closing() || self.inbound.closed().load(Ordering::Acquire) != 0;
        if !expected {
            self.failure.set(Error::PeerGone { rank: self.rank, reason });
        }
    }

    /// The reader's thread.
    pub(crate) fn read(&self) {
        let mut from = BufReader::with_capacity(BUFFER, &self.socket);
        let mut sink = Incoming { bridge: self, next: 0, streams: vec![0; SLOTS as usize] };
        loop {
            match frame::read(&mut from, &mut sink) {
                Ok(()) => {}
                Err(FrameError::Io(error)) => {
                    self.lost(format!("its connection ended: {error}"));
                    break;
                }
                Err(error) => {
                    self.failure.set(Error::Protocol { rank: self.rank, reason: error.to_string() });
                    let _ = self.socket.shutdown(Shutdown::Both);
                    break;
                }
            }
        }
    }

    /// The writer's thread.
    pub(crate) fn write(&self) {
        if let Err(error) = self.try_write() {
            self.lost(format!("its connection ended: {error}"));
        }
        // Ends the reader as well.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn try_write(&self) -> std::io::Result<()> {
        let mut out =
            Outgoing { bridge: self, next: 0, reported: [0; STREAMS], failed: false, buffer: Vec::new() };
        let mut idle = Idle::new(self.spin);
        loop {
            // Before the last pass, so that it takes along all that was there.
            let closing = self.is_closing();
            if out.pass()? {
                idle.reset();
            } else if closing {
                break;
            } else if self.is_waiting() {
                std::thread::yield_now();
            } else if idle.turn() {
                self.outbound.parked().store(1, Ordering::SeqCst);
                fence(Ordering::SeqCst);
                if !out.has_work() {
                    self.outbound.bell().wait(&[], Duration::from_millis(100));
                }
                self.outbound.parked().store(0, Ordering::SeqCst);
                self.outbound.bell().hush();
            }
        }
        out.frame(Frame::Closed);
        out.flush()?;
        let start = Instant::now();
        let gone =
            || self.heard.load(Ordering::Acquire) || self.inbound.closed().load(Ordering::Acquire) != 0;
        while !gone() && start.elapsed() < FAREWELL {
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Whether commands that came are still being carried out: their completion is to be reported at once.
    fn is_waiting(&self) -> bool {
        (0..STREAMS).any(|stream| {
            self.received[stream].load(Ordering::Relaxed) > self.inbound.done(stream).load(Ordering::Relaxed)
        })
    }
}

/// What the reader does with frames.
struct Incoming<'a> {
    bridge: &'a Bridge,
    next: u64,
    /// Stream of the command that was last in each slot.
    streams: Vec<u8>,
}

impl Sink for Incoming<'_> {
    fn place(&mut self, sequence: u64, command: &Command) -> Result<&mut [u8], FrameError> {
        self.check(sequence)?;
        let staging = self.bridge.inbound.staging().ok_or(FrameError::NoStaging)?;
        let start =
            staging.bytes(command.from.1 as usize, command.size as usize).ok_or(FrameError::NoStaging)?;
        // SAFETY: inside the staging memory, which lives as long as the channel and is mapped by this process alone. The GPU reads it only for
        // commands that were posted; the sender reuses a place after those are done, and this command is not posted yet.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), command.size as usize) })
    }

    fn command(&mut self, sequence: u64, command: &Command) -> Result<(), FrameError> {
        self.check(sequence)?;
        let Bridge { inbound, outbound, received, .. } = self.bridge;
        self.streams[(sequence % SLOTS) as usize] = command.stream;
        if command.kind == Kind::Staged {
            inbound.ready(sequence).store(sequence + 1, Ordering::Release);
        }
        received[usize::from(command.stream)].store(sequence + 1, Ordering::Relaxed);
        inbound.post(sequence, command);
        self.next = sequence + 1;
        inbound.ring_bell();
        // The writer reports when it is done.
        outbound.ring_bell();
        Ok(())
    }

    fn other(&mut self, frame: Frame) -> Result<(), FrameError> {
        let Bridge { inbound, outbound, .. } = self.bridge;
        match frame {
            Frame::Done { stream, below } => outbound.done(stream).store(below, Ordering::Release),
            Frame::Closed => {
                inbound.closed().store(1, Ordering::Release);
                self.bridge.answer.store(true, Ordering::Release);
                outbound.bell().ring();
            }
            Frame::Goodbye => self.bridge.heard.store(true, Ordering::Release),
            Frame::Failed => outbound.failed().store(1, Ordering::Release),
            Frame::Command { .. } => {}
        }
        Ok(())
    }
}

impl Incoming<'_> {
    /// A command must be the next one, and its slot free.
    fn check(&self, sequence: u64) -> Result<(), FrameError> {
        if sequence != self.next {
            return Err(FrameError::Sequence { found: sequence, expected: self.next });
        }
        let stream = usize::from(self.streams[(sequence % SLOTS) as usize]);
        let needed = (sequence + 1).saturating_sub(SLOTS);
        if self.bridge.inbound.done(stream).load(Ordering::Acquire) < needed {
            return Err(FrameError::Overrun);
        }
        Ok(())
    }
}

/// What the writer has to say.
struct Outgoing<'a> {
    bridge: &'a Bridge,
    next: u64,
    reported: [u64; STREAMS],
    failed: bool,
    buffer: Vec<u8>,
}

impl Outgoing<'_> {
    fn has_work(&self) -> bool {
        let Bridge { inbound, outbound, .. } = self.bridge;
        outbound.is_posted(self.next)
            || self.bridge.is_waiting()
            || self.bridge.answer.load(Ordering::Acquire)
            || self.bridge.is_closing()
            || (0..STREAMS)
                .any(|stream| inbound.done(stream).load(Ordering::Acquire) != self.reported[stream])
    }

    /// Sends what there is. Returns whether there was anything.
    fn pass(&mut self) -> std::io::Result<bool> {
        let bridge = self.bridge;
        while self.buffer.len() < BUFFER && bridge.outbound.is_posted(self.next) {
            if !self.command()? {
                break;
            }
        }
        for stream in 0..STREAMS {
            let below = bridge.inbound.done(stream).load(Ordering::Acquire);
            if below != self.reported[stream] {
                self.reported[stream] = below;
                self.frame(Frame::Done { stream, below });
            }
        }
        if !self.failed && bridge.inbound.failed().load(Ordering::Acquire) != 0 {
            self.failed = true;
            self.frame(Frame::Failed);
        }
        if bridge.answer.swap(false, Ordering::AcqRel) {
            self.frame(Frame::Goodbye);
        }
        let worked = !self.buffer.is_empty();
        self.flush()?;
        Ok(worked)
    }

    /// Sends the next command, or says that its payload is not there yet.
    fn command(&mut self) -> std::io::Result<bool> {
        let outbound = &self.bridge.outbound;
        let sequence = self.next;
        let words = outbound.words(sequence);
        // This process wrote it.
        let command = Command::decode(&words).map_err(std::io::Error::other)?;
        if command.kind == Kind::Staged && outbound.ready(sequence).load(Ordering::Acquire) != sequence + 1 {
            return Ok(false);
        }
        let length = frame::WORDS as u32 + frame::payload(&command) as u32;
        self.frame(Frame::Command { sequence, length });
        self.buffer.extend_from_slice(bytemuck::cast_slice(&words));
        match command.kind {
            Kind::Inline => {
                self.buffer
                    .extend_from_slice(&outbound.inline(sequence, command.size)[..command.size as usize]);
            }
            Kind::Staged => {
                let (offset, size) = (command.from.1 as usize, command.size as usize);
                let start = outbound.staging().and_then(|staging| staging.bytes(offset, size));
                let start = start.ok_or_else(|| std::io::Error::other("no staging memory"))?;
                // SAFETY: inside the staging memory, which lives as long as the channel. The GPU has written it (the slot is ready), and the place
                // is not used again before the other side has reported the command as done.
                let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), size) };
                if size < BUFFER {
                    self.buffer.extend_from_slice(bytes);
                } else {
                    self.flush()?;
                    (&self.bridge.socket).write_all(bytes)?;
                }
            }
            _ => {}
        }
        self.next += 1;
        Ok(true)
    }

    fn frame(&mut self, frame: Frame) {
        self.buffer.extend_from_slice(&frame.encode());
    }

    fn flush(&mut self) -> std::io::Result<()> {
        (&self.bridge.socket).write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}
