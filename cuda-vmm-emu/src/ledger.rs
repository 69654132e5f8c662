//! Everything that is alive in an emulator, and what went wrong on the side.

use crate::core::Core;
use crate::memory::access::Access;
use crate::memory::physical::{Location, Object};
use crate::memory::space::Kind;
use crate::status::{lock, read};
use cuda_vmm_sys::{CUdeviceptr, CUresult, Function};
use std::fmt;

/// What is alive in an [`Emulator`](crate::Emulator) at one moment.
///
/// Empty at the end of a test means that nothing leaked. `Display` lists it line by line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ledger {
    /// Ranges of `cuMemAddressReserve`.
    pub reservations: Vec<Span>,
    /// Handles that have not been released, of physical memory and multicast objects.
    pub handles: Vec<Handle>,
    /// Mappings of `cuMemMap`.
    pub mappings: Vec<Mapping>,
    /// Primary contexts that are retained.
    pub contexts: Vec<Context>,
    /// Handles of streams.
    pub streams: Vec<usize>,
    /// Handles of events.
    pub events: Vec<usize>,
    /// Handles of modules.
    pub modules: Vec<usize>,
    /// Handles of graphs and executable graphs.
    pub graphs: Vec<usize>,
    /// Allocations of `cuMemAlloc`.
    pub device_memory: Vec<Span>,
    /// Other processes' allocations, opened by IPC handles.
    pub opened: Vec<Span>,
    /// Allocations of `cuMemHostAlloc`.
    pub host_memory: Vec<Span>,
    /// Ranges of `cuMemHostRegister`.
    pub registered: Vec<Span>,
    /// Memory bound to multicast objects by this emulator.
    pub bindings: Vec<Binding>,
    /// Bytes in use on each device.
    pub device_bytes: Vec<u64>,
    /// What went wrong, or would have with a real driver, since the emulator was made. They do not count as alive.
    pub incidents: Vec<Incident>,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Span {
    /// First address.
    pub address: CUdeviceptr,
    /// Bytes.
    pub size: u64,
}

/// A handle of physical memory or of a multicast object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Handle {
    /// The handle.
    pub handle: u64,
    /// Bytes.
    pub size: u64,
    /// Where the memory is; `None` for a multicast object.
    pub location: Option<Location>,
    /// How often it must still be released.
    pub references: u64,
    /// Whether it came from another emulator.
    pub imported: bool,
}

/// A mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mapping {
    /// Addresses.
    pub span: Span,
    /// Handle of what is mapped; it may have been released.
    pub handle: u64,
    /// Where the memory is; `None` for a multicast object.
    pub location: Option<Location>,
    /// Access of the host.
    pub host: Access,
    /// Access of each device.
    pub devices: Vec<Access>,
}

/// A primary context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Context {
    /// Ordinal of its device.
    pub device: usize,
    /// How often it must still be released.
    pub retains: u64,
}

/// Memory that is bound to a multicast object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Binding {
    /// Handle of the object.
    pub object: u64,
    /// Handle of the memory.
    pub memory: u64,
    /// Ordinal of the device.
    pub device: usize,
    /// First byte in the object.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// Something that a user of the driver should know about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Incident {
    /// An operation of a stream failed after it was submitted, which ended the context.
    StreamFailed {
        /// Ordinal of the device.
        device: usize,
        /// What everything in the context returns since.
        error: CUresult,
    },
    /// A call needed all devices of a multicast object, and they were not there in time. A driver would have waited forever.
    WouldBlock {
        /// The function.
        function: Function,
        /// Devices that were there.
        added: u32,
        /// Devices that the object is for.
        devices: u32,
    },
    /// A graph was launched with a kernel whose module had been unloaded, or whose context had ended. The launch was refused; with a driver, anything
    /// may happen.
    Unloaded {
        /// Ordinal of the device.
        device: usize,
    },
    /// A defect of the emulator: it panicked in a function, which returned `CUDA_ERROR_UNKNOWN`.
    Panic {
        /// The function.
        function: Function,
    },
}

