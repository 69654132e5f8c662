//! Work captured once and replayed.

use std::ptr;

use cuda_vmm::Context;
use cuda_vmm::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

use super::{Attempt, Result, Stream};

/// An executable graph. Dropping it destroys it (`cuGraphExecDestroy`); a replay under way still ends.
#[derive(Debug)]
#[doc(alias = "cuGraphExecDestroy")]
pub struct Graph {
    context: Context,
    raw: CUgraphExec,
}

impl Graph {
    /// Captures what `work` enqueues on the stream.
    ///
    /// # Errors
    /// Those of `work`; [`GpuError::Driver`](super::GpuError::Driver) if something it does can't be captured.
    #[doc(alias = "cuStreamBeginCapture")]
    #[doc(alias = "cuStreamEndCapture")]
    #[doc(alias = "cuGraphInstantiate")]
    pub fn capture<E: From<super::GpuError>>(
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let context = stream.context();
        let driver = context.device().cuda().driver();
        let _bound = context.bind().map_err(super::GpuError::from)?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not being captured; the capture is ended below whatever happens.
        unsafe { driver.cuStreamBeginCapture(stream.as_raw(), mode) }
            .attempt(|| "starting to capture a stream".into())?;
        let worked = work();
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: this thread began the capture; `graph` is valid for one write.
        let ended = unsafe { driver.cuStreamEndCapture(stream.as_raw(), &mut graph) };
        let mut raw: CUgraphExec = ptr::null_mut();
        let made = match (&worked, ended) {
            (Ok(()), Ok(())) => {
                // SAFETY: `raw` is valid for one write, and the graph was returned by the capture.
                unsafe { driver.cuGraphInstantiateWithFlags(&mut raw, graph, 0) }
                    .attempt(|| "making a graph executable".into())
            }
            (_, ended) => ended.attempt(|| "capturing a stream".into()),
        };
        if !graph.is_null() {
            // SAFETY: returned by the capture, destroyed once; the executable graph does not need it.
            let _ = unsafe { driver.cuGraphDestroy(graph) };
        }
        // The reason why the capture failed, if there is one, and not that it did.
        worked?;
        made?;
        Ok(Self { context: context.clone(), raw })
    }

    /// Replays it on a stream of the same device.
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver).
    ///
    /// # Safety
    /// All memory that the captured work uses must still be there, and be used as by that work.
    #[doc(alias = "cuGraphLaunch")]
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: graph and stream are alive; for what the graph uses the caller vouches.
        unsafe { self.context.device().cuda().driver().cuGraphLaunch(self.raw, stream.as_raw()) }
            .attempt(|| "launching a graph".into())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: made by `capture`, destroyed once; the driver keeps it for replays under way.
            let _ = unsafe { self.context.device().cuda().driver().cuGraphExecDestroy(self.raw) };
        }
    }
}
