//! The table of cases.

use super::input::{Case, Routing};
use crate::jit::PULL_PARTS;
use crate::layout::{IndexWidth, Placement, ScaleOrder};

type Named = (String, Case);

/// Everything that is worth a try with this number of ranks.
pub(super) fn all(ranks: usize) -> Vec<Named> {
    let mut all = Vec::new();
    for placement in [Placement::Plain, Placement::Expanded] {
        let tag = if placement == Placement::Plain { "plain" } else { "expanded" };
        let mut add = |name: &str, change: &dyn Fn(&mut Case)| {
            let mut case = Case::new(ranks, 150, placement);
            change(&mut case);
            all.push((format!("{tag}, {name}"), case));
        };
        add("as it comes", &|_| {});
        add("32-bit ids, no weights", &|c| (c.index, c.weights) = (IndexWidth::Bits32, false));
        add("one token", &|c| (c.max_tokens, c.tokens) = (1, vec![1; ranks]));
        add("unequal tokens, last rank has none", &|c| {
            c.tokens = (0..ranks).map(|r| 150 - 40 * r.min(3)).collect();
            c.tokens[ranks - 1] = 0;
        });
        add("nobody has tokens", &|c| c.tokens = vec![0; ranks]);
        for (name, routing) in [
            ("holes", Routing::Holes),
            ("hot experts", Routing::Hot),
            ("all to rank 0", Routing::OneRank(0)),
            ("all to the last rank", Routing::OneRank(ranks - 1)),
            ("no experts at all", Routing::Nothing),
        ] {
            add(name, &|c| c.routing = routing);
        }
        add("scales in bulk", &|c| c.scale_packs = 4);
        add("scales of odd length", &|c| c.scale_packs = 5);
        add("scales by column", &|c| (c.scale_packs, c.scales_by_column) = (56, true));
        add("scales to columns", &|c| (c.scale_packs, c.scale_order) = (8, ScaleOrder::ColumnMajor));
        add("scales to columns from columns, many", &|c| {
            (c.scale_packs, c.scale_order, c.scales_by_column) = (200, ScaleOrder::ColumnMajor, true);
        });
        for topk in [1, 3, 8, 17, 32] {
            add(&format!("top-{topk} of 64 a rank"), &|c| {
                (c.topk, c.experts, c.routing) = (topk, 64 * ranks, Routing::Holes)
            });
        }
        add("one expert a rank", &|c| (c.experts, c.topk) = (ranks, ranks.min(4)));
        add("2048 experts", &|c| (c.experts, c.topk) = (2048 / ranks * ranks, 8));
        for row in [16, 48, 2064, 7168, 28672, 98304] {
            add(&format!("rows of {row} B"), &|c| {
                (c.row_bytes, c.max_tokens, c.tokens) = (row, 40, vec![40; ranks])
            });
        }
        for hidden in [8, 264, 2056, 7168] {
            add(&format!("hidden {hidden}"), &|c| {
                (c.hidden, c.max_tokens, c.tokens) = (hidden, 60, vec![60; ranks])
            });
        }
        add("one bias", &|c| c.biases = 1);
        add("two biases, holes", &|c| (c.biases, c.routing) = (2, Routing::Holes));
        add("any bits", &|c| (c.wild, c.routing, c.topk) = (true, Routing::Holes, 8));
        add("any bits, bias", &|c| (c.wild, c.routing, c.biases) = (true, Routing::Holes, 1));
        add("one receive set", &|c| c.sets = 1);
        for blocks in [1, 2, 5, 31] {
            add(&format!("{blocks} blocks"), &|c| c.blocks = blocks);
        }
        add("alignment 8", &|c| (c.alignment, c.routing) = (8, Routing::Holes));
        if placement == Placement::Expanded {
            add("alignment 128, zeroed", &|c| (c.alignment, c.zero_padding, c.scale_packs) = (128, true, 4));
            add("alignment 16, zeroed, columns, no weights", &|c| {
                (c.alignment, c.zero_padding, c.weights) = (16, true, false);
                (c.scale_packs, c.scale_order) = (3, ScaleOrder::ColumnMajor);
            });
            for parts in 1..=4 {
                add(&format!("sums in {parts} parts, 5 blocks"), &|c| {
                    (c.hidden, c.parts, c.blocks, c.biases) = (7168, Some(parts), 5, 1);
                });
            }
            add("sum at the source", &|c| (c.reduce_first, c.topk, c.experts) = (false, 8, 16 * ranks));
            add("sum at the source, two biases, any bits", &|c| {
                (c.reduce_first, c.biases, c.wild, c.routing) = (false, 2, true, Routing::Holes);
            });
        }
    }
    // The shapes that times are measured with.
    let mut large = Case::new(ranks, 4096 / ranks, Placement::Plain);
    (large.experts, large.topk, large.row_bytes, large.scale_packs) = (256 / ranks * ranks, 8, 7168, 56);
    large.hidden = 512;
    all.push(("plain, thousands of FP8 rows".into(), large.clone()));
    large.placement = Placement::Expanded;
    (large.max_tokens, large.tokens) = (1024 / ranks, vec![1024 / ranks; ranks]);
    all.push(("expanded, thousands of FP8 rows".into(), large));
    with_packets(with_pulled(all))
}

/// The same once more with rows that are read where they are: all, or some.
fn with_pulled(mut all: Vec<Named>) -> Vec<Named> {
    let pulled: Vec<Named> = [("pulled", PULL_PARTS), ("some pulled", 21)]
        .into_iter()
        .flat_map(|(how, pulled)| {
            let plain = all.iter().filter(|(_, case)| case.placement == Placement::Plain && case.ranks > 1);
            plain.map(move |(name, case)| (format!("{how}, {name}"), Case { pulled, ..case.clone() }))
        })
        .collect();
    all.extend(pulled);
    all
}

/// The same once more with rows in packets, where they can be.
fn with_packets(mut all: Vec<Named>) -> Vec<Named> {
    let packets: Vec<Named> = all
        .iter()
        .map(|(name, case)| (format!("packets, {name}"), Case { packets: true, ..case.clone() }))
        .filter(|(_, case)| case.in_packets() && case.pulled == 0)
        .collect();
    all.extend(packets);
    all
}

/// Small enough for thousands of rounds, busy enough for races.
pub(super) fn stress(ranks: usize) -> Vec<Named> {
    let mut all = Vec::new();
    for placement in [Placement::Plain, Placement::Expanded] {
        let mut case = Case::new(ranks, 256, placement);
        (case.row_bytes, case.hidden, case.scale_packs) = (1024, 256, 4);
        (case.topk, case.experts, case.routing) = (6, 32 * ranks, Routing::Holes);
        case.tokens = (0..ranks).map(|r| 256 - 37 * (r % 4)).collect();
        all.push((format!("{placement:?}"), case.clone()));
        (case.sets, case.scale_packs, case.biases) = (1, 3, 1);
        all.push((format!("{placement:?}, one set, odd scales"), case));
    }
    let mut all = with_packets(with_pulled(all));
    // Kernels for their sizes, beside those for all.
    let for_sizes: Vec<Named> = all
        .iter()
        .filter(|(_, case)| case.packets)
        .map(|(name, case)| (format!("{name}, for its sizes"), Case { for_sizes: true, ..case.clone() }))
        .collect();
    all.extend(for_sizes);
    all
}
