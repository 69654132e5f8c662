//! All the steps for several processes, with an agreement after each.

use super::agreement::Agreement;
use super::object::check_supported;
use super::outcome::{Outcome, PAYLOAD, Step, Verdict, agree};
use super::{Incomplete, Multicast, ObjectProperties, check_switch, until};
use crate::cuda::Cuda;
use crate::device::{Device, Uuid};
use crate::error::{Error, Result};
use crate::location::{Grant, Location};
use crate::memory::DeviceAddress;
use crate::physical::PhysicalMemory;
use crate::properties::HandleTypes;
use crate::reservation::Rejected;
use crate::share::FabricHandle;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Where the UUIDs of a member's devices start in its first message.
const UUIDS_AT: usize = 32;
/// Devices that one member may bring.
const MAX_DEVICES: usize = (PAYLOAD - UUIDS_AT) / 16;

/// How long a team is waited for, and how often it is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    timeout: Duration,
    attempts: u32,
    pause: Duration,
}

impl Default for Options {
    /// 60 seconds, and 10 attempts with a pause of one second between them.
    fn default() -> Self {
        Self { timeout: Duration::from_secs(60), attempts: 10, pause: Duration::from_secs(1) }
    }
}

impl Options {
    /// When every member returns at the latest, counted from its call, whatever the others do.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How often all members together start anew when a driver says that the system is not ready (`CUDA_ERROR_SYSTEM_NOT_READY`, which a
    /// fabric manager under load causes for seconds). The same on all members; at least 1.
    #[must_use]
    pub const fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = if attempts == 0 { 1 } else { attempts };
        self
    }

    /// How long a member rests before another attempt.
    #[must_use]
    pub const fn pause(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }
}

/// A multicast object of several processes, ready for use: every byte is backed by memory of every device of every member, and every
/// member has mapped it.
///
/// Rank 0 creates and exports the object, the others import it, and all add their devices, bind their memory and map the object. After each
/// of these steps all members hear how it went on each: the first failure ends it on all of them, with an error that names the member, and
/// leaves nothing behind. Nobody binds or maps, which would block, before every member has said that its devices are there.
///
/// Dropping a team releases what is local, without asking the others: no device of any member may still use the address.
/// [`close`](Self::close) makes sure of the members' consent first.
///
/// ```
/// use cuda_vmm::multicast::{Options, SocketStar, Team};
/// use cuda_vmm::{Cuda, PhysicalMemory, Properties};
/// use std::os::unix::net::UnixStream;
/// # use cuda_vmm_emu::{Config, Emulator};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # if cuda_vmm::multicast_disabled_by().is_some() { return Ok(()) }
/// # let emulator = Emulator::new(Config::h200x2())?;
/// # let cuda = Cuda::with_driver(emulator.driver())?;
/// // Two members; here they are threads, each with a device.
/// let (zero, one) = UnixStream::pair()?;
/// let member = |cuda: &Cuda, device, mut star: SocketStar| -> cuda_vmm::Result<()> {
///     let memory = PhysicalMemory::create(cuda, 2 << 20, &Properties::device(device).shareable())?;
///     let team = Team::create(&[memory], &mut star, &Options::default())?;
///     println!("rank {} of {}: {}", team.rank(), team.ranks(), team.address());
///     team.close(&mut star, std::time::Duration::from_secs(10))?;
///     Ok(())
/// };
/// std::thread::scope(|scope| {
///     let other = scope.spawn(|| member(&cuda, 1, SocketStar::member(1, 2, one)));
///     member(&cuda, 0, SocketStar::root(vec![zero]))?;
///     other.join().expect("no panic")
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Team {
    multicast: Multicast,
    // Narrow, so that results that give a team back stay small.
    rank: u32,
    ranks: u32,
}

