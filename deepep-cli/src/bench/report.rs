//! A whole run, as it is written to JSON and read back.

use serde::{Deserialize, Serialize};

use super::ceilings::{Batch, Ceiling, Drift, Kind, best, packet_exchange};
use super::machine::Machine;
use super::plan::{Operation, Precision, Setting};
use super::stats::{Quantiles, median, slowest};

/// Version of the form of [`Report`].
pub const SCHEMA: u32 = 3;

/// Drift of a ceiling, in percent, from which on it is reported.
pub const DRIFT_LIMIT: f64 = 2.0;

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// When it began, UTC.
    pub date: String,
    /// The command.
    pub command: String,
    /// Where it ran.
    pub machine: Machine,
    /// How.
    pub method: Method,
    /// What a reader must know.
    pub notes: Vec<String>,
    /// Ceilings at the start.
    pub ceilings: Vec<Ceiling>,
    /// How they changed until the end.
    pub drift: Vec<Drift>,
    /// Results, in the order of the plan.
    pub results: Vec<Entry>,
}

/// How a run measures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Method {
    /// `cuda` or `host`.
    pub backend: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Most ranks on one device.
    pub ranks_per_device: usize,
    /// Whether ranks are processes, else threads of one.
    pub processes: bool,
    /// Timed calls.
    pub iterations: usize,
    /// Tokens from which on L2 is emptied before each call.
    pub flush_from_tokens: usize,
    /// Alignment of experts' first rows in the expanded layout.
    pub alignment: usize,
    /// Whether kernels are launched while the one before them in the stream still runs.
    pub early_launch: bool,
    /// Whether rows of small batches, up to 256 tokens of a rank, travel in packets.
    pub packets: bool,
    /// Seed of all generated data.
    pub seed: u64,
}

/// One operation of one setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The setting.
    pub setting: Setting,
    /// The operation.
    pub operation: Operation,
    /// How it went.
    pub outcome: Outcome,
}

/// How it went. Only right results have times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Right before and after it was timed.
    Timed(Box<Times>),
    /// A result differs from the oracle's.
    Wrong(String),
    /// The library or the device returned an error.
    Failed(String),
    /// Not possible here.
    Skipped(String),
}

/// Times of one operation, in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Times {
    /// From the input being ready to the result being usable, on the caller's stream, on the slowest rank.
    pub end_to_end_us: Quantiles,
    /// The same median without what an empty kernel takes between two events.
    pub kernel_us: Option<f64>,
    /// Time until a call returns, in a chain of calls, on the slowest rank.
    pub host_wall_us: Option<Quantiles>,
    /// What such a call takes of its thread's CPU time, on the slowest rank.
    pub host_cpu_us: Option<Quantiles>,
    /// A call in a chain of calls, on the slowest rank.
    pub chained_us: Option<f64>,
    /// Bytes of rows and scales that cross the busiest link, in the busier direction.
    pub wire_bytes: u64,
    /// These over the median.
    pub wire_gb_per_second: f64,
    /// That over the best rate that multiprocessors reach in this run: of stores to peers, or of reads from peers if rows are pulled.
    pub of_link: Option<f64>,
    /// That over the rate of the copy engines in this run.
    pub of_copy_engine: Option<f64>,
    /// The least possible: these bytes at that rate.
    pub bound_us: Option<f64>,
    /// The median over the bound.
    pub times_bound: Option<f64>,
    /// Of pairs in a graph: what a pair of kernels takes in this run that exchange packets of as many bytes, and do nothing else.
    pub packet_exchange_us: Option<f64>,
    /// The median over that.
    pub times_packet_exchange: Option<f64>,
    /// Bytes of symmetric memory on each rank.
    pub symmetric_bytes: u64,
}

/// What one rank measured of one operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// Each call alone, from event to event.
    pub single: Vec<f64>,
    /// Mean time until a call returns in each chain.
    pub host_wall: Vec<f64>,
    /// Mean CPU time of a call in each chain.
    pub host_cpu: Vec<f64>,
    /// Mean time of a call in each chain.
    pub chained: Vec<f64>,
    /// Bytes that come from peers.
    pub bytes_in: u64,
    /// Bytes that go to peers.
    pub bytes_out: u64,
    /// Bytes of symmetric memory.
    pub symmetric_bytes: u64,
}

