//! Bytes per feature, for people who decide what a buffer is made for.

use std::fmt;

use super::{HeapConfig, HeapLayout, Placement};
use crate::error::Result;

/// One line of a [`Plan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanItem {
    /// What the bytes are for.
    pub feature: &'static str,
    /// How they come about.
    pub formula: String,
    /// Bytes of symmetric memory on each rank.
    pub bytes: usize,
}

/// Bytes of symmetric memory on each rank, by feature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// One entry a region, in heap order; the last one rounds up to the mapping granularity.
    pub items: Vec<PlanItem>,
    /// Bytes of the heap.
    pub total: usize,
    /// Bytes of pinned host memory (status block) on each rank.
    pub host: usize,
    /// The layout itself.
    pub layout: HeapLayout,
}

impl Plan {
    /// Plans a heap.
    pub fn new(config: &HeapConfig) -> Result<Self> {
        let layout = HeapLayout::new(config)?;
        let (h, o, l, r) = (&layout.handles, &layout.outputs, &layout.landing, &layout.receive);
        let widest = config.dispatch.iter().max_by_key(|s| super::OutputLayout::new(s).bytes);
        let rows = widest.map_or(String::new(), |s| {
            let placement = match s.placement {
                Placement::Plain => "plain",
                Placement::Expanded => "expanded",
            };
            format!("{} {placement} rows of {} + {} B", s.row_capacity, s.row_bytes, s.scale_bytes())
        });
        let slots = config.combine.iter().max_by_key(|s| super::ReceiveLayout::new(s).bytes);
        let back = slots.map_or(String::from("no combine"), |s| {
            format!("{} slots × {} tokens of {} B", s.slots(), s.max_tokens, s.row_bytes)
        });
        let packets = layout.workspace.packets.map_or(0, |p| p.bytes);
        let item = |feature, formula, bytes| PlanItem { feature, formula, bytes };
        let mut items = vec![
            item(
                "synchronisation cells",
                format!("{} ranks", layout.ranks),
                layout.workspace.bytes - packets,
            ),
            item("packets", format!("2 × {} tokens of each rank", layout.max_tokens), packets),
            item("handles", format!("{} × {} B", h.count, h.stride), h.count * h.stride),
            item("dispatch results", format!("{} × ({rows} + ids and weights)", o.count), o.count * o.stride),
            item("dispatch landing slots", format!("{} × {} B", l.count, l.stride), l.count * l.stride),
            item("combine receive area", format!("{} × ({back} + weights)", r.count), r.count * r.stride),
        ];
        let i = &layout.inputs;
        if i.count > 0 {
            let formula = format!("{} × ({} rows + weights)", i.count, layout.input_rows);
            items.push(item("combine inputs", formula, i.count * i.stride));
        }
        let sum: usize = items.iter().map(|i| i.bytes).sum();
        items.push(item("rounding", String::from("2 MiB mappings, aligned regions"), layout.bytes - sum));
        Ok(Self { items, total: layout.bytes, host: layout.status.bytes, layout })
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for item in &self.items {
            writeln!(f, "{:<22} {:>16} B  {}", item.feature, item.bytes, item.formula)?;
        }
        writeln!(f, "{:<22} {:>16} B  symmetric memory on each rank", "total", self.total)?;
        write!(f, "{:<22} {:>16} B  pinned host memory", "status block", self.host)
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::tests::dispatch;
    use super::super::{CombineShape, DispatchShape};
    use super::*;

    /// Ours beside the reference design's formula: one BF16 dispatch region of R·M slots, or its combine region of the same kind.
    #[test]
    fn smaller_than_the_reference_where_it_can_be() {
        let (ranks, max_tokens) = (8, 8192);
        let mut shape: DispatchShape = dispatch(ranks, max_tokens, Placement::Plain);
        (shape.row_bytes, shape.scale_packs) = (14336, 0);
        let config = HeapConfig {
            dispatch: vec![shape],
            combine: vec![CombineShape {
                ranks,
                max_tokens,
                topk: 8,
                row_bytes: 14336,
                placement: Placement::Plain,
                reduce_first: true,
            }],
            output_slots: 1,
            handle_slots: 1,
            receive_sets: 1,
            combine_inputs: 0,
            packets: true,
        };
        let plan = Plan::new(&config).unwrap();
        assert_eq!(plan.items.iter().map(|i| i.bytes).sum::<usize>(), plan.total);
        let (slot, reference_workspace) = (14_464, 14 << 20);
        let reference_dispatch = ranks * max_tokens * slot;
        assert_eq!(reference_dispatch, 947_912_704);
        // The result itself included; the reference allocates it besides.
        assert!(plan.items[3].bytes < reference_dispatch + (1 << 20), "{plan}");
        assert!(plan.items[5].bytes < 943_718_400 * 7 / 8 + (1 << 20), "{plan}");
        assert!(plan.items[..3].iter().map(|i| i.bytes).sum::<usize>() < reference_workspace, "{plan}");
        assert!(plan.to_string().contains("65536 plain rows of 14336 + 0 B"), "{plan}");
    }
}
