//! Streams, events, graphs and kernels on a GPU, as far as measuring needs them, over the raw driver of `cuda-vmm`.
//!
//! Everything that waits does so for a limited time. Work that is enqueued must end before what it uses is dropped: the functions that
//! enqueue work on memory are unsafe for that reason alone.

mod event;
mod graph;
mod kernel;
mod pinned;
mod stream;

pub use event::Event;
pub use graph::Graph;
pub use kernel::{Function, Module, Shape};
pub use pinned::PinnedWord;
pub use stream::Stream;

use cuda_vmm::sys::CallError;

/// A failure on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The driver refused a call, or reports the failure of earlier work.
    #[error(transparent)]
    Driver(#[from] cuda_vmm::Error),
    /// Work did not end in time. It may still be running: what it uses must not be freed.
    #[error("{what} did not end within {seconds} s; another process on the device, or a rank that is gone?")]
    Late {
        /// What was waited for.
        what: String,
        /// For how long.
        seconds: f64,
    },
}

/// Result of this module.
pub type Result<T, E = GpuError> = std::result::Result<T, E>;

/// Says what was attempted.
trait Attempt<T> {
    fn attempt(self, attempt: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Attempt<T> for Result<T, CallError> {
    fn attempt(self, attempt: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|cause| cuda_vmm::Error::Call { attempt: attempt(), cause }.into())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cuda_vmm::{Context, Cuda, Memory, PlainMemory};
    use cuda_vmm_emu::{Config, Emulator};

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// Runs a body on a driver in software, which must be empty afterwards.
    fn on_software(body: impl FnOnce(&Context)) {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        {
            let cuda = Cuda::with_driver(emulator.driver()).unwrap();
            body(&cuda.device(1).unwrap().primary_context().unwrap());
        }
        emulator.assert_empty();
    }

    #[test]
    fn work_is_ordered_and_timed() {
        on_software(|context| {
            let (stream, start, stop) =
                (Stream::new(context).unwrap(), Event::new(context).unwrap(), Event::new(context).unwrap());
            let [from, to] = [0, 0].map(|_| PlainMemory::new(context, 4096).unwrap());
            start.record(&stream).unwrap();
            // SAFETY: both memories are on this device, have that many bytes, and live until the stream was waited for.
            unsafe {
                stream.fill(&from, 7).unwrap();
                stream.copy(to.address().get(), from.address().get(), 4096).unwrap();
            }
            stop.record(&stream).unwrap();
            stream.wait(SOON, || "a copy".into()).unwrap();
            let mut bytes = [0; 4096];
            context.download(&to, 0, &mut bytes).unwrap();
            assert_eq!(bytes, [7; 4096]);
            let took = stop.microseconds_since(&start).unwrap();
            assert!((0.0..1e7).contains(&took), "{took}");
            assert_eq!(stream.borrow().as_raw(), stream.as_raw().cast());
        });
    }

    #[test]
    fn devices_see_what_the_host_sets() {
        on_software(|context| {
            let stream = Stream::new(context).unwrap();
            let (word, seen) = (PinnedWord::new(context).unwrap(), PlainMemory::new(context, 64).unwrap());
            word.set(0xdead_beef);
            // SAFETY: both have four bytes and live until the stream was waited for.
            unsafe { stream.copy(seen.address().get(), word.address(), 4) }.unwrap();
            stream.wait(SOON, || "a copy".into()).unwrap();
            let mut bytes = [0; 4];
            context.download(&seen, 0, &mut bytes).unwrap();
            assert_eq!(u32::from_ne_bytes(bytes), 0xdead_beef);
        });
    }

    #[test]
    fn what_does_not_end_is_late() {
        on_software(|context| {
            let stream = Stream::new(context).unwrap();
            let word = PlainMemory::new(context, 64).unwrap();
            context.fill(&word, 0, 64, 0).unwrap();
            let driver = context.device().cuda().driver();
            let bound = context.bind().unwrap();
            // SAFETY: the word is on this device and lives until the stream was waited for; 0 waits for "at least".
            unsafe { driver.cuStreamWaitValue32(stream.as_raw(), word.address().get(), 1, 0) }.unwrap();
            drop(bound);
            let error = stream.wait(Duration::from_millis(20), || "a flag".into()).unwrap_err();
            assert!(error.to_string().starts_with("a flag did not end within 0.02 s"), "{error}");
            context.upload(&word, 0, &[1]).unwrap();
            stream.wait(SOON, || "a flag".into()).unwrap();
        });
    }

    #[test]
    fn a_stream_that_is_captured_already_is_an_error() {
        on_software(|context| {
            let stream = Stream::new(context).unwrap();
            let inner = || Graph::capture(&stream, || Ok::<(), GpuError>(())).map(drop);
            let graph = Graph::capture(&stream, || {
                let error = inner().unwrap_err();
                assert!(error.to_string().starts_with("starting to capture a stream"), "{error}");
                Ok::<(), GpuError>(())
            });
            drop(graph.unwrap());
        });
    }

    #[test]
    fn a_driver_that_runs_no_kernels_is_an_error() {
        on_software(|context| {
            let error = Module::load(context, b"\x7fELF").unwrap_err();
            assert!(error.to_string().starts_with("loading 4 bytes of code"), "{error}");
        });
    }
}
