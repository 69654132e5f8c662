//! A device as it is configured, and the functions that ask about devices.

use crate::attributes::INTRODUCED;
use crate::config::{Config, Fabric};
use crate::core::Core;
use crate::status::{Outcome, code, put, require};
use cuda_vmm_sys::ffi::{c_char, c_int, c_uint};
use cuda_vmm_sys::{CUdevice, CUdevice_P2PAttribute, CUdevice_attribute, CUresult, CUuuid, result_name};
use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};

/// One device of a [`Config`], a builder by value.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    pub(crate) memory: u64,
    pub(crate) numa_node: i32,
    pub(crate) attributes: BTreeMap<c_uint, c_int>,
}

impl Device {
    /// A device of 4 GiB whose UUID follows from its ordinal, so that the emulators of several processes agree on who is who.
    pub(crate) fn new(ordinal: usize) -> Self {
        let mut uuid = *b"cuda-vmm-emu\0\0\0\0";
        uuid[12..].copy_from_slice(&(ordinal as u32).to_be_bytes());
        Self {
            name: format!("Emulated device {ordinal}"),
            uuid,
            memory: 4 << 30,
            numa_node: 0,
            attributes: BTreeMap::new(),
        }
    }

    /// Name, as `cuDeviceGetName` tells it.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// UUID: what makes two processes' devices the same device. Memory that is imported is found by it, whatever its ordinal.
    #[must_use]
    pub fn uuid(mut self, uuid: [u8; 16]) -> Self {
        self.uuid = uuid;
        self
    }

    /// Memory in bytes. More cannot be allocated; what is not touched costs nothing.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Host NUMA node that is closest.
    #[must_use]
    pub fn numa_node(mut self, node: i32) -> Self {
        self.numa_node = node;
        self
    }

    /// Overrides what one attribute tells. Only the answer changes; behaviour is set in [`Config`], except for the stream's 64-bit
    /// and NOR waits, remote flushes, compression, RDMA and NUMA memory, which follow their attributes.
    #[must_use]
    pub fn attribute(mut self, attribute: CUdevice_attribute, value: c_int) -> Self {
        self.attributes.insert(attribute.0, value);
        self
    }
}

/// CUDA version that introduced an attribute; 0 for one that was there before all versions in the table.
fn attribute_since(attribute: c_uint) -> i32 {
    INTRODUCED.iter().find(|(number, _)| *number == attribute).map_or(0, |&(_, since)| since)
}

impl Config {
    /// What an attribute tells, or `INVALID_VALUE` for one that this driver does not know.
    pub(crate) fn attribute(&self, ordinal: usize, attribute: CUdevice_attribute) -> Outcome<c_int> {
        use CUdevice_attribute as A;
        let known = (1..A::CU_DEVICE_ATTRIBUTE_MAX.0).contains(&attribute.0);
        require(known && self.driver_version >= attribute_since(attribute.0))?;
        let device = &self.devices[ordinal];
        if let Some(&value) = device.attributes.get(&attribute.0) {
            return Ok(value);
        }
        Ok(match attribute {
            A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
            | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
            | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
            A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
            A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => i32::MAX,
            A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65_535,
            A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => 48 << 10,
            A::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY => 64 << 10,
            A::CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
            A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK
            | A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR => 65_536,
            A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
            A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => pci_bus(ordinal) as c_int,
            A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 60 << 20,
            A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => 2048,
            A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => 228 << 10,
            A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => 227 << 10,
            A::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK => 1 << 10,
            A::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => 32,
            A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
            | A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
            | A::CU_DEVICE_ATTRIBUTE_ECC_ENABLED
            | A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            | A::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            | A::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
            | A::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH
            | A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
            | A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR
            | A::CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => 1,
            A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED => c_int::from(self.posix_fd),
            A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED => {
                c_int::from(self.fabric != Fabric::Unsupported)
            }
            A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED => c_int::from(self.dma_buf),
            A::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED => c_int::from(self.multicast),
            A::CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => c_int::from(self.host_memory),
            A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID => device.numa_node,
            _ => 0,
        })
    }

    /// Whether an attribute of a device is set, for behaviour that follows it.
    pub(crate) fn can(&self, ordinal: usize, attribute: CUdevice_attribute) -> bool {
        self.attribute(ordinal, attribute).is_ok_and(|value| value != 0)
    }
}

fn pci_bus(ordinal: usize) -> usize {
    0x10 + ordinal
}

impl Core {
    /// Ordinal behind a device handle.
    pub(crate) fn ordinal(&self, device: CUdevice) -> Outcome<usize> {
        usize::try_from(device)
            .ok()
            .filter(|&ordinal| ordinal < self.config.devices.len())
            .ok_or(code::INVALID_DEVICE)
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuInit(self: &Arc<Self>, flags: c_uint) -> Outcome {
        require(flags == 0)?;
        if self.config.devices.is_empty() {
            return Err(code::NO_DEVICE);
        }
        self.initialized.store(true, Ordering::Release);
        Ok(())
    }

    pub(crate) unsafe fn cuDriverGetVersion(self: &Arc<Self>, version: *mut c_int) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { put(version, self.config.driver_version) }
    }