/// What one rank has to say about one operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Right, with times.
    Timed(Samples),
    /// A result differs.
    Wrong(String),
    /// An error.
    Failed(String),
    /// Not possible here.
    Skipped(String),
}

impl Outcome {
    /// From all ranks' parts: times only if all ranks have them.
    pub fn of(
        setting: &Setting,
        operation: Operation,
        ranks: &[Part],
        ceilings: &[Ceiling],
        shared_devices: bool,
    ) -> Self {
        // A difference names the rank that found it.
        let wrong = ranks.iter().find_map(|p| if let Part::Wrong(what) = p { Some(what) } else { None });
        if let Some(what) = wrong {
            return Self::Wrong(what.clone());
        }
        // The first to fail is not always the first to say so.
        let failed = ranks.iter().enumerate().filter_map(|(rank, part)| match part {
            Part::Failed(what) => Some(format!("rank {rank}: {what}")),
            _ => None,
        });
        let failed: Vec<String> = failed.collect();
        if !failed.is_empty() {
            return Self::Failed(failed.join("; "));
        }
        let skipped = ranks.iter().find_map(|p| if let Part::Skipped(why) = p { Some(why) } else { None });
        if let Some(why) = skipped {
            return Self::Skipped(why.clone());
        }
        let samples: Vec<&Samples> =
            ranks.iter().filter_map(|p| if let Part::Timed(s) = p { Some(s) } else { None }).collect();
        match Times::of(setting, operation, &samples, ceilings, shared_devices) {
            Some(times) => Self::Timed(Box::new(times)),
            None => Self::Failed("no rank has timed anything".into()),
        }
    }
}

impl Times {
    fn of(
        setting: &Setting,
        operation: Operation,
        ranks: &[&Samples],
        ceilings: &[Ceiling],
        shared_devices: bool,
    ) -> Option<Self> {
        let all = |pick: fn(&Samples) -> &Vec<f64>| ranks.iter().map(|s| pick(s).clone()).collect::<Vec<_>>();
        let end_to_end = Quantiles::of(&slowest(&all(|s| &s.single)))?;
        let wire_bytes = ranks.iter().map(|s| s.bytes_in.max(s.bytes_out)).max()?;
        let rate = if end_to_end.p50 > 0.0 { wire_bytes as f64 / end_to_end.p50 / 1e3 } else { 0.0 };
        // Where ranks share a device no link is crossed, and its ceilings say nothing.
        let of = |kinds: &[Kind]| {
            let rates = kinds.iter().filter_map(|&kind| best(ceilings, kind));
            rates.max_by(f64::total_cmp).filter(|_| !shared_devices && wire_bytes > 0)
        };
        let link = match operation {
            Operation::Pulled => of(&[Kind::BulkReads]),
            _ => of(&[Kind::Stores, Kind::BulkStores]),
        };
        let bound = link.map(|rate| wire_bytes as f64 / rate / 1e3);
        let exchange = match (operation, setting.dtype) {
            (Operation::Graph, Precision::Fp8) if !shared_devices && setting.sms.is_none() => {
                let batch = Batch { tokens: setting.tokens as u32, hidden: setting.shape.hidden as u32 };
                packet_exchange(ceilings, batch)
            }
            _ => None,
        };
        let chained = slowest(&all(|s| &s.chained));
        Some(Self {
            end_to_end_us: end_to_end,
            kernel_us: best(ceilings, Kind::Launch).map(|floor| (end_to_end.p50 - floor).max(0.0)),
            host_wall_us: Quantiles::of(&slowest(&all(|s| &s.host_wall))),
            host_cpu_us: Quantiles::of(&slowest(&all(|s| &s.host_cpu))),
            chained_us: (!chained.is_empty()).then(|| median(&chained)),
            wire_bytes,
            wire_gb_per_second: rate,
            of_link: link.map(|most| rate / most),
            of_copy_engine: of(&[Kind::CopyEngine]).map(|most| rate / most),
            bound_us: bound,
            times_bound: bound.map(|bound| end_to_end.p50 / bound),
            packet_exchange_us: exchange,
            times_packet_exchange: exchange.map(|least| end_to_end.p50 / least),
            symmetric_bytes: ranks.iter().map(|s| s.symmetric_bytes).max()?,
        })
    }
}