impl Team {
    /// Makes a team of what all members bring: each one or more whole allocations of one size, every one on a device of its own. With more
    /// than one member the memory must have been created for export.
    ///
    /// All members call this with the same options. File descriptors are used if the agreement carries them, FABRIC handles otherwise.
    ///
    /// # Errors
    /// The same step fails on all members: with its own error on the member that failed, and with [`Error::Member`] on the others.
    /// [`Error::Disagreement`] if sizes or options differ, [`Error::MulticastDisabled`], and what the steps of
    /// [`Incomplete`] and [`Object`](super::Object) return. [`Error::Member`] as well for a member that does not answer in time.
    pub fn create(
        memories: &[PhysicalMemory],
        agreement: &mut dyn Agreement,
        options: &Options,
    ) -> Result<Self> {
        let deadline = until(options.timeout);
        let plan = Plan::agree(memories, agreement, options, deadline).map_err(|verdict| verdict.error)?;
        let (rank, ranks) = (agreement.rank() as u32, agreement.ranks() as u32);
        let mut attempts = options.attempts;
        loop {
            let refused = match plan.attempt(agreement, deadline) {
                Ok(multicast) => return Ok(Self { multicast, rank, ranks }),
                Err(verdict) => verdict,
            };
            attempts -= 1;
            if !refused.transient || attempts == 0 {
                return Err(refused.error);
            }
            // What the attempt made is gone on this member; nobody starts anew before it is on all.
            agree(agreement, Step::Release, Ok(Vec::new()), deadline).map_err(|verdict| verdict.error)?;
            std::thread::sleep(options.pause.min(deadline.saturating_duration_since(Instant::now())));
        }
    }

    /// Ends the team with the members' consent: waits until every member has called this, then releases what this one has. No device may still
    /// use the address when it is called.
    ///
    /// # Errors
    /// With the team: [`Error::Member`], [`Error::TimedOut`] or what the agreement returns, if some member does not close.
    pub fn close(self, agreement: &mut dyn Agreement, timeout: Duration) -> Result<(), Rejected<Self>> {
        match agree(agreement, Step::Close, Ok(Vec::new()), until(timeout)) {
            Ok(_) => Ok(()),
            Err(verdict) => Err(Rejected { object: self, error: verdict.error }),
        }
    }

    /// First address, for `multimem` instructions of this member's devices. It differs between members.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.multicast.address()
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.multicast.size()
    }

    /// Number of devices of all members.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.multicast.object().devices()
    }

    /// This member's rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Number of members.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks as usize
    }

    /// The object, its mapping and this member's bindings.
    #[must_use]
    pub fn multicast(&self) -> &Multicast {
        &self.multicast
    }
}

/// What one attempt needs.
struct Plan<'a> {
    cuda: &'a Cuda,
    memories: &'a [PhysicalMemory],
    devices: Vec<Device>,
    properties: ObjectProperties,
    by_fd: bool,
}

impl<'a> Plan<'a> {
    /// Checks what this member brings, and compares it with what the others do.
    fn agree(
        memories: &'a [PhysicalMemory],
        agreement: &mut dyn Agreement,
        options: &Options,
        deadline: Instant,
    ) -> Result<Self, Verdict> {
        let (ranks, by_fd) = (agreement.ranks(), agreement.carries_fds());
        let check =
            Checked::new(memories, ranks > 1).map(|checked| (checked.message(by_fd, options), checked));
        let (message, checked) = match check {
            Ok((message, checked)) => (Ok(message), Some(checked)),
            Err(error) => (Err(error), None),
        };
        let members = agree(agreement, Step::Check, message, deadline)?;
        // No member is without a check where all fared well.
        let Some(Checked { cuda, devices, size, .. }) = checked else {
            return Err(Error::Zero { what: "number of allocations" }.into());
        };
        let mine = &members[agreement.rank().min(members.len() - 1)];
        let total = compare(mine, &members)?;
        let types = match (ranks, by_fd) {
            (1, _) => HandleTypes::empty(),
            (_, true) => HandleTypes::POSIX_FD,
            (_, false) => HandleTypes::FABRIC,
        };
        let properties = ObjectProperties::new(total, size).handle_types(types);
        Ok(Self { cuda, memories, devices, properties, by_fd })
    }

