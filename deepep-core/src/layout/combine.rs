//! One set of combine's receive area, and one slot for what it pulls.

use super::{CombineShape, Cursor};

/// Where rows and weights that come back lie in a set of the receive area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveLayout {
    /// `[slots][max_tokens][row_bytes]`. Written by peers.
    pub rows: usize,
    /// `f32[max_tokens][K]`: weights that come back. Written by peers.
    pub weights: usize,
    /// Bytes of the set.
    pub bytes: usize,
}

impl ReceiveLayout {
    /// Layout for a call of this shape.
    pub fn new(shape: &CombineShape) -> Self {
        let mut c = Cursor::at(0);
        let rows = c.take(shape.slots().saturating_mul(shape.max_tokens), shape.row_bytes);
        let weights = c.take(if shape.ranks > 1 { shape.max_tokens * shape.topk } else { 0 }, 4);
        Self { rows, weights, bytes: c.bytes() }
    }
}

/// Where the experts' outputs lie in a slot that other ranks read. Plain layout only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputLayout {
    /// `[rows][row_bytes]`, a row for each token that can be received.
    pub rows: usize,
    /// `f32[rows][K]`: weights that go back.
    pub weights: usize,
    /// Bytes of the slot.
    pub bytes: usize,
}

impl InputLayout {
    /// Layout for calls of this shape with at most `rows` rows.
    pub fn new(shape: &CombineShape, rows: usize) -> Self {
        let mut c = Cursor::at(0);
        let at = c.take(rows, shape.row_bytes);
        let weights = c.take(rows.saturating_mul(shape.topk), 4);
        Self { rows: at, weights, bytes: c.bytes() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Placement;
    use super::super::shape::tests::combine;
    use super::*;

    #[test]
    fn a_slot_of_the_experts_has_rows_and_weights() {
        let i = InputLayout::new(&combine(2, 8, Placement::Plain, true), 100);
        assert_eq!((i.rows, i.weights), (0, 100 * 14336));
        assert!(
            i.bytes >= i.weights + 100 * 8 * 4 && i.bytes.is_multiple_of(crate::layout::REGION_ALIGNMENT)
        );
    }

    #[test]
    fn one_row_per_peer_and_token() {
        let r = ReceiveLayout::new(&combine(2, 8, Placement::Plain, true));
        assert_eq!(r.weights, 64 * 14336);
        assert_eq!(r.bytes, 64 * 14336 + 64 * 8 * 4);
        assert_eq!(ReceiveLayout::new(&combine(1, 8, Placement::Plain, true)).bytes, 0);
    }
}