impl Ledger {
    pub(crate) fn of(core: &Core) -> Self {
        let mut ledger = Self { incidents: core.incidents(), ..Self::default() };
        {
            let contexts = lock(&core.contexts);
            for (device, context) in contexts.devices.iter().enumerate() {
                if context.retains > 0 {
                    ledger.contexts.push(Context { device, retains: context.retains });
                }
            }
            ledger.streams = contexts.streams.keys().copied().collect();
            ledger.events = contexts.events.keys().copied().collect();
        }
        ledger.modules = lock(&core.modules).handles();
        ledger.graphs = lock(&core.graphs).handles();
        let mut objects = Vec::new();
        {
            let handles = lock(&core.handles);
            for (&handle, held) in &handles.held {
                let (location, imported) = match &held.object {
                    Object::Physical(memory) => (Some(memory.location), memory.imported),
                    Object::Multicast(object) => (None, object.imported),
                };
                let (size, references) = (held.object.size(), held.references);
                ledger.handles.push(Handle { handle, size, location, references, imported });
                objects.push(held.object.clone());
            }
        }
        {
            let space = read(&core.space);
            ledger.reservations =
                space.reservations.iter().map(|(&address, &size)| Span { address, size }).collect();
            for (&address, range) in &space.ranges {
                let span = Span { address, size: range.size };
                match &range.kind {
                    Kind::Mapping { object, access } => {
                        objects.push(object.clone());
                        ledger.mappings.push(Mapping {
                            span,
                            handle: object.handle(),
                            location: range.location(),
                            host: access.host,
                            devices: access.devices.clone(),
                        });
                    }
                    Kind::Plain { .. } => ledger.device_memory.push(span),
                    Kind::Opened { .. } => ledger.opened.push(span),
                    Kind::Host { .. } => ledger.host_memory.push(span),
                    Kind::Registered { .. } => ledger.registered.push(span),
                }
            }
        }
        objects.sort_by_key(Object::handle);
        objects.dedup_by_key(|object| object.handle());
        for object in objects {
            if let Object::Multicast(object) = object {
                ledger.bindings.extend(object.own_bindings());
            }
        }
        ledger.device_bytes = core.accounts.iter().map(|account| account.used()).collect();
        ledger.handles.sort_by_key(|handle| handle.handle);
        ledger.streams.sort_unstable();
        ledger.events.sort_unstable();
        ledger.modules.sort_unstable();
        ledger.graphs.sort_unstable();
        ledger
    }

    /// Whether nothing is alive. Incidents do not count.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.reservations.is_empty()
            && self.handles.is_empty()
            && self.mappings.is_empty()
            && self.contexts.is_empty()
            && self.streams.is_empty()
            && self.events.is_empty()
            && self.modules.is_empty()
            && self.graphs.is_empty()
            && self.device_memory.is_empty()
            && self.opened.is_empty()
            && self.host_memory.is_empty()
            && self.registered.is_empty()
            && self.bindings.is_empty()
            && self.device_bytes.iter().all(|&bytes| bytes == 0)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}, {} bytes", self.address, self.size)
    }
}

/// `device 0`, or what stands for no single place.
struct Place(Option<Location>);

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(location) => location.fmt(f),
            None => f.write_str("multicast object"),
        }
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() && self.incidents.is_empty() {
            return f.write_str("nothing is alive");
        }
        for span in &self.reservations {
            writeln!(f, "reservation: {span}")?;
        }
        for Handle { handle, size, location, references, imported } in &self.handles {
            let origin = if *imported { "imported" } else { "created" };
            let place = Place(*location);
            writeln!(f, "handle: {handle:#x}, {size} bytes, {place}, {origin}, {references} references")?;
        }
        for Mapping { span, handle, location, host, devices } in &self.mappings {
            let place = Place(*location);
            writeln!(f, "mapping: {span}, of {handle:#x} ({place}), host {host:?}, devices {devices:?}")?;
        }
        for Context { device, retains } in &self.contexts {
            writeln!(f, "context: of device {device}, {retains} references")?;
        }
        for (what, handles) in [
            ("stream", &self.streams),
            ("event", &self.events),
            ("module", &self.modules),
            ("graph", &self.graphs),
        ] {
            for handle in handles {
                writeln!(f, "{what}: {handle:#x}")?;
            }
        }
        for (what, spans) in [
            ("device memory", &self.device_memory),
            ("opened IPC handle", &self.opened),
            ("host memory", &self.host_memory),
            ("registered memory", &self.registered),
        ] {
            for span in spans {
                writeln!(f, "{what}: {span}")?;
            }
        }
        for Binding { object, memory, device, offset, size } in &self.bindings {
            writeln!(
                f,
                "binding: {memory:#x} to {object:#x} for device {device}, {size} bytes at {offset:#x}"
            )?;
        }
        for (device, bytes) in self.device_bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0) {
            writeln!(f, "device {device}: {bytes} bytes in use")?;
        }
        for incident in &self.incidents {
            writeln!(f, "incident: {incident}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Incident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StreamFailed { device, error } => {
                write!(f, "work of a stream on device {device} failed with {error}")
            }
            Self::WouldBlock { function, added, devices } => write!(
                f,
                "{} needs all {devices} devices of the multicast object and found {added}; a driver would have waited forever",
                function.symbol()
            ),
            Self::Unloaded { device } => {
                write!(
                    f,
                    "a graph was launched with a kernel of device {device} whose module is not loaded any more"
                )
            }
            Self::Panic { function } => {
                write!(f, "the emulator panicked in {}: a defect of its own", function.symbol())
            }
        }
    }
}