impl Report {
    /// Whether everything that ran was right.
    pub fn good(&self) -> bool {
        self.results.iter().all(|e| matches!(e.outcome, Outcome::Timed(_) | Outcome::Skipped(_)))
    }

    /// Ceilings that changed by more than [`DRIFT_LIMIT`], in words.
    pub fn drifted(&self) -> Vec<String> {
        let far = self.drift.iter().filter(|drift| drift.percent > DRIFT_LIMIT);
        far.map(|drift| {
            let (first, unit) = (drift.first, drift.first.kind.unit());
            let sms = first.sms.map_or(String::new(), |sms| format!(", {sms} SMs"));
            let later: Vec<String> = drift.later.iter().map(|value| format!("{value:.2}")).collect();
            format!(
                "{}{sms}: {:.2} {unit} at first, {} {unit} later, {:.1} % apart",
                first.name(),
                first.value,
                later.join(" and "),
                drift.percent
            )
        })
        .collect()
    }
}

#[cfg(test)]
#[path = "../../tests/fields/mod.rs"]
mod fields;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::machine::DeviceInfo;
    use crate::bench::plan::Layout;

    fn setting(tokens: usize) -> Setting {
        Setting {
            shape: "7168,8,256".parse().unwrap(),
            routing: "uniform".to_owned().try_into().unwrap(),
            tokens,
            dtype: Precision::Fp8,
            layout: Layout::Expanded,
            sms: None,
        }
    }

    fn samples(single: &[f64], bytes_in: u64) -> Part {
        Part::Timed(Samples {
            single: single.to_vec(),
            host_wall: vec![5.0; single.len()],
            host_cpu: vec![3.0; single.len()],
            chained: vec![],
            bytes_in,
            bytes_out: 1000,
            symmetric_bytes: 4096,
        })
    }

    #[test]
    fn times_are_those_of_the_slowest_rank_and_the_busiest_link() {
        let ranks = [samples(&[10.0, 20.0, 30.0], 36_700), samples(&[11.0, 19.0, 31.0], 500)];
        let ceilings = [
            (Kind::BulkStores, 3.67),
            (Kind::BulkReads, 1.835),
            (Kind::CopyEngine, 4.0),
            (Kind::Launch, 4.5),
        ]
        .map(|(kind, value)| Ceiling::of(kind, value));
        let of = |operation, shared| Outcome::of(&setting(128), operation, &ranks, &ceilings, shared);
        let Outcome::Timed(times) = of(Operation::Dispatch, false) else { panic!() };
        assert_eq!(times.end_to_end_us, Quantiles { p10: 11.0, p50: 20.0, p90: 31.0 });
        assert_eq!((times.kernel_us, times.chained_us, times.wire_bytes), (Some(15.5), None, 36_700));
        assert!((times.wire_gb_per_second - 1.835).abs() < 1e-9);
        assert!((times.of_link.unwrap() - 0.5).abs() < 1e-9);
        assert!((times.bound_us.unwrap() - 10.0).abs() < 1e-9);
        assert!((times.times_bound.unwrap() - 2.0).abs() < 1e-9);
        let host = [times.host_wall_us, times.host_cpu_us].map(|host| host.map(|host| host.p50));
        assert_eq!(host, [Some(5.0), Some(3.0)]);
        // Rows that are pulled are read.
        let Outcome::Timed(pulled) = of(Operation::Pulled, false) else { panic!() };
        assert!((pulled.of_link.unwrap() - 1.0).abs() < 1e-9);
        assert!((pulled.bound_us.unwrap() - 20.0).abs() < 1e-9);
        assert_eq!(pulled.of_copy_engine, times.of_copy_engine);
        let Outcome::Timed(times) = of(Operation::Dispatch, true) else { panic!() };
        assert_eq!((times.bound_us, times.of_link), (None, None));
    }

    #[test]
    fn pairs_in_a_graph_are_compared_with_exchanges_of_the_same_bytes() {
        let ranks = [samples(&[12.0], 36_700)];
        let ceilings = [(1, 5.0), (128, 10.0)]
            .map(|(tokens, least)| Batch { tokens, hidden: 7168 }.ceiling(least))
            .to_vec();
        let of = |setting: &Setting, operation, shared| {
            let outcome = Outcome::of(setting, operation, &ranks, &ceilings, shared);
            let Outcome::Timed(times) = outcome else { panic!() };
            times.packet_exchange_us.zip(times.times_packet_exchange)
        };
        assert_eq!(of(&setting(128), Operation::Graph, false), Some((10.0, 1.2)));
        assert_eq!(of(&setting(128), Operation::Graph, true), None);
        assert_eq!(of(&setting(128), Operation::Pair, false), None);
        assert_eq!(of(&setting(64), Operation::Graph, false), None);
        let bf16 = Setting { dtype: Precision::Bf16, ..setting(128) };
        assert_eq!(of(&bf16, Operation::Graph, false), None);
        let few = Setting { sms: Some(16), ..setting(128) };
        assert_eq!(of(&few, Operation::Graph, false), None);
    }

    #[test]
    fn the_form_is_the_one_that_readers_know() {
        let bulk = Ceiling::of(Kind::BulkStores, 350.0);
        let first = Ceiling { sms: Some(8), row_bytes: Some(7168), ..bulk };
        let exchange = Batch { tokens: 32, hidden: 7168 }.ceiling(8.0);
        let quantiles = Quantiles { p10: 1.0, p50: 2.0, p90: 3.0 };
        let times = Times {
            end_to_end_us: quantiles,
            kernel_us: Some(1.0),
            host_wall_us: Some(quantiles),
            host_cpu_us: Some(quantiles),
            chained_us: Some(1.0),
            wire_bytes: 1,
            wire_gb_per_second: 1.0,
            of_link: Some(0.5),
            of_copy_engine: Some(0.5),
            bound_us: Some(1.0),
            times_bound: Some(2.0),
            packet_exchange_us: Some(1.0),
            times_packet_exchange: Some(2.0),
            symmetric_bytes: 1,
        };
        let text = String::new;
        let outcomes = [
            Outcome::Timed(Box::new(times)),
            Outcome::Wrong(text()),
            Outcome::Failed(text()),
            Outcome::Skipped(text()),
        ];
        let entry = |outcome| Entry { setting: setting(4096), operation: Operation::Graph, outcome };
        let mut machine = Machine::find(false);
        machine.devices.push(DeviceInfo::default());
        let report = Report {
            schema: SCHEMA,
            date: text(),
            command: text(),
            machine,
            method: Method {
                backend: text(),
                ranks: 2,
                ranks_per_device: 1,
                processes: true,
                iterations: 1,
                flush_from_tokens: 512,
                alignment: 1,
                early_launch: true,
                packets: true,
                seed: 1,
            },
            notes: vec![text()],
            ceilings: vec![first, exchange],
            drift: vec![
                Drift { first, later: vec![340.0], percent: 2.9 },
                Drift { first: exchange, later: vec![8.4], percent: 5.0 },
            ],
            results: outcomes.map(entry).into(),
        };
        assert!(!report.good());
        assert_eq!(
            report.drifted(),
            [
                "bulk stores to peers, 8 SMs: 350.00 GB/s at first, 340.00 GB/s later, 2.9 % apart",
                "packet exchange, there and back, T = 32: 8.00 µs at first, 8.40 µs later, 5.0 % apart",
            ]
        );
        let value = serde_json::to_value(&report).unwrap();
        assert_eq!(serde_json::from_value::<Report>(value.clone()).unwrap(), report);
        assert_eq!(
            fields::of(&value),
            fields::known(),
            "a changed form has a new SCHEMA, and bench-fields.txt"
        );
    }

    #[test]
    fn one_rank_that_is_wrong_takes_all_times_away() {
        let right = samples(&[1.0], 1);
        let wrong = Part::Wrong("row 3".into());
        let failed = Part::Failed("no memory".into());
        let of = |parts: &[Part]| Outcome::of(&setting(1), Operation::Dispatch, parts, &[], false);
        assert_eq!(of(&[right.clone(), wrong.clone()]), Outcome::Wrong("row 3".into()));
        assert_eq!(of(&[failed.clone(), wrong]), Outcome::Wrong("row 3".into()));
        assert_eq!(of(&[failed, right.clone()]), Outcome::Failed("rank 0: no memory".into()));
        assert_eq!(of(&[right, Part::Skipped("no graphs".into())]), Outcome::Skipped("no graphs".into()));
        assert!(matches!(of(&[]), Outcome::Failed(_)));
        assert!(matches!(of(&[samples(&[], 0)]), Outcome::Failed(_)));
    }
}
