//! The symmetric heap as a whole.

use super::{
    CombineShape, Cursor, DispatchShape, GROUP_PACKETS, HEAP_ALIGNMENT, HandleLayout, InputLayout,
    LANDING_SLOTS, MAX_SUM_PARTS, OutputLayout, PACKET_BYTES, PacketLayout, Placement, ReceiveLayout,
    StatusLayout, WorkspaceLayout, align_up, id_packets, packet_groups, weight_packets,
};
use crate::error::{Error, Result};

/// What a buffer is made for: the largest calls it must take.
///
/// A call of another shape is possible as long as its layouts fit: see [`HeapLayout::fits_dispatch`] and
/// [`HeapLayout::fits_combine`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeapConfig {
    /// Shapes of dispatches the buffer must take. Ranks, max_tokens and experts are the same in all.
    pub dispatch: Vec<DispatchShape>,
    /// Shapes of combines the buffer must take.
    pub combine: Vec<CombineShape>,
    /// Results of dispatches that can be held at the same time, 1 to 256.
    pub output_slots: usize,
    /// Handles that can be alive at the same time, 1 to 4096.
    pub handle_slots: usize,
    /// Sets of the receive area: 2 (no round trip at the start of a combine), or 1 (half the memory).
    pub receive_sets: usize,
    /// Slots for outputs of experts that other ranks read where they are, 0 to 256. Plain combines only.
    pub combine_inputs: usize,
    /// Rows travel in packets if max_tokens is small enough (see [`PacketLayout::possible`]): a fraction of the time, for memory of their own.
    pub packets: bool,
}

/// Equal areas, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotArray {
    /// Offset of the first one in the heap.
    pub offset: usize,
    /// Bytes from one to the next.
    pub stride: usize,
    /// How many there are.
    pub count: usize,
}

impl SlotArray {
    /// Offset of one area in the heap.
    pub const fn at(&self, index: usize) -> usize {
        self.offset + index * self.stride
    }

    fn place(cursor: &mut Cursor, count: usize, stride: usize) -> Self {
        Self { offset: cursor.take(count, stride), stride, count }
    }
}

/// Layout of a rank's heap. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapLayout {
    /// Ranks of the domain.
    pub ranks: usize,
    /// Most tokens a rank may give.
    pub max_tokens: usize,
    /// Most experts over all ranks.
    pub experts: usize,
    /// The workspace, at offset 0.
    pub workspace: WorkspaceLayout,
    /// Handle slots.
    pub handles: SlotArray,
    /// Output slots.
    pub outputs: SlotArray,
    /// `[2 parities][peers][landing_slots]`: rows of an expanded dispatch that come before their places are known.
    pub landing: SlotArray,
    /// Such rows of one rank, at most.
    pub landing_slots: usize,
    /// Sets of combine's receive area.
    pub receive: SlotArray,
    /// Slots for outputs of experts.
    pub inputs: SlotArray,
    /// What lies in one of them.
    pub input: InputLayout,
    /// Rows of one of them.
    pub input_rows: usize,
    /// The status block, which is not part of the heap.
    pub status: StatusLayout,
    /// Bytes of the heap, a multiple of [`HEAP_ALIGNMENT`].
    pub bytes: usize,
}

impl HeapLayout {
    /// Lays out a heap that takes every shape of `config`.
    pub fn new(config: &HeapConfig) -> Result<Self> {
        let Some(first) = config.dispatch.first() else {
            return Err(Error::invalid("dispatch shapes", 0, "a buffer needs at least one"));
        };
        let in_range = [
            ("output_slots", config.output_slots, 1, 256),
            ("handle_slots", config.handle_slots, 1, 4096),
            ("receive_sets", config.receive_sets, 1, 2),
            ("combine_inputs", config.combine_inputs, 0, 256),
        ];
        for (name, value, low, high) in in_range {
            if value < low || value > high {
                return Err(Error::invalid(name, value, format!("must be {low} to {high}")));
            }
        }
        let (mut output, mut experts, mut local_experts, mut row) = (0, 0, 0, 0);
        for shape in &config.dispatch {
            shape.validate()?;
            if shape.ranks != first.ranks || shape.max_tokens != first.max_tokens {
                let need = format!("ranks and max_tokens must be those of the first ({first:?})");
                return Err(Error::invalid("dispatch shape", format!("{shape:?}"), need));
            }
            output = output.max(OutputLayout::new(shape).bytes);
            if shape.placement == Placement::Expanded {
                row = row.max(Self::landing_bytes(shape));
            }
            experts = experts.max(shape.experts);
            local_experts = local_experts.max(shape.local_experts());
        }
        let packets = config.packets && PacketLayout::possible(first.ranks, first.max_tokens, experts);
        let handles = config.dispatch.iter().map(|shape| HandleLayout::new(shape, packets).bytes);
        let handle = handles.max().unwrap_or(0);
        let (mut set, mut flags) = (0, 0);
        for shape in &config.combine {
            shape.validate()?;
            if shape.ranks != first.ranks || shape.max_tokens != first.max_tokens {
                let need = format!("ranks and max_tokens must be those of the dispatch shapes ({first:?})");
                return Err(Error::invalid("combine shape", format!("{shape:?}"), need));
            }
            set = set.max(ReceiveLayout::new(shape).bytes);
            flags = flags.max(shape.flags());
        }
        let (input, input_rows) = Self::input(config)?;
        let (ranks, max_tokens) = (first.ranks, first.max_tokens);
        let mut workspace = WorkspaceLayout::new(ranks, max_tokens, experts, flags, config.receive_sets);
        if packets {
            workspace = workspace.with_packets(|cursor| {
                PacketLayout::place(cursor, ranks, max_tokens, &config.dispatch, &config.combine)
            });
        }
        let mut cursor = Cursor::at(workspace.bytes);
        let handles = SlotArray::place(&mut cursor, config.handle_slots, handle);
        let outputs = SlotArray::place(&mut cursor, config.output_slots, output);
        let landing_slots = if packets || row == 0 { 0 } else { (LANDING_SLOTS / ranks).min(max_tokens) };
        let landing = SlotArray::place(&mut cursor, 2 * (ranks - 1) * landing_slots, row);
        let receive = SlotArray::place(&mut cursor, config.receive_sets, set);
        let inputs = SlotArray::place(&mut cursor, config.combine_inputs, input.bytes);
        let bytes = align_up(cursor.bytes(), HEAP_ALIGNMENT);
        if bytes > 1 << 46 {
            return Err(Error::invalid("heap bytes", bytes, "must be below 64 TiB; lower a capacity"));
        }
        Ok(Self {
            ranks: first.ranks,
            max_tokens: first.max_tokens,
            experts,
            workspace,
            handles,
            outputs,
            landing,
            landing_slots,
            receive,
            inputs,
            input,
            input_rows,
            status: StatusLayout::new(local_experts),
            bytes,
        })
    }