    /// All steps, once. Whatever it made is gone if it fails.
    fn attempt(&self, agreement: &mut dyn Agreement, deadline: Instant) -> Result<Multicast, Verdict> {
        let (root, alone) = (agreement.rank() == 0, agreement.ranks() == 1);

        let created =
            self.check_size().and_then(|()| if root { self.create(alone).map(Some) } else { Ok(None) });
        let handle = |created: &Option<Created>| {
            let fabric = created.as_ref().and_then(|created| created.fabric);
            fabric.map_or_else(Vec::new, |handle| handle.as_bytes().to_vec())
        };
        let (created, members) = step(agreement, Step::Create, created, handle, deadline)?;

        let imported = match created {
            Some(Created { object, fd: Some(fd), .. }) => {
                agreement.distribute(Some(fd.as_fd()), deadline).map(|_| object)
            }
            Some(Created { object, .. }) => Ok(object),
            None if self.by_fd => agreement.distribute(None, deadline).and_then(|fd| self.import_fd(fd)),
            None => self.import_fabric(&members[0]),
        };
        let (mut object, _) = step(agreement, Step::Import, imported, |_| Vec::new(), deadline)?;

        let added = self.devices.iter().try_for_each(|device| object.add_device(device));
        step(agreement, Step::Add, added, |()| Vec::new(), deadline)?;
        let object = object.assume_complete();

        let bound = self.memories.iter().map(|memory| object.bind(0, memory, 0, memory.size())).collect();
        let (bindings, _) = step(agreement, Step::Bind, bound, |_: &Vec<_>| Vec::new(), deadline)?;

        let grants: Vec<_> = self.devices.iter().map(|device| Grant::device(device.ordinal())).collect();
        let mapped = object.map().and_then(|mapping| mapping.prepare(&bindings, &grants).map(|()| mapping));
        let (mapping, _) = step(agreement, Step::Map, mapped, |_| Vec::new(), deadline)?;
        Ok(mapping.assume_active(bindings))
    }

    /// Every member checks, so that all refuse alike.
    fn check_size(&self) -> Result<()> {
        let granularity = self.properties.granularities(self.cuda)?.minimum;
        granularity.check("size of the memory of a multicast object", self.properties.size())
    }

    fn create(&self, alone: bool) -> Result<Created> {
        let object = Incomplete::create(self.cuda, &self.properties)?;
        let (mut fd, mut fabric) = (None, None);
        if !alone && self.by_fd {
            fd = Some(object.export_fd()?);
        } else if !alone {
            fabric = Some(object.export_fabric()?);
        }
        Ok(Created { object, fd, fabric })
    }

    fn import_fd(&self, fd: Option<OwnedFd>) -> Result<Incomplete> {
        let none = Error::DescriptorCount { received: 0, expected: 1, truncated: false };
        Incomplete::import_fd(self.cuda, fd.ok_or(none)?, &self.properties)
    }

    fn import_fabric(&self, root: &Outcome) -> Result<Incomplete> {
        let bytes = std::array::from_fn(|index| root.payload()[index]);
        Incomplete::import_fabric(self.cuda, &FabricHandle::from_bytes(bytes), &self.properties)
    }
}

/// What rank 0 made.
struct Created {
    object: Incomplete,
    fd: Option<OwnedFd>,
    fabric: Option<FabricHandle>,
}

/// Agrees on a step, and keeps its result if it went well everywhere.
fn step<T>(
    agreement: &mut dyn Agreement,
    step: Step,
    result: Result<T>,
    payload: impl FnOnce(&T) -> Vec<u8>,
    deadline: Instant,
) -> Result<(T, Vec<Outcome>), Verdict> {
    match result {
        Ok(value) => agree(agreement, step, Ok(payload(&value)), deadline).map(|members| (value, members)),
        Err(error) => match agree(agreement, step, Err(error), deadline) {
            Err(verdict) => Err(verdict),
            // `agree` returns an error for an error.
            Ok(_) => Err(Error::BadMessage { rank: 0, why: "a failure was lost" }.into()),
        },
    }
}

