//! The calls that are timed: their tensors, and the comparison of their results with the oracle.
//!
//! Two sets of rows take turns from call to call, so that a result that a call has not written is not that of the one before.

use std::cell::RefCell;

use deepep_core::layout::IndexWidth;
use deepep_core::tensor::DType;
use deepep_core::{CombineArgs, CombineInput, DispatchArgs, Dispatched, ElasticBuffer, Handle, Transfer};
use half::bf16;

use super::clock::Clock;
use super::plan::Operation;
use super::rank::RankError;
use super::report::Samples;
use crate::gpu::{Graph, Stream};
use crate::job::{Job, Rank};
use crate::oracle;
use crate::routing::Routing;
use crate::tensors::{Memory, Tensor};

const WARM_UP: usize = 8;
const CHAINS: usize = 5;

/// The tensors of one set of rows.
struct Set {
    x: Tensor,
    scales: Option<Tensor>,
    /// Experts' outputs, and the same in the heap if they are to be pulled.
    y: Option<Tensor>,
    input: Option<CombineInput>,
}

/// Host memory for what is compared, used again and again: in the largest settings its pages take longer than all else.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    rows: RefCell<Vec<u8>>,
    outputs: RefCell<Vec<bf16>>,
}

/// Copies experts' outputs into the heap, and waits until they are there.
fn copy_in(input: &mut CombineInput, y: &Tensor, clock: &Clock) -> Result<(), RankError> {
    // SAFETY: the rows are written and given back only after the clock has waited, here and in `give_back`.
    let copied = input.copy_in(unsafe { y.view()? }, clock.borrow())?;
    clock.wait("a copy of rows")?;
    drop(copied);
    Ok(())
}

/// A rank's tensors and calls.
pub(super) struct Calls<'a> {
    job: &'a Job,
    rank: usize,
    routings: Vec<Routing>,
    scratch: &'a Scratch,
    memory: Memory,
    sets: Vec<Set>,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    /// Of a first dispatch, for cached ones and for combine.
    handle: Option<Handle>,
    /// Bytes of rows and scales that a token takes, by dispatch and by combine.
    token_bytes: [u64; 2],
    planted: bool,
}

impl<'a> Calls<'a> {
    /// Sets of rows.
    pub(super) const ROUNDS: usize = 2;

    pub(super) fn new(job: &'a Job, buffer: &ElasticBuffer, scratch: &'a Scratch) -> Result<Self, RankError> {
        let (routings, rank, memory) = (job.routings(), buffer.rank(), Memory::default());
        let part = Rank::new(job, &routings, rank);
        let routing = &routings[rank];
        let (n, hidden, topk) = (routing.tokens(), job.values.hidden, job.group.topk);
        let tensor = |bytes: &[u8], dtype, columns| memory.matrix(buffer, bytes, dtype, [n, columns]);
        let sets = (0..Self::ROUNDS as u64)
            .map(|round| {
                let words = part.scales_by_token(round);
                let scales = match job.scale_packs() {
                    0 => None,
                    packs => Some(tensor(bytemuck::cast_slice(&words), DType::F32, packs)?),
                };
                Ok(Set {
                    x: tensor(&part.own_rows(round), job.values.dtype, hidden)?,
                    scales,
                    y: None,
                    input: None,
                })
            })
            .collect::<Result<_, RankError>>()?;
        let ids = match job.index {
            IndexWidth::Bits64 => tensor(bytemuck::cast_slice(&routing.experts), DType::I64, topk)?,
            IndexWidth::Bits32 => {
                let narrow: Vec<i32> = routing.experts.iter().map(|&id| id as i32).collect();
                tensor(bytemuck::cast_slice(&narrow), DType::I32, topk)?
            }
        };
        let weights = tensor(bytemuck::cast_slice(&routing.weights), DType::F32, topk)?;
        let out = tensor(&[], DType::Bf16, hidden)?;
        let row_bytes = job.values.row_bytes() + 4 * job.scale_packs();
        let token_bytes = [row_bytes as u64, hidden as u64 * 2];
        let (handle, planted) = (None, false);
        Ok(Self {
            job,
            rank,
            routings,
            scratch,
            memory,
            sets,
            ids,
            weights,
            out,
            handle,
            token_bytes,
            planted,
        })
    }

    /// Gives the memory back, once nothing uses it any more; if that does not come, keeps it.
    pub(super) fn give_back(self, clock: &Clock) {
        if clock.wait("the last call").is_err() {
            self.memory.abandon();
        }
    }