    /// How many rows of a rank can come before their places are known in a dispatch of this shape: none in the plain layout, nor if they are larger than the
    /// rows that the buffer was made for.
    pub(crate) fn landing_slots(&self, shape: &DispatchShape) -> usize {
        let fits = Self::landing_bytes(shape) <= self.landing.stride;
        if shape.placement == Placement::Expanded && fits { self.landing_slots } else { 0 }
    }

    /// A landing slot holds a row and its scales, in whole cache lines.
    fn landing_bytes(shape: &DispatchShape) -> usize {
        align_up(shape.row_bytes + shape.scale_bytes(), WorkspaceLayout::LINE)
    }

    /// A slot for outputs of experts takes the widest plain combine, and as many rows as a plain dispatch can deliver.
    fn input(config: &HeapConfig) -> Result<(InputLayout, usize)> {
        let rows = config.dispatch.iter().filter(|d| d.placement == Placement::Plain);
        let rows = rows.map(|d| d.row_capacity).max().unwrap_or(0);
        let plain = config.combine.iter().filter(|c| c.placement == Placement::Plain);
        let all = plain.map(|shape| InputLayout::new(shape, rows)).max_by_key(|input| input.bytes);
        match all {
            Some(input) if config.combine_inputs > 0 => Ok((input, rows)),
            None if config.combine_inputs > 0 => {
                let need =
                    "rows are read where they are in the plain layout only, which this buffer does not take";
                Err(Error::invalid("combine_inputs", config.combine_inputs, need))
            }
            _ => Ok((InputLayout { rows: 0, weights: 0, bytes: 0 }, 0)),
        }
    }

    /// Checks that a dispatch of this shape fits into a slot of each kind, and returns where its parts lie.
    pub fn fits_dispatch(&self, shape: &DispatchShape) -> Result<(OutputLayout, HandleLayout)> {
        shape.validate()?;
        self.same_domain(shape.ranks, shape.max_tokens)?;
        if shape.experts > self.experts {
            let need = format!("the buffer was made for at most {}", self.experts);
            return Err(Error::invalid("experts", shape.experts, need));
        }
        let output = OutputLayout::new(shape);
        let handle = HandleLayout::new(shape, self.workspace.packets.is_some());
        Self::fits("an output slot", output.bytes, self.outputs.stride)?;
        Self::fits("a handle slot", handle.bytes, self.handles.stride)?;
        if let Some(p) = &self.workspace.packets {
            let row = packet_groups(shape.row_bytes + shape.scale_bytes()) * GROUP_PACKETS * PACKET_BYTES;
            Self::fits("packets of a row", row, p.row_stride)?;
            let ids = id_packets(shape.topk) * self.max_tokens * PACKET_BYTES;
            Self::fits("packets of ids", ids, p.id_stride)?;
            Self::fits("packets of weights", weight_packets(shape.topk) * PACKET_BYTES, p.weight_stride)?;
        }
        Ok((output, handle))
    }

