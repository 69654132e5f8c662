//! The least: NCCL takes the plugin, and says that there is GIN.

use crate::board::Board;
use crate::world::{Shape, communicator, ranks};

const TWO: Shape = Shape::new(2, 2);

#[test]
fn nccl_says_that_there_is_gin() {
    ranks("properties::nccl_says_that_there_is_gin", TWO, &[], |rank, board| answered(rank, &board));
}

fn answered(rank: usize, board: &Board) {
    let (_, _, comm) = communicator(rank, TWO, board);
    board.barrier(TWO.ranks);
    comm.close().unwrap();
}