    /// For tests of the program: sends rows that are not those of the oracle.
    pub(super) fn plant(
        &mut self,
        buffer: &ElasticBuffer,
        clock: &Clock,
        fault: bool,
    ) -> Result<(), RankError> {
        if !fault || self.planted {
            return Ok(());
        }
        self.planted = true;
        for tensor in self.sets.iter_mut().flat_map(|set| [Some(&mut set.x), set.y.as_mut()]).flatten() {
            // So much that no rounding of a sum hides it.
            let bytes: Vec<u8> = tensor.read(buffer)?.iter().take(2).map(|byte| byte ^ 0x40).collect();
            tensor.write(&bytes)?;
        }
        for set in &mut self.sets {
            if let (Some(input), Some(y)) = (&mut set.input, &set.y) {
                copy_in(input, y, clock)?;
            }
        }
        Ok(())
    }

    /// Overwrites the sums.
    fn poison(&mut self) -> Result<(), RankError> {
        let bytes = self.tokens() * self.job.values.hidden * 2;
        Ok(self.out.write(&vec![0xff; bytes])?)
    }

    fn tokens(&self) -> usize {
        self.routings[self.rank].tokens()
    }

    /// This rank's part of the job, with the weights that the operation in question takes.
    fn with_part<T>(&self, weights: bool, work: impl FnOnce(&Rank<'_>) -> T) -> T {
        let job = Job { weights, ..self.job.clone() };
        work(&Rank::new(&job, &self.routings, self.rank))
    }

    /// Dispatches both sets, compares them, and computes the experts' outputs.
    pub(super) fn prepare(&mut self, buffer: &mut ElasticBuffer, clock: &Clock) -> Result<(), RankError> {
        for round in 0..Self::ROUNDS {
            let dispatched = self.dispatch(buffer, clock, round, None)?;
            clock.wait("the first dispatch")?;
            dispatched.check()?;
            let outputs = self.with_part(true, |part| {
                let got = part.got(buffer, &dispatched, self.scratch.rows.take())?;
                part.check_dispatch(&got, round as u64)?;
                let outputs = part.experts(&got, round as u64, self.scratch.outputs.take());
                self.scratch.rows.replace(got.x);
                Ok::<_, RankError>(outputs)
            })?;
            // As many rows as a dispatch without counts can deliver.
            let shape = [dispatched.rows(), self.job.values.hidden];
            let y = self.memory.matrix(buffer, bytemuck::cast_slice(&outputs), DType::Bf16, shape)?;
            self.scratch.outputs.replace(outputs);
            if buffer.config().combine_inputs > 0 {
                let mut input = buffer.combine_input()?;
                copy_in(&mut input, &y, clock)?;
                self.sets[round].input = Some(input);
            }
            self.sets[round].y = Some(y);
            self.handle = Some(dispatched.into_handle());
        }
        Ok(())
    }

    /// Enqueues a dispatch of a set, new or along a handle's routes.
    fn dispatch(
        &self,
        buffer: &mut ElasticBuffer,
        clock: &Clock,
        round: usize,
        handle: Option<&Handle>,
    ) -> Result<Dispatched, RankError> {
        let (job, set) = (self.job, &self.sets[round % Self::ROUNDS]);
        // SAFETY: tensors are written and given back only after the clock has waited for the calls that use them (`give_back`).
        let (x, ids, weights) = unsafe { (set.x.view()?, self.ids.view()?, self.weights.view()?) };
        let mut args = match handle {
            Some(handle) => DispatchArgs::cached(x, handle),
            None => DispatchArgs::new(x, ids).without_counts(),
        };
        args = args.weights(weights);
        if let Some(scales) = &set.scales {
            // SAFETY: as above.
            args = args.scales(unsafe { scales.view()? });
        }
        if let (Some(alignment), None) = (job.expanded, handle) {
            args = args.expanded(alignment);
        }
        if let Some(stream) = clock.borrow() {
            args = args.stream(stream);
        }
        Ok(buffer.dispatch(args)?)
    }

    /// Enqueues a combine of the experts' outputs of a set.
    fn combine(
        &mut self,
        buffer: &mut ElasticBuffer,
        clock: &Clock,
        round: usize,
        handle: &Handle,
        pull: bool,
    ) -> Result<(), RankError> {
        let set = &self.sets[round % Self::ROUNDS];
        let y = set.y.as_ref().ok_or(RankError::Unprepared(Operation::Combine))?;
        // SAFETY: as in `dispatch`; the calls that write the sums follow each other on one stream.
        let (y, out) = unsafe { (y.view()?, self.out.view_mut()?) };
        let (y, transfer) = if pull {
            let input = set.input.as_ref().ok_or(RankError::Unprepared(Operation::Pulled))?;
            (input.x().first_rows(y.rows()), Transfer::Pull)
        } else {
            (y, Transfer::Push)
        };
        let mut args = CombineArgs::new(y, handle, out).reduction(self.job.reduction).transfer(transfer);
        if let Some(stream) = clock.borrow() {
            args = args.stream(stream);
        }
        buffer.combine(args)?;
        Ok(())
    }

    /// One call of an operation; dispatches return what they leave.
    fn call(
        &mut self,
        buffer: &mut ElasticBuffer,
        clock: &Clock,
        operation: Operation,
        round: usize,
    ) -> Result<Option<Dispatched>, RankError> {
        match operation {
            Operation::Dispatch => self.dispatch(buffer, clock, round, None).map(Some),
            Operation::Cached => {
                let handle = self.handle.as_ref().ok_or(RankError::Unprepared(operation))?;
                self.dispatch(buffer, clock, round, Some(handle)).map(Some)
            }
            Operation::Combine | Operation::Pulled => {
                let handle = self.handle.clone().ok_or(RankError::Unprepared(operation))?;
                self.combine(buffer, clock, round, &handle, operation == Operation::Pulled)?;
                Ok(None)
            }
            Operation::Pair | Operation::Graph => {
                let dispatched = self.dispatch(buffer, clock, round, None)?;
                self.combine(buffer, clock, round, dispatched.handle(), false)?;
                Ok(Some(dispatched))
            }
        }
    }

    /// Compares what the last call left, which was one of this set.
    fn compare(
        &self,
        buffer: &ElasticBuffer,
        operation: Operation,
        left: Option<&Dispatched>,
        round: usize,
    ) -> Result<(), RankError> {
        let round = (round % Self::ROUNDS) as u64;
        if let Some(dispatched) = left {
            dispatched.check()?;
            self.with_part(true, |part| {
                let got = part.got(buffer, dispatched, self.scratch.rows.take())?;
                part.check_dispatch(&got, round)?;
                self.scratch.rows.replace(got.x);
                Ok::<_, RankError>(())
            })?;
        }
        if !matches!(operation, Operation::Dispatch | Operation::Cached) {
            let bytes = self.out.read(buffer)?;
            let sums: Vec<bf16> = bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_ne_bytes(b)).collect();
            self.with_part(false, |part| part.check_combine(&sums, &[], &[], round))?;
        }
        Ok(())
    }

