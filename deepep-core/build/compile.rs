//! From the list of kernels to a table of machine code in `$OUT_DIR/embedded.rs`.

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::jit::Program;
use crate::nvcc::Nvcc;
use crate::request::Request;

/// One kernel for one architecture.
struct Job {
    program: Program,
    arch: String,
    /// The kernel's own folder: its source and its generated header.
    folder: PathBuf,
    image: PathBuf,
}

pub(crate) fn run() -> Result<(), Box<dyn Error>> {
    let request = Request::from_environment()?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: this runs under cargo only")?);
    let folder = out.join("kernels");
    let jobs = jobs(&request, &folder);
    let mut version = String::new();
    if !jobs.is_empty() {
        let nvcc = Nvcc::find()?;
        nvcc.version().clone_into(&mut version);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        write_sources(&jobs, &folder)?;
        compile(&nvcc, &jobs, &folder)?;
    }
    fs::write(out.join("embedded.rs"), table(&jobs, &version)?)?;
    Ok(())
}

fn jobs(request: &Request, folder: &Path) -> Vec<Job> {
    let mut jobs = Vec::new();
    for &ranks in &request.ranks {
        for (number, program) in Program::all(ranks).into_iter().enumerate() {
            let folder = folder.join(format!("{ranks}-ranks")).join(number.to_string());
            for arch in &request.archs {
                let image = folder.join(arch).with_extension("cubin");
                jobs.push(Job { program, arch: arch.clone(), folder: folder.clone(), image });
            }
        }
    }
    // The long ones first, so that the end is not spent waiting for one of them.
    jobs.sort_by_key(|job| matches!(job.program, Program::Collective(_)));
    jobs
}

/// Headers that all kernels share, and for each kernel its source and its own header.
fn write_sources(jobs: &[Job], folder: &Path) -> std::io::Result<()> {
    for job in jobs {
        for (name, text) in job.program.headers() {
            let shared = name.contains('/');
            let path = if shared { folder } else { &job.folder }.join(name);
            if !path.exists() {
                fs::create_dir_all(path.parent().unwrap_or(folder))?;
                fs::write(path, text)?;
            }
        }
        fs::write(source(job), job.program.source())?;
    }
    Ok(())
}

fn source(job: &Job) -> PathBuf {
    job.folder.join(job.program.entry()).with_extension("cu")
}

/// Runs as many compilers as cargo allows, until all is done or one has failed.
fn compile(nvcc: &Nvcc, jobs: &[Job], shared: &Path) -> Result<(), String> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let include = [shared, job.folder.as_path()];
            if let Err(problem) = nvcc.compile(&source(job), &include, &job.arch, &job.image) {
                next.store(jobs.len(), Ordering::Relaxed);
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(problem);
                return;
            }
        }
    };
    let workers = env::var("NUM_JOBS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// What the crate includes: which compiler, and each kernel's architecture, name and code.
fn table(jobs: &[Job], version: &str) -> Result<String, std::fmt::Error> {
    let mut text = format!("pub(super) const NVCC: &str = {version:?};\n");
    writeln!(text, "pub(super) static ALL: &[Embedded] = &[")?;
    for Job { program, arch, image, .. } in jobs {
        let program = format!("{program:?}");
        writeln!(
            text,
            "    Embedded {{ arch: {arch:?}, program: {program:?}, image: &Aligned(*include_bytes!({image:?})).0 }},"
        )?;
    }
    writeln!(text, "];")?;
    Ok(text)
}
