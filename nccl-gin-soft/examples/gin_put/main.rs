//! Two processes of one machine, which NCCL takes for two nodes: a kernel of the first puts eight bytes into the second's window and signals, a
//! kernel of the second waits for the signal and looks.
//!
//! ```text
//! cargo build --release -p nccl-gin-soft --lib
//! cargo run --release -p nccl-gin-soft --example gin_put
//! ```
//!
//! It needs a GPU (two are better: one is shared by time slices), NCCL 2.29.7 or newer with its headers (`NCCL_GIN_LIBRARY`), NVRTC
//! (`NVRTC_LIBRARY`) and CUDA's headers (`CUDA_INCLUDE`). The plugin is looked for beside this program; an argument names another place.

mod nvrtc;

use cuda_vmm_sys::{CUdevice_attribute, CUstream_flags, Driver};
use nccl_gin::sys::Nccl;
use nccl_gin::{
    Communicator, Config, DevCommRequirements, Device, GinConnection, MemAlloc, UniqueId, WindowFlags,
    WindowMemory, device_code,
};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const RANK: &str = "GIN_PUT_RANK";
const MEETING: &str = "GIN_PUT_MEETING";
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    match std::env::var(RANK) {
        Ok(rank) => self::rank(rank.parse()?, Path::new(&std::env::var(MEETING)?)),
        Err(_) => launch(),
    }
}

/// Starts the two ranks with the environment that the plugin needs, and waits for them.
fn launch() -> Result<()> {
    let program = std::env::current_exe()?;
    let beside = || program.ancestors().skip(1).take(2).map(|folder| folder.join(nccl_gin_soft::LIBRARY));
    let library = std::env::args_os().nth(1).map(PathBuf::from);
    let library = library.or_else(|| beside().find(|path| path.is_file()));
    let library = library.ok_or("no plugin beside this program: build it, or name it as the argument")?;
    let meeting = std::env::temp_dir().join(format!("gin_put-{}", std::process::id()));
    let mut ranks = Vec::new();
    for rank in 0..2 {
        let child = Command::new(&program)
            .envs(nccl_gin_soft::env(&library, format!("node-{rank}")))
            .env(RANK, rank.to_string())
            .env(MEETING, &meeting)
            .spawn()?;
        ranks.push(child);
    }
    let outcome = ranks.iter_mut().try_for_each(wait);
    for mut rank in ranks {
        // Only one that is still there: the other's failure is the news.
        rank.kill().ok();
        rank.wait().ok();
    }
    std::fs::remove_file(&meeting).ok();
    outcome
}

fn wait(rank: &mut Child) -> Result<()> {
    let end = Instant::now() + 2 * LIMIT;
    while Instant::now() < end {
        match rank.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("a rank ended with {status}").into()),
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    Err("a rank did not end".into())
}

/// Rank 0 makes the identifier; rank 1 finds it in a file.
fn identifier(nccl: &Nccl, rank: u32, meeting: &Path) -> Result<UniqueId> {
    if rank == 0 {
        let id = UniqueId::new(nccl)?;
        let draft = meeting.with_extension("draft");
        std::fs::write(&draft, id.as_bytes())?;
        std::fs::rename(&draft, meeting)?;
        return Ok(id);
    }
    let end = Instant::now() + LIMIT;
    loop {
        if let Ok(bytes) = std::fs::read(meeting) {
            return Ok(UniqueId::from_bytes(bytes.try_into().map_err(|_| "no identifier in the file")?));
        }
        if Instant::now() > end {
            return Err("rank 0 made no identifier".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The device's compute capability, as compilers name it.
fn architecture(driver: &Driver, device: &Device) -> Result<i32> {
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: the output is a local, and the ordinal is an open device's.
        unsafe { driver.cuDeviceGetAttribute(&mut value, which, device.ordinal()) }.map(|()| value)
    };
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(10 * major + minor)
}

fn rank(rank: u32, meeting: &Path) -> Result<()> {
    let nccl = Nccl::get()?;
    let driver = Driver::get()?;
    let mut devices = 0;
    // SAFETY: cuInit takes no pointer, and the output is a local.
    unsafe { driver.cuInit(0).and_then(|()| driver.cuDeviceGetCount(&mut devices)) }?;
    let device = Device::open(rank as i32 % devices.max(1))?;
    let id = identifier(nccl, rank, meeting)?;
    let comm = Communicator::init(nccl, &device, &id, 2, rank, &Config::new().timeout(LIMIT))?;
    if let Some(support) = comm.properties()?.support {
        println!("rank {rank}: NCCL {}, GIN: {:?}", nccl.version(), support.gin);
    }
    let memory = Arc::new(MemAlloc::new(nccl, &device, 2 << 20)?);
    let address = memory.address().as_ptr() as u64;
    let window = comm.register(memory, WindowFlags::empty())?;
    let requirements = DevCommRequirements::new().gin(GinConnection::Full).gin_signals(1);
    let dev_comm = comm.create_dev_comm(&requirements)?;

    let sources = device_code::sources(nccl.version(), nccl.include_dir()?)?;
    let mut options = sources.options(nvrtc::cuda_include());
    options.push(format!("--gpu-architecture=sm_{}", architecture(driver, &device)?));
    let code = nvrtc::compile(include_str!("kernel.cu"), sources.headers(), &options)?;

    let found_at = address + (1 << 20);
    let window_handle = window.as_raw();
    let mut arguments = [
        dev_comm.as_ptr().cast_mut(),
        (&raw const window_handle).cast_mut().cast(),
        (&raw const found_at).cast_mut().cast(),
    ];
    let (mut module, mut function, mut stream) = (null_mut(), null_mut(), null_mut());
    let mut found = 0u64;
    device.make_current()?;
    // SAFETY: outputs are locals; the image is a whole cubin; the kernel takes these three arguments, and the pointer it writes to is inside this rank's
    // window. The copy's target lives until the stream has been waited for, and the kernel ends by itself after a second at most.
    unsafe {
        driver.cuModuleLoadData(&mut module, code.as_ptr().cast())?;
        driver.cuModuleGetFunction(&mut function, module, c"put_and_signal".as_ptr())?;
        driver.cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING.0)?;
        driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments.as_mut_ptr(), null_mut())?;
        driver.cuMemcpyDtoHAsync((&raw mut found).cast(), found_at, 8, stream)?;
        driver.cuStreamSynchronize(stream)?;
        driver.cuStreamDestroy(stream)?;
        driver.cuModuleUnload(module)?;
    }
    println!("rank {rank} {} {found}", if rank == 0 { "put" } else { "was given" });
    dev_comm.close()?;
    window.close()?;
    comm.close()?;
    if found == 42 { Ok(()) } else { Err(format!("rank {rank} found {found:#x}").into()) }
}
