//! What a buffer is made for.

use std::time::Duration;

use crate::backend::platform::Platform;
use crate::bootstrap::agree::Settings;
use crate::error::{Error, Result};
use crate::layout::{CombineShape, DispatchShape, HeapConfig, IndexWidth, Placement, Plan, ScaleOrder};
use crate::tensor::DType;

/// Where the rows of one token's experts on one rank are added up when the expanded layout comes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// First on the experts' rank, rounded to BF16; then one row travels. Least traffic.
    #[default]
    AtExperts,
    /// Only at the token's rank: every row travels, one rounding in all.
    AtSource,
}

/// How the rows of a plain combine get to the tokens' ranks. Equal on all ranks in each call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// [`Pull`](Self::Pull) where it is possible, else [`Push`](Self::Push). What is possible depends on where a rank's tensors lie: for callers
    /// whose ranks all give the same kind of memory in each call.
    Auto,
    /// The experts' rank sends rows into a receive area of the token's rank. They may lie in any memory.
    #[default]
    Push,
    /// The token's rank reads them where they are: they, and weights that go back, lie in the heap, in a
    /// [`CombineInput`](crate::CombineInput) or in the result of a dispatch. Nothing is stored on the way, and few multiprocessors fill the link. Where
    /// that is not possible the call is [`Invalid`](Error::Invalid): see [`CombineArgs::transfer`](crate::CombineArgs::transfer).
    Pull,
}

/// Which processors run the operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// CUDA if the driver shows a device that kernels run on (Hopper or later), else the host, without a word: what
    /// `BackendKind::Cuda.resolve()` returns says why.
    #[default]
    Auto,
    /// GPUs.
    Cuda,
    /// CPUs, over an emulated driver: the same operations with the same results, no GPU needed.
    Host,
}

impl BackendKind {
    /// What a buffer of this process runs on if it is built with this kind, and with no driver of the caller's: never [`Auto`](Self::Auto).
    ///
    /// # Errors
    /// [`Vmm`](Error::Vmm) or [`Invalid`](Error::Invalid) for [`Cuda`](Self::Cuda) where there is no driver or no device that kernels run on.
    pub fn resolve(self) -> Result<Self> {
        Platform::choose(self, None).map(|platform| platform.kind)
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cuda => "cuda",
            Self::Host => "host",
        }
    }
}

/// The largest calls that a buffer takes, and how much it can hold at a time.
///
/// Start from [`Config::new`] and change fields. Apart from `device`, `multiprocessors` and `early_launch`, all ranks use the same values; the buffer compares them
/// when it is built.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Most tokens that a rank gives to one dispatch (M).
    pub max_tokens_per_rank: usize,
    /// Experts of all ranks together (E), a multiple of the number of ranks.
    pub experts: usize,
    /// Most experts of a token (K), 1 to 32.
    pub topk: usize,
    /// Elements of a row (H).
    pub hidden: usize,
    /// Element type of dispatched rows.
    pub dtype: DType,
    /// 4-byte scale packs of a dispatched row; 0 if there are no scales.
    pub scale_packs: usize,
    /// Order of received scales.
    pub scale_order: ScaleOrder,
    /// Width of expert ids.
    pub index: IndexWidth,
    /// Whether results may be plain: a row for each received token.
    pub plain: bool,
    /// Whether results may be expanded (a row for each received token and local expert), and the largest alignment of an expert's first row.
    pub expanded: Option<usize>,
    /// Most tokens that a rank can receive; without it the worst case, all tokens of all ranks.
    pub token_capacity: Option<usize>,
    /// Most rows of an expanded result; without it the worst case.
    pub row_capacity: Option<usize>,
    /// Ways to combine expanded results that the buffer must take.
    pub reduction: Reduction,
    /// Results of dispatches that can be held at a time, 1 to 256.
    pub output_slots: usize,
    /// Handles that can be alive at a time, 1 to 4096.
    pub handle_slots: usize,
    /// 2: combine starts without a round trip; 1: half the receive memory.
    pub receive_sets: usize,
    /// Inputs of combines in the heap that can be held at a time ([`ElasticBuffer::combine_input`](crate::ElasticBuffer::combine_input)), 0 to 256.
    /// Each takes a row for every token that can be received. Plain layout only.
    pub combine_inputs: usize,
    /// Whether rows travel in packets if no rank gives more than 256 tokens to a dispatch: a way for small batches on GPUs without a barrier between the
    /// ranks, for memory of its own. If not set, they do. Rows that travel in packets can't be [pulled](crate::Transfer::Pull).
    pub packets: bool,
    /// Bytes of host memory of each rank that are part of the heap; a multiple of 2 MiB, 0 for none.
    pub host_bytes: usize,
    /// Whether every rank's heap holds the host memory of all ranks of the host, or only its own.
    pub hybrid: bool,
    /// The longest that an operation waits for another rank.
    pub timeout: Duration,
    /// Most multiprocessors of a GPU that an operation may use; without it all, or an equal share where ranks share a GPU. May differ between ranks.
    pub multiprocessors: Option<usize>,
    /// Whether kernels are launched while the one before them in their stream still runs, which hides a launch behind it (programmatic stream serialization): if not
    /// set, they are if the rank has its device for itself. Where ranks share one, asking for it is an error. A caller's own kernel that is launched in the same way
    /// behind an operation has to wait for it (`griddepcontrol.wait`, `cudaGridDependencySynchronize`) before it touches any of its tensors.
    /// Such kernels are not launched cooperatively: where operations of two buffers run at the same time, give each its share of
    /// [`multiprocessors`](Self::multiprocessors), or blocks of one may keep those of the other out until a deadline ends both. A kernel of the caller's on another
    /// stream can keep some blocks out in the same way, while the others wait for them: give it and the operations their shares if it may run as long as
    /// [`timeout`](Self::timeout), or do without early launches. May differ between ranks.
    pub early_launch: Option<bool>,
    /// Which processors run the operations.
    pub backend: BackendKind,
    /// Device ordinal of this rank, modulo the number of devices; without it the ranks of a host take turns with the devices that kernels run on.
    pub device: Option<usize>,
}

