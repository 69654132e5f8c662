//! Primary contexts, each thread's stack of current contexts, and peer access.

use crate::core::{Core, fresh_handle};
use crate::memory::space::Kind;
use crate::status::{Outcome, code, lock, put, require, write};
use crate::stream::{Event, Stream};
use cuda_vmm_sys::ffi::{c_int, c_uint};
use cuda_vmm_sys::{CUcontext, CUdevice, CUresult};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::ThreadId;

/// The error that has ended a context, if any. Everything that runs in it returns the error from then on.
#[derive(Debug, Default)]
pub(crate) struct Poison(AtomicU32);

impl Poison {
    pub(crate) fn check(&self) -> Outcome {
        match self.0.load(Ordering::Acquire) {
            0 => Ok(()),
            number => {
                let mut code = CUresult::CUDA_SUCCESS;
                code.0 = number;
                Err(code)
            }
        }
    }

    /// Ends the context with an error; the first one stays.
    pub(crate) fn set(&self, error: CUresult) {
        let _ = self.0.compare_exchange(0, error.0, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// The primary context of one device.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) handle: usize,
    pub(crate) retains: u64,
    pub(crate) poison: Arc<Poison>,
    /// Devices whose contexts this one may address.
    pub(crate) peers: BTreeSet<usize>,
    /// The legacy default stream, made on first use.
    pub(crate) default_stream: Option<Arc<Stream>>,
    /// The default streams of threads that asked for theirs.
    pub(crate) thread_streams: HashMap<ThreadId, Arc<Stream>>,
    /// Streams that were destroyed before their work was done.
    pub(crate) draining: Vec<Arc<Stream>>,
}

/// All contexts, and the streams and events in them.
#[derive(Debug, Default)]
pub(crate) struct Contexts {
    pub(crate) devices: Vec<Context>,
    pub(crate) streams: HashMap<usize, Arc<Stream>>,
    pub(crate) events: HashMap<usize, Arc<Event>>,
}

impl Contexts {
    pub(crate) fn new(devices: usize) -> Self {
        let context = |_| Context {
            handle: fresh_handle(),
            retains: 0,
            poison: Arc::default(),
            peers: BTreeSet::new(),
            default_stream: None,
            thread_streams: HashMap::new(),
            draining: Vec::new(),
        };
        Self { devices: (0..devices).map(context).collect(), ..Self::default() }
    }

    /// Device of an active context.
    pub(crate) fn device_of(&self, handle: usize) -> Outcome<usize> {
        let device =
            self.devices.iter().position(|context| context.handle == handle).ok_or(code::INVALID_CONTEXT)?;
        if self.devices[device].retains == 0 { Err(code::CONTEXT_IS_DESTROYED) } else { Ok(device) }
    }

    /// Every stream of a device's context: the default ones too, and those that were destroyed and still have work.
    pub(crate) fn streams_of(&self, device: usize) -> Vec<Arc<Stream>> {
        let context = &self.devices[device];
        let mut all: Vec<_> =
            self.streams.values().filter(|stream| stream.device == device).cloned().collect();
        all.extend(context.default_stream.iter().cloned());
        all.extend(context.thread_streams.values().cloned());
        all.extend(context.draining.iter().cloned());
        all
    }

    /// Every stream of every device's context.
    pub(crate) fn all_streams(&self) -> Vec<Arc<Stream>> {
        (0..self.devices.len()).flat_map(|device| self.streams_of(device)).collect()
    }
}

thread_local! {
    /// Emulator → this thread's stack of contexts. An entry goes with its last context.
    static STACKS: RefCell<HashMap<u64, Vec<usize>>> = RefCell::default();
}

impl Core {
    /// The context on top of the calling thread's stack, alive or not.
    fn top(&self) -> Option<usize> {
        STACKS.with_borrow(|stacks| stacks.get(&self.id)?.last().copied())
    }

    /// Device of the calling thread's current context.
    pub(crate) fn current(&self) -> Outcome<usize> {
        let handle = self.top().ok_or(code::INVALID_CONTEXT)?;
        lock(&self.contexts).device_of(handle)
    }

    /// The same, if no error has ended the context.
    pub(crate) fn current_healthy(&self) -> Outcome<usize> {
        let handle = self.top().ok_or(code::INVALID_CONTEXT)?;
        let contexts = lock(&self.contexts);
        let device = contexts.device_of(handle)?;
        contexts.devices[device].poison.check()?;
        Ok(device)
    }

    /// Device of the current context, for who holds the contexts already.
    pub(crate) fn current_in(&self, contexts: &Contexts) -> Option<usize> {
        contexts.device_of(self.top()?).ok()
    }

    /// Device of a context that a caller names.
    pub(crate) fn device_of(&self, context: CUcontext) -> Outcome<usize> {
        lock(&self.contexts).device_of(context as usize)
    }

    fn push(&self, handle: usize) {
        STACKS.with_borrow_mut(|stacks| stacks.entry(self.id).or_default().push(handle));
    }

    fn pop(&self) -> Option<usize> {
        STACKS.with_borrow_mut(|stacks| {
            let stack = stacks.get_mut(&self.id)?;
            let top = stack.pop();
            if stack.is_empty() {
                stacks.remove(&self.id);
            }
            top
        })
    }

    /// Waits for all work of a device's context.
    pub(crate) fn finish_context(&self, device: usize) -> Outcome {
        let (streams, poison) = {
            let contexts = lock(&self.contexts);
            (contexts.streams_of(device), Arc::clone(&contexts.devices[device].poison))
        };
        for stream in streams {
            stream.finish(self);
        }
        poison.check()
    }

    /// Ends a device's context: its streams, events, modules and memory go. Physical memory and mappings belong to no context and stay.
    fn destroy_context(&self, device: usize) {
        let _ = self.finish_context(device);
        let mut gone = (Vec::new(), Vec::new());
        {
            let mut contexts = lock(&self.contexts);
            gone.0.extend(contexts.streams.extract_if(|_, stream| stream.device == device));
            gone.1.extend(contexts.events.extract_if(|_, event| event.device == device));
            let context = &mut contexts.devices[device];
            context.peers.clear();
            context.default_stream = None;
            context.thread_streams.clear();
            context.draining.clear();
            context.poison = Arc::default();
        }
        drop(gone);
        self.unload_context(device);
        let mut space = write(&self.space);
        let starts: Vec<u64> = space
            .ranges
            .iter()
            .filter(|(_, range)| match range.kind {
                Kind::Plain { device: of, .. }
                | Kind::Opened { device: of, .. }
                | Kind::Host { device: of, .. }
                | Kind::Registered { device: of } => of == device,
                Kind::Mapping { .. } => false,
            })
            .map(|(&start, _)| start)
            .collect();
        for start in starts {
            space.remove_whole(start);
        }
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes. Context handles are
/// only compared, never followed.
impl Core {
    pub(crate) unsafe fn cuDevicePrimaryCtxRetain(
        self: &Arc<Self>,
        context: *mut CUcontext,
        device: CUdevice,
    ) -> Outcome {
        let ordinal = self.ordinal(device)?;
        require(!context.is_null())?;
        let handle = {
            let mut contexts = lock(&self.contexts);
            contexts.devices[ordinal].retains += 1;
            contexts.devices[ordinal].handle
        };
        // SAFETY: not null, and the caller's contract.
        unsafe { put(context, handle as CUcontext) }
    }

    pub(crate) unsafe fn cuDevicePrimaryCtxRelease(self: &Arc<Self>, device: CUdevice) -> Outcome {
        let ordinal = self.ordinal(device)?;
        let last = {
            let mut contexts = lock(&self.contexts);
            let context = &mut contexts.devices[ordinal];
            context.retains = context.retains.checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
            context.retains == 0
        };
        if last {
            self.destroy_context(ordinal);
        }
        Ok(())
    }

    pub(crate) unsafe fn cuDevicePrimaryCtxGetState(
        self: &Arc<Self>,
        device: CUdevice,
        flags: *mut c_uint,
        active: *mut c_int,
    ) -> Outcome {
        let ordinal = self.ordinal(device)?;
        let retained = lock(&self.contexts).devices[ordinal].retains > 0;
        // SAFETY: the caller's contract.
        unsafe {
            put(flags, 0)?;
            put(active, c_int::from(retained))
        }
    }

    pub(crate) unsafe fn cuCtxSetCurrent(self: &Arc<Self>, context: CUcontext) -> Outcome {
        if context.is_null() {
            self.pop();
            return Ok(());
        }
        self.device_of(context)?;
        self.pop();
        self.push(context as usize);
        Ok(())
    }

    pub(crate) unsafe fn cuCtxGetCurrent(self: &Arc<Self>, context: *mut CUcontext) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { put(context, self.top().unwrap_or(0) as CUcontext) }
    }

    pub(crate) unsafe fn cuCtxPushCurrent(self: &Arc<Self>, context: CUcontext) -> Outcome {
        self.device_of(context)?;
        self.push(context as usize);
        Ok(())
    }

    pub(crate) unsafe fn cuCtxPopCurrent(self: &Arc<Self>, context: *mut CUcontext) -> Outcome {
        let top = self.pop().ok_or(code::INVALID_CONTEXT)?;
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: not null, and the caller's contract.
        unsafe { put(context, top as CUcontext) }
    }

    pub(crate) unsafe fn cuCtxGetDevice(self: &Arc<Self>, device: *mut CUdevice) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { put(device, self.current()? as CUdevice) }
    }

    pub(crate) unsafe fn cuCtxSynchronize(self: &Arc<Self>) -> Outcome {
        let device = self.current()?;
        self.refuse_in_captured_context(device)?;
        self.finish_context(device)
    }

    pub(crate) unsafe fn cuCtxGetStreamPriorityRange(
        self: &Arc<Self>,
        least: *mut c_int,
        greatest: *mut c_int,
    ) -> Outcome {
        self.current()?;
        for (out, value) in [(least, 0), (greatest, -5)] {
            if !out.is_null() {
                // SAFETY: not null, and the caller's contract.
                unsafe { put(out, value)? };
            }
        }
        Ok(())
    }

    pub(crate) unsafe fn cuCtxEnablePeerAccess(self: &Arc<Self>, peer: CUcontext, flags: c_uint) -> Outcome {
        require(flags == 0)?;
        let (device, peer) = (self.current()?, self.device_of(peer)?);
        if device == peer {
            return Err(code::INVALID_DEVICE);
        }
        if !self.config.reaches(device, peer) {
            return Err(code::PEER_ACCESS_UNSUPPORTED);
        }
        if lock(&self.contexts).devices[device].peers.insert(peer) {
            Ok(())
        } else {
            Err(code::PEER_ACCESS_ALREADY_ENABLED)
        }
    }

    pub(crate) unsafe fn cuCtxDisablePeerAccess(self: &Arc<Self>, peer: CUcontext) -> Outcome {
        let (device, peer) = (self.current()?, self.device_of(peer)?);
        if lock(&self.contexts).devices[device].peers.remove(&peer) {
            Ok(())
        } else {
            Err(code::PEER_ACCESS_NOT_ENABLED)
        }
    }
}