/// What one member brings, found to be sound.
struct Checked<'a> {
    cuda: &'a Cuda,
    devices: Vec<Device>,
    size: usize,
    uuids: Vec<Uuid>,
}

impl<'a> Checked<'a> {
    fn new(memories: &'a [PhysicalMemory], shared: bool) -> Result<Self> {
        check_switch()?;
        let Some(first) = memories.first() else {
            return Err(Error::Zero { what: "number of allocations" });
        };
        if memories.len() > MAX_DEVICES {
            let why = format!("{} devices, and a member brings {MAX_DEVICES} at most", memories.len());
            return Err(Error::Unsupported { what: "a team of so many devices", why });
        }
        let (cuda, size) = (first.cuda(), first.size());
        let (mut devices, mut uuids) = (Vec::new(), Vec::new());
        for memory in memories {
            cuda.check_same(memory.cuda(), "physical memory")?;
            let Location::Device(ordinal) = memory.location() else {
                return Err(Error::NotInTeam { what: "memory", location: memory.location() });
            };
            let device = cuda.device(ordinal)?;
            if devices.contains(&device) {
                return Err(Error::DeviceTwice { ordinal });
            }
            if memory.size() != size {
                let (what, offset, length) = ("the memory of each device", 0, memory.size());
                return Err(Error::OutOfBounds { what, offset, length, limit: size });
            }
            if shared && !memory.may_be_shared() {
                let why = "it was not created for export, and the team has other processes".into();
                return Err(Error::Unsupported { what: "binding this memory", why });
            }
            check_supported(&device)?;
            uuids.push(device.uuid()?);
            devices.push(device);
        }
        Ok(Self { cuda, devices, size, uuids })
    }

    /// | offset | bytes | field |
    /// |---|---|---|
    /// | 0 | 4 | number of devices |
    /// | 4 | 8 | size of each |
    /// | 12 | 4 | whether the agreement carries file descriptors |
    /// | 16 | 4 | attempts |
    /// | 32 | 16 each | UUIDs of the devices |
    fn message(&self, by_fd: bool, options: &Options) -> Vec<u8> {
        let mut out = Vec::with_capacity(PAYLOAD);
        out.extend_from_slice(&(self.devices.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.size as u64).to_le_bytes());
        out.extend_from_slice(&u32::from(by_fd).to_le_bytes());
        out.extend_from_slice(&options.attempts.to_le_bytes());
        out.resize(UUIDS_AT, 0);
        out.extend(self.uuids.iter().flat_map(|uuid| uuid.0));
        out
    }
}

/// Compares what the members bring, and counts the devices.
fn compare(mine: &Outcome, members: &[Outcome]) -> Result<u32> {
    let size = |member: &Outcome| u64::from(member.number(4)) | u64::from(member.number(8)) << 32;
    let (mut total, mut seen) = (0_u32, Vec::<(Uuid, usize)>::new());
    for (rank, member) in members.iter().enumerate() {
        let same = [
            ("the size of the memory", size(mine), size(member)),
            ("whether file descriptors can be passed", mine.number(12).into(), member.number(12).into()),
            ("the number of attempts", mine.number(16).into(), member.number(16).into()),
        ];
        if let Some(&(what, mine, theirs)) = same.iter().find(|(_, mine, theirs)| mine != theirs) {
            return Err(Error::Disagreement { what, rank, mine, theirs });
        }
        let devices = member.number(0) as usize;
        if !(1..=MAX_DEVICES).contains(&devices) {
            return Err(Error::BadMessage { rank, why: "it brings an impossible number of devices" });
        }
        for index in 0..devices {
            let at = UUIDS_AT + 16 * index;
            let uuid = Uuid(std::array::from_fn(|byte| member.payload()[at + byte]));
            if let Some((_, other)) = seen.iter().find(|(known, _)| *known == uuid) {
                let reason = format!("it brings device {uuid}, and so does rank {other}");
                return Err(Error::Member { rank, step: "checking what it brings", status: None, reason });
            }
            seen.push((uuid, rank));
        }
        total += devices as u32;
    }
    Ok(total)
}
