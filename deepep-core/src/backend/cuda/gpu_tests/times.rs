//! End-to-end times of the operations, for orientation; the real benchmark is the program's.

use super::input::{Case, Input};
use super::machine::{Buffer, Outcome};
use super::{Bench, machine, numbers};
use crate::layout::Placement;

const ITERATIONS: usize = 31;
const CHAIN: usize = 20;
const FLUSH: usize = 256 << 20;

#[derive(Clone, Copy, PartialEq)]
enum Operation {
    Empty,
    Dispatch,
    Cached,
    Combine,
}

impl Bench {
    fn launch(&self, operation: Operation, r: usize) -> Outcome {
        match operation {
            Operation::Empty => Ok(()),
            Operation::Dispatch => self.launch_dispatch(r, 0, 0, 0, false),
            Operation::Cached => self.launch_dispatch(r, 0, 1, 0, true),
            Operation::Combine => self.launch_combine(r, 0, 0, 0),
        }
    }

    /// Slowest rank, median; L2 emptied and ranks aligned by a barrier before each. Single call, then a call of a chain.
    fn time(&self, operation: Operation) -> Outcome<(f64, f64)> {
        let flush: Vec<Buffer> =
            self.group.ranks.iter().map(|r| Buffer::new(&r.context, FLUSH)).collect::<Outcome<_>>()?;
        let events: Vec<_> =
            self.group.ranks.iter().map(|r| Ok((r.event()?, r.event()?))).collect::<Outcome<_>>()?;
        let sample = |calls: usize| -> Outcome<f64> {
            for (r, rank) in self.group.ranks.iter().enumerate() {
                rank.overwrite(&flush[r], FLUSH)?;
            }
            for (r, rank) in self.group.ranks.iter().enumerate() {
                // SAFETY: the stream is the rank's own.
                unsafe { rank.engine.barrier(rank.stream) }?;
                rank.record(events[r].0)?;
                (0..calls).try_for_each(|_| self.launch(operation, r))?;
                rank.record(events[r].1)?;
            }
            self.group.wait()?;
            let times: Outcome<Vec<f64>> = self
                .group
                .ranks
                .iter()
                .zip(&events)
                .map(|(rank, (from, to))| rank.microseconds(*from, *to))
                .collect();
            Ok(times?.into_iter().fold(0.0, f64::max) / calls as f64)
        };
        let median = |calls: usize, n: usize| -> Outcome<f64> {
            let mut all: Vec<f64> = (0..n).map(|_| sample(calls)).collect::<Outcome<_>>()?;
            all.sort_by(f64::total_cmp);
            Ok(all[n / 2])
        };
        median(1, 5)?;
        Ok((median(1, ITERATIONS)?, median(CHAIN, 5)?))
    }
}

#[test]
#[ignore = "prints times, for a machine of its own"]
fn times() {
    let Some(machine) = machine() else { return };
    let ranks = machine.devices().min(8);
    let blocks = numbers("DEEPEP_TEST_BLOCKS", &[0, 64, 32, 16]);
    eprintln!("{ranks} ranks, H 7168, top-8 of 256; µs: single (chained)");
    for tokens in numbers("DEEPEP_TEST_TOKENS", &[4096, 128]) {
        for blocks in &blocks {
            for placement in [Placement::Plain, Placement::Expanded] {
                let mut line = format!("T {tokens:5}, blocks {blocks:3}, {placement:?}:");
                for (name, row_bytes, packs) in [("FP8", 7168, 56), ("BF16", 14336, 0)] {
                    let mut case = Case::new(ranks, tokens, placement);
                    (case.experts, case.topk, case.hidden) = (256 / ranks * ranks, 8, 7168);
                    (case.row_bytes, case.scale_packs, case.blocks) = (row_bytes, packs, *blocks);
                    let bench = Bench::new(&machine, &case).unwrap_or_else(|e| panic!("{e}"));
                    let inputs = (0..ranks).map(|r| Input::new(&case, r, 1)).collect();
                    let round = bench.prepare(inputs, 1);
                    bench.upload(0, &round).unwrap_or_else(|e| panic!("{e}"));
                    let mut operations =
                        vec![("dispatch", Operation::Dispatch), ("cached", Operation::Cached)];
                    if name == "BF16" {
                        operations.push(("combine", Operation::Combine));
                        operations.push(("empty", Operation::Empty));
                    }
                    for (what, operation) in operations {
                        let (single, chained) =
                            bench.time(operation).unwrap_or_else(|e| panic!("{line} {e}"));
                        line += &format!(" {name} {what} {single:.1} ({chained:.1});");
                    }
                    bench
                        .check_dispatch(&round, &round.inputs, 0, 0, false)
                        .unwrap_or_else(|e| panic!("{line} {e}"));
                }
                eprintln!("{line}");
            }
        }
    }
}
