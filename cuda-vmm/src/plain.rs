//! Memory of `cuMemAlloc`, and its inter-process handles: what there was before virtual memory management.

use crate::context::Context;
use crate::cuda::Cuda;
use crate::error::{Attempt, Error, Result};
use crate::memory::{DeviceAddress, Memory};
use crate::release::released;
use cuda_vmm_sys::{CUipcMem_flags, CUipcMemHandle, ffi::c_char};
use std::fmt;

/// Device memory of `cuMemAlloc`. It lives in one context; other processes reach it through an [`IpcHandle`].
///
/// Dropping it calls `cuMemFree`, which waits for the device's work: memory of [virtual memory management](crate::PhysicalMemory) is
/// the one for work that may hang.
#[derive(Debug)]
pub struct PlainMemory {
    context: Context,
    address: u64,
    size: usize,
}

impl PlainMemory {
    /// Allocates `size` bytes.
    ///
    /// Calls `cuMemAlloc`.
    ///
    /// # Errors
    /// [`Error::Zero`] or [`Error::Call`].
    #[doc(alias = "cuMemAlloc")]
    pub fn new(context: &Context, size: usize) -> Result<Self> {
        if size == 0 {
            return Err(Error::Zero { what: "size of an allocation" });
        }
        let ordinal = context.device().ordinal();
        let _bound = context.bind()?;
        let mut address = 0;
        // SAFETY: `address` is valid for one write, and the context is current. Freed in Drop.
        unsafe { context.device().cuda().driver().cuMemAlloc(&mut address, size) }
            .attempt(|| format!("allocating {size} bytes on device {ordinal}"))?;
        Ok(Self { context: context.clone(), address, size })
    }

    /// The context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// A handle for other processes. The memory must stay alive while they use it.
    ///
    /// Calls `cuIpcGetMemHandle`.
    ///
    /// # Errors
    /// [`Error::Call`].
    #[doc(alias = "cuIpcGetMemHandle")]
    pub fn ipc_handle(&self) -> Result<IpcHandle> {
        let _bound = self.context.bind()?;
        let mut raw = CUipcMemHandle::default();
        // SAFETY: `raw` is valid for one write; the address is that of a whole allocation, which is alive.
        unsafe { self.cuda().driver().cuIpcGetMemHandle(&mut raw, self.address) }
            .attempt(|| format!("exporting {} bytes of plain memory", self.size))?;
        Ok(IpcHandle(raw.reserved.map(|byte| byte as u8)))
    }
}

impl Drop for PlainMemory {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: allocated by `new` and freed once. The driver waits for the device's work on it.
            released("plain memory", unsafe {
                self.context.device().cuda().driver().cuMemFree(self.address)
            });
        }
    }
}

/// Names memory of `cuMemAlloc` for another process of the same host: 64 bytes. Whoever has them can read and write the memory,
/// so that they are not printed in full.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpcHandle([u8; 64]);

impl IpcHandle {
    /// The handle that these bytes are.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 64]) -> Self {
        Self(bytes)
    }

    /// The bytes, to be sent to another process.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 64] {
        &self.0
    }
}

impl fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, ..] = self.0;
        write!(f, "IpcHandle({a:02x}{b:02x}..)")
    }
}

/// Another process's plain memory, mapped here.
#[derive(Debug)]
pub struct IpcMemory {
    context: Context,
    address: u64,
    size: usize,
}

impl IpcMemory {
    /// Maps memory by its handle; `size` is the size it was allocated with. A handle cannot be opened in the process that made it.
    ///
    /// Calls `cuIpcOpenMemHandle`.
    ///
    /// # Errors
    /// [`Error::Zero`] or [`Error::Call`].
    ///
    /// # Safety
    /// The handle must name a live allocation of at least `size` bytes: the driver does not tell its size, so that a larger one lets
    /// copies reach past its end. The exporter must keep the allocation until this object is dropped.
    #[doc(alias = "cuIpcOpenMemHandle")]
    pub unsafe fn open(context: &Context, handle: &IpcHandle, size: usize) -> Result<Self> {
        if size == 0 {
            return Err(Error::Zero { what: "size of another process's memory" });
        }
        let _bound = context.bind()?;
        let raw = CUipcMemHandle { reserved: handle.0.map(|byte| byte as c_char) };
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.0;
        let mut address = 0;
        // SAFETY: `address` is valid for one write, and the context is current. Closed in Drop.
        unsafe { context.device().cuda().driver().cuIpcOpenMemHandle(&mut address, raw, flags) }
            .attempt(|| format!("opening {size} bytes of another process's plain memory"))?;
        Ok(Self { context: context.clone(), address, size })
    }

    /// The context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for IpcMemory {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: opened by `open` and closed once.
            released("another process's memory", unsafe {
                self.context.device().cuda().driver().cuIpcCloseMemHandle(self.address)
            });
        }
    }
}

impl Memory for PlainMemory {
    fn address(&self) -> DeviceAddress {
        DeviceAddress::new(self.address)
    }

    fn size(&self) -> usize {
        self.size
    }

    fn cuda(&self) -> &Cuda {
        self.context.device().cuda()
    }
}

impl Memory for IpcMemory {
    fn address(&self) -> DeviceAddress {
        DeviceAddress::new(self.address)
    }

    fn size(&self) -> usize {
        self.size
    }

    fn cuda(&self) -> &Cuda {
        self.context.device().cuda()
    }
}