impl Config {
    /// BF16 rows, plain results, room for the worst case.
    pub fn new(max_tokens_per_rank: usize, experts: usize, topk: usize, hidden: usize) -> Self {
        Self {
            max_tokens_per_rank,
            experts,
            topk,
            hidden,
            dtype: DType::Bf16,
            scale_packs: 0,
            scale_order: ScaleOrder::RowMajor,
            index: IndexWidth::Bits64,
            plain: true,
            expanded: None,
            token_capacity: None,
            row_capacity: None,
            reduction: Reduction::AtExperts,
            output_slots: 2,
            handle_slots: 8,
            receive_sets: 2,
            combine_inputs: 0,
            packets: true,
            host_bytes: 0,
            hybrid: false,
            timeout: Duration::from_secs(100),
            multiprocessors: None,
            early_launch: None,
            backend: BackendKind::Auto,
            device: None,
        }
    }

    /// Bytes of symmetric memory per feature, for a host with this many ranks.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) with the setting that can't work.
    pub fn plan(&self, ranks: usize) -> Result<Plan> {
        Plan::new(&self.heap_config(ranks)?)
    }

    pub(crate) fn heap_config(&self, ranks: usize) -> Result<HeapConfig> {
        if !self.plain && self.expanded.is_none() {
            return Err(Error::invalid("plain", false, "a buffer takes plain or expanded results, or both"));
        }
        if self.multiprocessors == Some(0) {
            return Err(Error::invalid("multiprocessors", 0, "an operation needs at least one"));
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid("timeout", "0", "must be longer than nothing"));
        }
        let step = crate::layout::HEAP_ALIGNMENT;
        if !self.host_bytes.is_multiple_of(step) {
            return Err(Error::invalid(
                "host_bytes",
                self.host_bytes,
                format!("must be a multiple of {step}"),
            ));
        }
        if ranks == 0 || self.experts == 0 || !self.experts.is_multiple_of(ranks) {
            let need = format!("must be a multiple of the {ranks} ranks");
            return Err(Error::invalid("experts", self.experts, need));
        }
        let placements = [
            self.plain.then_some((Placement::Plain, 1)),
            self.expanded.map(|alignment| (Placement::Expanded, alignment)),
        ];
        let row_bytes = self.hidden.saturating_mul(self.dtype.size());
        let shape = |(placement, alignment)| {
            let mut shape = self.shape(ranks, placement, alignment)?;
            shape.row_bytes = row_bytes;
            Ok(shape)
        };
        let combine = |(placement, _)| CombineShape {
            ranks,
            max_tokens: self.max_tokens_per_rank,
            topk: self.topk,
            row_bytes: self.hidden.saturating_mul(DType::Bf16.size()),
            placement,
            reduce_first: self.reduction == Reduction::AtExperts,
        };
        Ok(HeapConfig {
            dispatch: placements.into_iter().flatten().map(shape).collect::<Result<_>>()?,
            combine: placements.into_iter().flatten().map(combine).collect(),
            output_slots: self.output_slots,
            handle_slots: self.handle_slots,
            receive_sets: self.receive_sets,
            combine_inputs: self.combine_inputs,
            packets: self.packets,
        })
    }

    /// The largest dispatch with this placement and alignment.
    pub(crate) fn shape(
        &self,
        ranks: usize,
        placement: Placement,
        alignment: usize,
    ) -> Result<DispatchShape> {
        if alignment == 0 {
            return Err(Error::invalid("expert_alignment", 0, "must be at least 1"));
        }
        let worst_tokens = DispatchShape::worst_case_tokens(ranks, self.max_tokens_per_rank);
        let token_capacity = self.token_capacity.unwrap_or(worst_tokens).min(worst_tokens);
        let local = self.experts / ranks;
        let worst_rows =
            DispatchShape::worst_case_rows(ranks, self.max_tokens_per_rank, self.topk, local, alignment);
        Ok(DispatchShape {
            ranks,
            max_tokens: self.max_tokens_per_rank,
            experts: self.experts,
            topk: self.topk,
            row_bytes: self.hidden.saturating_mul(self.dtype.size()),
            scale_packs: self.scale_packs,
            scale_order: self.scale_order,
            index: self.index,
            placement,
            alignment,
            token_capacity,
            row_capacity: match placement {
                Placement::Plain => token_capacity,
                Placement::Expanded => self.row_capacity.unwrap_or(worst_rows).min(worst_rows),
            },
        })
    }

    /// What must be the same on all ranks.
    pub(crate) fn settings(&self, world_size: usize, backend: BackendKind) -> Settings {
        let optional = |value: Option<usize>| value.map_or("default".into(), |v| v.to_string());
        Settings::new()
            .with("version", env!("CARGO_PKG_VERSION"))
            .with("world_size", world_size)
            .with("backend", backend.name())
            .with("max_tokens_per_rank", self.max_tokens_per_rank)
            .with("experts", self.experts)
            .with("topk", self.topk)
            .with("hidden", self.hidden)
            .with("dtype", self.dtype)
            .with("scale_packs", self.scale_packs)
            .with("scale_order", format!("{:?}", self.scale_order))
            .with("index", format!("{:?}", self.index))
            .with("plain", self.plain)
            .with("expanded", optional(self.expanded))
            .with("token_capacity", optional(self.token_capacity))
            .with("row_capacity", optional(self.row_capacity))
            .with("reduction", format!("{:?}", self.reduction))
            .with("output_slots", self.output_slots)
            .with("handle_slots", self.handle_slots)
            .with("receive_sets", self.receive_sets)
            .with("combine_inputs", self.combine_inputs)
            .with("packets", self.packets)
            .with("host_bytes", self.host_bytes)
            .with("hybrid", self.hybrid)
            .with("timeout", format!("{:?}", self.timeout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_can_not_work_are_named() {
        type Change = fn(&mut Config);
        let broken: &[(&str, Change)] = &[
            ("max_tokens", |c| c.max_tokens_per_rank = 0),
            ("experts", |c| c.experts = 6),
            ("experts", |c| c.experts = 0),
            ("topk", |c| c.topk = 33),
            ("row_bytes", |c| c.hidden = 100),
            ("plain", |c| c.plain = false),
            ("expert_alignment", |c| c.expanded = Some(0)),
            ("host_bytes", |c| c.host_bytes = 4096),
            ("timeout", |c| c.timeout = Duration::ZERO),
            ("multiprocessors", |c| c.multiprocessors = Some(0)),
            ("output_slots", |c| c.output_slots = 0),
            ("receive_sets", |c| c.receive_sets = 3),
            ("combine_inputs", |c| c.combine_inputs = 257),
            ("combine_inputs", |c| (c.plain, c.expanded, c.combine_inputs) = (false, Some(1), 1)),
        ];
        let good = Config::new(128, 8, 2, 64);
        good.plan(4).unwrap();
        for (name, change) in broken {
            let mut config = good.clone();
            change(&mut config);
            let error = config.plan(4).unwrap_err().to_string();
            assert!(error.starts_with(name), "{name}: {error}");
        }
    }

    #[test]
    fn a_capacity_makes_the_heap_smaller() {
        let mut config = Config::new(4096, 256, 8, 7168);
        config.expanded = Some(128);
        let worst = config.plan(8).unwrap().total;
        config.row_capacity = Some(65536);
        let capped = config.plan(8).unwrap().total;
        assert!(capped < worst / 2, "{capped} against {worst}");
    }
}