    /// Checks that a combine of this shape fits into a set of the receive area, and returns where its parts lie.
    pub fn fits_combine(&self, shape: &CombineShape) -> Result<ReceiveLayout> {
        shape.validate()?;
        self.same_domain(shape.ranks, shape.max_tokens)?;
        let receive = ReceiveLayout::new(shape);
        Self::fits("a set of the receive area", receive.bytes, self.receive.stride)?;
        let cells = shape.slots() * shape.max_tokens;
        Self::fits("arrival cells", cells, self.workspace.arrived_set)?;
        if let Some(p) = &self.workspace.packets {
            let row = packet_groups(shape.row_bytes) * GROUP_PACKETS * PACKET_BYTES;
            Self::fits("packets of a combined row", row, p.back_stride)?;
            let weights = weight_packets(shape.topk) * PACKET_BYTES;
            Self::fits("packets of combined weights", weights, p.back_weight_stride)?;
        }
        Ok(receive)
    }

    /// Most parts in which sums of this shape can travel: as many as there is room for flags.
    pub fn most_sum_parts(&self, shape: &CombineShape) -> usize {
        let cells = shape.slots() * shape.max_tokens;
        self.workspace
            .arrived_set
            .checked_div(cells)
            .map_or(MAX_SUM_PARTS, |most| most.clamp(1, MAX_SUM_PARTS))
    }

    fn same_domain(&self, ranks: usize, max_tokens: usize) -> Result<()> {
        if ranks != self.ranks {
            return Err(Error::invalid("ranks", ranks, format!("the buffer has {}", self.ranks)));
        }
        if max_tokens != self.max_tokens {
            let need = format!("the buffer was made for {}", self.max_tokens);
            return Err(Error::invalid("max_tokens", max_tokens, need));
        }
        Ok(())
    }

    fn fits(what: &'static str, needed: usize, capacity: usize) -> Result<()> {
        if needed > capacity {
            let need = format!("the buffer has {capacity}; make it for this shape, too");
            return Err(Error::invalid(what, format!("{needed} needed"), need));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::tests::dispatch;
    use super::*;

    fn config(ranks: usize, max_tokens: usize, placement: Placement) -> HeapConfig {
        HeapConfig {
            dispatch: vec![dispatch(ranks, max_tokens, placement)],
            combine: vec![CombineShape {
                ranks,
                max_tokens,
                topk: 8,
                row_bytes: 14336,
                placement,
                reduce_first: true,
            }],
            output_slots: 2,
            handle_slots: 4,
            receive_sets: 2,
            combine_inputs: usize::from(placement == Placement::Plain),
            packets: true,
        }
    }

    #[test]
    fn regions_do_not_overlap() {
        for ranks in [1, 2, 4, 8] {
            let l = HeapLayout::new(&config(ranks, 300, Placement::Expanded)).unwrap();
            assert_eq!((l.inputs.stride, l.input_rows), (0, 0));
            let p = HeapLayout::new(&config(ranks, 300, Placement::Plain)).unwrap();
            assert!(p.receive.at(p.receive.count) <= p.inputs.offset && p.inputs.at(1) <= p.bytes);
            assert_eq!((p.input_rows, p.input.weights), (300 * ranks, 300 * ranks * 14336));
            assert!(l.workspace.bytes <= l.handles.offset);
            assert!(l.handles.at(l.handles.count) <= l.outputs.offset);
            assert!(l.outputs.at(l.outputs.count) <= l.landing.offset);
            assert!(l.landing.at(l.landing.count) <= l.receive.offset);
            assert_eq!(l.landing_slots, (1024 / ranks).min(300));
            assert_eq!((l.landing.count, l.landing.stride), (2 * (ranks - 1) * l.landing_slots, 7424));
            assert!(l.receive.at(l.receive.count) <= l.bytes);
            assert_eq!(l.bytes % HEAP_ALIGNMENT, 0);
        }
    }

    #[test]
    fn smaller_calls_fit_and_larger_do_not() {
        let c = config(2, 128, Placement::Expanded);
        let l = HeapLayout::new(&c).unwrap();
        let mut s = dispatch(2, 128, Placement::Plain);
        l.fits_dispatch(&s).unwrap();
        s.row_bytes = 4096;
        s.scale_packs = 0;
        l.fits_dispatch(&s).unwrap();
        let mut s = c.dispatch[0];
        s.row_bytes *= 2;
        assert!(l.fits_dispatch(&s).unwrap_err().to_string().contains("an output slot"));
        s.max_tokens = 64;
        assert!(l.fits_dispatch(&s).is_err());
        let mut k = c.combine[0];
        l.fits_combine(&k).unwrap();
        k.reduce_first = false;
        assert!(l.fits_combine(&k).is_err());
    }

    #[test]
    fn impossible_sizes_are_errors() {
        let mut c = config(8, 1 << 17, Placement::Expanded);
        c.dispatch[0].row_bytes = 128 << 10;
        c.output_slots = 256;
        assert!(HeapLayout::new(&c).unwrap_err().to_string().contains("64 TiB"));
        c.output_slots = 0;
        assert!(HeapLayout::new(&c).is_err());
        let mut c = config(2, 64, Placement::Expanded);
        c.combine_inputs = 1;
        assert!(HeapLayout::new(&c).unwrap_err().to_string().starts_with("combine_inputs"));
    }
}
