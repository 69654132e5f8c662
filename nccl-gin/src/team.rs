//! Sets of ranks at a regular distance.

use nccl_gin_sys::ncclTeam;

/// Ranks at a regular distance, seen from one of them (`ncclTeam_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Team {
    /// Number of ranks.
    pub size: u32,
    /// This process's rank in the team.
    pub rank: u32,
    /// Distance, in world ranks, between neighbours.
    pub stride: u32,
}

impl Team {
    /// World rank of the team's rank `rank`, for the process that has `world_rank`; `None` if the team has no such rank.
    #[must_use]
    pub fn world_rank(&self, rank: u32, world_rank: u32) -> Option<u32> {
        if rank >= self.size {
            return None;
        }
        let first = i64::from(world_rank) - i64::from(self.rank) * i64::from(self.stride);
        u32::try_from(first + i64::from(rank) * i64::from(self.stride)).ok()
    }

    /// Rank in the team of the world rank `peer`, for the process that has `world_rank`; `None` if it is not in the team.
    #[must_use]
    pub fn rank_of(&self, peer: u32, world_rank: u32) -> Option<u32> {
        (0..self.size).find(|&rank| self.world_rank(rank, world_rank) == Some(peer))
    }

    /// The team in a form that makes sense, or `None`: NCCL gives zeroes where it could not set itself up.
    pub(crate) fn from_raw(team: ncclTeam) -> Option<Self> {
        let size = u32::try_from(team.nRanks).ok().filter(|&size| size > 0)?;
        let rank = u32::try_from(team.rank).ok().filter(|&rank| rank < size)?;
        let stride = u32::try_from(team.stride).ok().filter(|&stride| stride > 0)?;
        Some(Self { size, rank, stride })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_translate_both_ways() {
        // Eight ranks in LSA teams of four: rank 6 sees ranks 4 to 7 as its LSA team and ranks 2 and 6 as its rail.
        let lsa = Team { size: 4, rank: 2, stride: 1 };
        assert_eq!(
            (0..5).map(|r| lsa.world_rank(r, 6)).collect::<Vec<_>>(),
            [Some(4), Some(5), Some(6), Some(7), None]
        );
        assert_eq!(lsa.rank_of(7, 6), Some(3));
        assert_eq!(lsa.rank_of(3, 6), None);
        let rail = Team { size: 2, rank: 1, stride: 4 };
        assert_eq!((rail.world_rank(0, 6), rail.world_rank(1, 6)), (Some(2), Some(6)));
        assert_eq!((rail.rank_of(2, 6), rail.rank_of(4, 6)), (Some(0), None));
    }

    #[test]
    fn a_team_of_nothing_is_no_team() {
        let raw = |size, rank, stride| Team::from_raw(ncclTeam { nRanks: size, rank, stride });
        assert_eq!(raw(0, 0, 0), None);
        assert_eq!(raw(2, 2, 1), None);
        assert_eq!(raw(2, -1, 1), None);
        assert_eq!(raw(2, 1, 1), Some(Team { size: 2, rank: 1, stride: 1 }));
    }
}