    pub(crate) unsafe fn cuGetErrorName(
        self: &Arc<Self>,
        error: CUresult,
        text: *mut *const c_char,
    ) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { error_text(error, text, false) }
    }

    pub(crate) unsafe fn cuGetErrorString(
        self: &Arc<Self>,
        error: CUresult,
        text: *mut *const c_char,
    ) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { error_text(error, text, true) }
    }

    pub(crate) unsafe fn cuDeviceGet(self: &Arc<Self>, device: *mut CUdevice, ordinal: c_int) -> Outcome {
        self.ordinal(ordinal)?;
        // SAFETY: the caller's contract.
        unsafe { put(device, ordinal) }
    }

    pub(crate) unsafe fn cuDeviceGetCount(self: &Arc<Self>, count: *mut c_int) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { put(count, self.config.devices.len() as c_int) }
    }

    pub(crate) unsafe fn cuDeviceGetName(
        self: &Arc<Self>,
        name: *mut c_char,
        length: c_int,
        device: CUdevice,
    ) -> Outcome {
        let ordinal = self.ordinal(device)?;
        // SAFETY: the caller's contract.
        unsafe { put_text(name, length, &self.config.devices[ordinal].name) }
    }

    pub(crate) unsafe fn cuDeviceGetUuid(self: &Arc<Self>, uuid: *mut CUuuid, device: CUdevice) -> Outcome {
        let ordinal = self.ordinal(device)?;
        let bytes = self.config.devices[ordinal].uuid.map(|byte| byte as c_char);
        // SAFETY: the caller's contract.
        unsafe { put(uuid, CUuuid { bytes }) }
    }

    pub(crate) unsafe fn cuDeviceGetAttribute(
        self: &Arc<Self>,
        value: *mut c_int,
        attribute: CUdevice_attribute,
        device: CUdevice,
    ) -> Outcome {
        let ordinal = self.ordinal(device)?;
        // SAFETY: the caller's contract.
        unsafe { put(value, self.config.attribute(ordinal, attribute)?) }
    }

    pub(crate) unsafe fn cuDeviceTotalMem(self: &Arc<Self>, bytes: *mut usize, device: CUdevice) -> Outcome {
        let ordinal = self.ordinal(device)?;
        // SAFETY: the caller's contract.
        unsafe { put(bytes, self.config.devices[ordinal].memory as usize) }
    }

    pub(crate) unsafe fn cuDeviceGetPCIBusId(
        self: &Arc<Self>,
        id: *mut c_char,
        length: c_int,
        device: CUdevice,
    ) -> Outcome {
        let ordinal = self.ordinal(device)?;
        // SAFETY: the caller's contract.
        unsafe { put_text(id, length, &format!("0000:{:02X}:00.0", pci_bus(ordinal))) }
    }

    pub(crate) unsafe fn cuDeviceCanAccessPeer(
        self: &Arc<Self>,
        can: *mut c_int,
        device: CUdevice,
        peer: CUdevice,
    ) -> Outcome {
        let (device, peer) = (self.ordinal(device)?, self.ordinal(peer)?);
        // SAFETY: the caller's contract.
        unsafe { put(can, c_int::from(device != peer && self.config.reaches(device, peer))) }
    }

    pub(crate) unsafe fn cuDeviceGetP2PAttribute(
        self: &Arc<Self>,
        value: *mut c_int,
        attribute: CUdevice_P2PAttribute,
        from: CUdevice,
        to: CUdevice,
    ) -> Outcome {
        use CUdevice_P2PAttribute as A;
        let (from, to) = (self.ordinal(from)?, self.ordinal(to)?);
        if from == to {
            return Err(code::INVALID_DEVICE);
        }
        let linked = c_int::from(self.config.reaches(from, to));
        let answer = match attribute {
            A::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
            | A::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
            | A::CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED => linked,
            A::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
            | A::CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED => 0,
            _ => return Err(code::INVALID_VALUE),
        };
        // SAFETY: the caller's contract.
        unsafe { put(value, answer) }
    }
}

/// Writes a text with its NUL into a buffer of `length` characters, cut to fit.
///
/// # Safety
/// `out` is null or valid for `length` writes.
unsafe fn put_text(out: *mut c_char, length: c_int, text: &str) -> Outcome {
    require(!out.is_null() && length > 0)?;
    let fits = text.len().min(length as usize - 1);
    // SAFETY: `fits` characters and the NUL are at most `length`, for which `out` is valid.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, fits);
        out.add(fits).write(0);
    }
    Ok(())
}

/// Writes a pointer to the name or description of a code; null, and a failure, for an unknown code.
///
/// # Safety
/// `out` is null or valid for one write.
unsafe fn error_text(error: CUresult, out: *mut *const c_char, description: bool) -> Outcome {
    // Texts live as long as the process, as the driver's do: each is made once, at most one a code.
    static TEXTS: OnceLock<Mutex<HashMap<(u32, bool), &'static CString>>> = OnceLock::new();
    let Some(name) = result_name(error) else {
        // SAFETY: the caller's contract.
        unsafe { put(out, std::ptr::null())? };
        return Err(code::INVALID_VALUE);
    };
    let mut texts = crate::status::lock(TEXTS.get_or_init(Mutex::default));
    let text = match texts.get(&(error.0, description)) {
        Some(text) => text,
        None => {
            let text = if description {
                name.trim_start_matches("CUDA_ERROR_")
                    .trim_start_matches("CUDA_")
                    .replace('_', " ")
                    .to_lowercase()
            } else {
                name.to_owned()
            };
            let text: &'static CString = Box::leak(Box::new(CString::new(text).map_err(|_| code::UNKNOWN)?));
            texts.insert((error.0, description), text);
            text
        }
    };
    // SAFETY: the caller's contract.
    unsafe { put(out, text.as_ptr()) }
}