    /// Calls an operation and compares the result. False if it is not possible here.
    pub(super) fn check(
        &mut self,
        buffer: &mut ElasticBuffer,
        clock: &Clock,
        operation: Operation,
    ) -> Result<bool, RankError> {
        if operation == Operation::Graph && clock.stream().is_none() {
            return Ok(false);
        }
        self.poison()?;
        // Not the set that a call before has left.
        let left = self.call(buffer, clock, operation, 0)?;
        clock.wait("a call to be compared")?;
        self.compare(buffer, operation, left.as_ref(), 0)?;
        Ok(true)
    }

    /// Times an operation and compares what the last timed call left.
    pub(super) fn time(
        &mut self,
        buffer: &mut ElasticBuffer,
        clock: &Clock,
        operation: Operation,
        iterations: usize,
        flush: bool,
    ) -> Result<Samples, RankError> {
        let heap = buffer.heap().bytes() as u64;
        let samples = match clock.stream() {
            Some(stream) if operation == Operation::Graph => {
                self.replay(buffer, clock, stream, iterations, flush)?
            }
            _ => self.eager(buffer, clock, operation, iterations, flush)?,
        };
        let (bytes_in, bytes_out) = self.wire_bytes(operation);
        Ok(samples.with_bytes(bytes_in, bytes_out, heap))
    }

    fn eager(
        &mut self,
        buffer: &mut ElasticBuffer,
        clock: &Clock,
        operation: Operation,
        iterations: usize,
        flush: bool,
    ) -> Result<Samples, RankError> {
        let mut samples = Samples::default();
        // There is one slot for results: the last one goes before the next comes.
        let (mut left, mut last) = (None, 0);
        for i in 0..WARM_UP + iterations {
            left = None;
            last = i;
            let sample = clock.sample(buffer, flush, 1, |buffer, _| {
                left = self.call(buffer, clock, operation, i)?;
                Ok(())
            })?;
            if i >= WARM_UP {
                samples.single.push(sample.total);
            }
        }
        if clock.stream().is_some() {
            let calls = if flush { 20 } else { 50 };
            for _ in 0..CHAINS {
                left = None;
                let sample = clock.sample(buffer, flush, calls, |buffer, i| {
                    (left, last) = (None, i);
                    left = self.call(buffer, clock, operation, i)?;
                    Ok(())
                })?;
                samples.chained.push(sample.total / calls as f64);
                // Chains are short enough for the driver's queue of launches: the host never waits for a place in it.
                samples.host_wall.extend(sample.host.map(|host| host.wall / calls as f64));
                samples.host_cpu.extend(sample.host.map(|host| host.cpu / calls as f64));
            }
        }
        self.compare(buffer, operation, left.as_ref(), last)?;
        Ok(samples)
    }

