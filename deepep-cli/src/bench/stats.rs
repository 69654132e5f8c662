//! From samples to the numbers that are shown.

use serde::{Deserialize, Serialize};

/// Quantiles of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantiles {
    /// A tenth of the samples is below.
    pub p10: f64,
    /// The median.
    pub p50: f64,
    /// A tenth of the samples is above.
    pub p90: f64,
}

impl Quantiles {
    /// Of samples in any order; `None` without samples.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let at = |q: f64| sorted[((q * sorted.len() as f64) as usize).min(last)];
        Some(Self { p10: at(0.1), p50: at(0.5), p90: at(0.9) })
    }
}

/// The median; 0 without samples.
pub fn median(samples: &[f64]) -> f64 {
    Quantiles::of(samples).unwrap_or_default().p50
}

/// For each iteration the slowest rank's time. Iterations that a rank lacks are left out.
pub fn slowest(ranks: &[Vec<f64>]) -> Vec<f64> {
    let iterations = ranks.iter().map(Vec::len).min().unwrap_or(0);
    (0..iterations).map(|i| ranks.iter().map(|rank| rank[i]).fold(f64::MIN, f64::max)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles() {
        let samples: Vec<f64> = (0..10).rev().map(f64::from).collect();
        assert_eq!(Quantiles::of(&samples), Some(Quantiles { p10: 1.0, p50: 5.0, p90: 9.0 }));
        assert_eq!(Quantiles::of(&[3.0]), Some(Quantiles { p10: 3.0, p50: 3.0, p90: 3.0 }));
        assert_eq!(Quantiles::of(&[]), None);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn the_slowest_rank_of_each_iteration() {
        assert_eq!(slowest(&[vec![1.0, 5.0, 2.0], vec![2.0, 1.0]]), [2.0, 5.0]);
        assert!(slowest(&[]).is_empty());
    }
}