    /// Captures pairs of dispatch and combine once, and times replays.
    fn replay(
        &mut self,
        buffer: &mut ElasticBuffer,
        clock: &Clock,
        stream: &Stream,
        iterations: usize,
        flush: bool,
    ) -> Result<Samples, RankError> {
        let pairs = if flush { 4 } else { 50 };
        let mut samples = Samples::default();
        let mut left = None;
        let graph = Graph::capture(stream, || -> Result<(), RankError> {
            for i in 0..pairs {
                left = None;
                left = self.call(buffer, clock, Operation::Graph, i)?;
            }
            Ok(())
        })?;
        for i in 0..WARM_UP + iterations {
            if i + 1 == WARM_UP + iterations {
                self.poison()?;
            }
            let sample = clock.sample(buffer, flush, 1, |_, _| {
                // SAFETY: the tensors are this object's, and the heap is the buffer's: both outlive the replay, which the clock waits for.
                Ok(unsafe { graph.launch(stream) }?)
            })?;
            if i >= WARM_UP {
                samples.single.push(sample.total / pairs as f64);
            }
        }
        self.compare(buffer, Operation::Graph, left.as_ref(), pairs - 1)?;
        Ok(samples)
    }

    /// Bytes that come from and go to other ranks.
    fn wire_bytes(&self, operation: Operation) -> (u64, u64) {
        let me = self.rank;
        let to_others = |rank: usize, of: &Routing| -> u64 {
            let tokens = (0..of.tokens()).map(|token| oracle::contributors(self.job.group, of.of(token)));
            tokens
                .map(|ranks| {
                    ranks.iter().filter(|&&r| if rank == me { r != me } else { r == me }).count() as u64
                })
                .sum()
        };
        let tokens_out = to_others(me, &self.routings[me]);
        let tokens_in: u64 =
            self.routings.iter().enumerate().filter(|(r, _)| *r != me).map(|(r, of)| to_others(r, of)).sum();
        let [dispatch, combine] = self.token_bytes;
        match operation {
            Operation::Dispatch | Operation::Cached => (tokens_in * dispatch, tokens_out * dispatch),
            // The way back.
            Operation::Combine | Operation::Pulled => (tokens_out * combine, tokens_in * combine),
            Operation::Pair | Operation::Graph => {
                (tokens_in * dispatch + tokens_out * combine, tokens_out * dispatch + tokens_in * combine)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use deepep_core::BackendKind;
    use deepep_core::bootstrap::thread_group;

    use super::*;
    use crate::inputs::Values;
    use crate::job::Source;
    use crate::routing::{Group, Pattern};

    #[test]
    fn what_has_nothing_to_call_with_is_not_timed() {
        let limit = Duration::from_secs(20);
        let values = Values { seed: 1, dtype: DType::Bf16, hidden: 64 };
        let group = Group { ranks: 1, experts: 4, topk: 2 };
        let mut job = Job::new(group, Source::Pattern(Pattern::Uniform, 3), 3, values);
        (job.exact, job.biases, job.backend) = (false, 0, BackendKind::Host);
        let bootstrap = thread_group(1, limit).unwrap().remove(0);
        let mut buffer = ElasticBuffer::with_config(job.config()).build(bootstrap).unwrap();
        let clock = Clock::new(&buffer, limit).unwrap();
        let scratch = Scratch::default();
        let mut calls = Calls::new(&job, &buffer, &scratch).unwrap();
        for operation in [Operation::Cached, Operation::Combine, Operation::Pulled, Operation::Pair] {
            let error = calls.time(&mut buffer, &clock, operation, 1, false).unwrap_err();
            assert!(matches!(error, RankError::Unprepared(_)), "{operation}: {error}");
        }
        calls.prepare(&mut buffer, &clock).unwrap();
        for operation in [Operation::Cached, Operation::Combine, Operation::Pair] {
            assert!(calls.check(&mut buffer, &clock, operation).unwrap());
            assert_eq!(calls.time(&mut buffer, &clock, operation, 2, false).unwrap().single.len(), 2);
        }
        // This buffer has no room for rows that are pulled.
        let error = calls.check(&mut buffer, &clock, Operation::Pulled).unwrap_err();
        assert!(matches!(error, RankError::Unprepared(Operation::Pulled)), "{error}");
        calls.give_back(&clock);
    }
}
