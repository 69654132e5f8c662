//! Which experts each token chooses: generated patterns, for all ranks from one seed.

use std::fmt;
use std::str::FromStr;

use rand::seq::index;
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// The choices of one rank's tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routing {
    /// Lanes of a token.
    pub topk: usize,
    /// Expert ids, `topk` for each token; −1 is none.
    pub experts: Vec<i64>,
    /// Weights, as many as ids; 0 where the id is −1.
    pub weights: Vec<f32>,
}

impl Routing {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.experts.len() / self.topk.max(1)
    }

    /// The ids of one token.
    pub fn of(&self, token: usize) -> &[i64] {
        &self.experts[token * self.topk..][..self.topk]
    }

    /// The weights of one token.
    pub fn weights_of(&self, token: usize) -> &[f32] {
        &self.weights[token * self.topk..][..self.topk]
    }

    fn push(&mut self, experts: impl Iterator<Item = i64>, rng: &mut impl Rng) {
        let start = self.experts.len();
        self.experts.extend(experts);
        let mut raw: Vec<f32> = (start..self.experts.len()).map(|_| rng.random_range(0.05..1.0)).collect();
        let total: f32 = raw.iter().sum();
        for (weight, &expert) in raw.iter_mut().zip(&self.experts[start..]) {
            *weight = if expert < 0 { 0.0 } else { *weight / total };
        }
        self.weights.extend(raw);
    }
}

/// A way to choose experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// Every expert equally often.
    Uniform,
    /// The n-th expert with weight n^-exponent.
    Zipf(f64),
    /// Every token chooses the first `topk` experts, all on the lowest ranks.
    Hot,
    /// Uniform, and each lane is −1 with this probability; whole tokens too.
    Masked(f64),
    /// Uniform, but this rank gives no tokens.
    Idle(usize),
    /// Every token chooses among its own rank's experts and those after them.
    Local,
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once(':').map_or((text, None), |(name, value)| (name, Some(value)));
        let number = |default: f64, low: f64, high: f64| match value.map(str::parse::<f64>) {
            None => Ok(default),
            Some(Ok(x)) if (low..=high).contains(&x) => Ok(x),
            _ => Err(format!("{name}: expected a number in {low}..={high} after the colon")),
        };
        match (name, value) {
            ("uniform", None) => Ok(Self::Uniform),
            ("hot", None) => Ok(Self::Hot),
            ("local", None) => Ok(Self::Local),
            ("zipf", _) => number(1.1, 0.0, 10.0).map(Self::Zipf),
            ("masked", _) => number(0.3, 0.0, 1.0).map(Self::Masked),
            ("idle", _) => {
                let rank =
                    value.unwrap_or("0").parse().map_err(|_| "idle: expected a rank after the colon")?;
                Ok(Self::Idle(rank))
            }
            _ => {
                Err("expected uniform, zipf[:exponent], hot, masked[:fraction], idle[:rank] or local".into())
            }
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(exponent) => write!(f, "zipf:{exponent}"),
            Self::Hot => f.write_str("hot"),
            Self::Masked(fraction) => write!(f, "masked:{fraction}"),
            Self::Idle(rank) => write!(f, "idle:{rank}"),
            Self::Local => f.write_str("local"),
        }
    }
}

/// The group that tokens are routed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of experts, a multiple of `ranks`.
    pub experts: usize,
    /// Lanes of a token, at most `experts`.
    pub topk: usize,
}

/// The number of experts that is a multiple of `ranks`; one that has none stays, and is more than any buffer takes.
pub fn padded(experts: usize, ranks: usize) -> usize {
    experts.checked_next_multiple_of(ranks).unwrap_or(experts)
}

/// A random generator for one rank and purpose; the same on every machine.
pub fn generator(seed: u64, rank: usize, purpose: u64) -> Xoshiro256PlusPlus {
    Xoshiro256PlusPlus::seed_from_u64(
        seed ^ (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (purpose << 56),
    )
}

/// Generates the choices of `tokens` tokens of one rank.
pub fn generate(pattern: Pattern, group: Group, rank: usize, tokens: usize, seed: u64) -> Routing {
    let Group { ranks, experts, topk } = group;
    let mut rng = generator(seed, rank, 1);
    let mut routing = Routing { topk, ..Routing::default() };
    let tokens = if pattern == Pattern::Idle(rank) { 0 } else { tokens };
    let cumulative: Vec<f64> = match pattern {
        Pattern::Zipf(exponent) => (1..=experts)
            .scan(0.0, |sum, n| {
                *sum += (n as f64).powf(-exponent);
                Some(*sum)
            })
            .collect(),
        _ => Vec::new(),
    };
    for _ in 0..tokens {
        let chosen: Vec<i64> = match pattern {
            Pattern::Uniform | Pattern::Idle(_) => distinct(experts, topk, &mut rng),
            Pattern::Hot => (0..topk as i64).collect(),
            Pattern::Local => {
                let first = rank * (experts / ranks);
                let width = (experts / ranks).max(topk);
                distinct(width, topk, &mut rng)
                    .into_iter()
                    .map(|e| (e + first as i64) % experts as i64)
                    .collect()
            }
            Pattern::Zipf(_) => zipf(&cumulative, topk, &mut rng),
            Pattern::Masked(fraction) => {
                let whole = rng.random_bool(fraction / 4.0);
                let keep = |e, rng: &mut Xoshiro256PlusPlus| {
                    if whole || rng.random_bool(fraction) { -1 } else { e }
                };
                distinct(experts, topk, &mut rng).into_iter().map(|e| keep(e, &mut rng)).collect()
            }
        };
        routing.push(chosen.into_iter(), &mut rng);
    }
    routing
}

fn distinct(experts: usize, topk: usize, rng: &mut impl Rng) -> Vec<i64> {
    index::sample(rng, experts, topk).into_iter().map(|e| e as i64).collect()
}

/// Draws without replacement; after many misses takes the most frequent experts that are left.
fn zipf(cumulative: &[f64], topk: usize, rng: &mut impl Rng) -> Vec<i64> {
    let mut chosen: Vec<i64> = Vec::with_capacity(topk);
    let total = cumulative.last().copied().unwrap_or(1.0);
    let draws = (0..64 * topk).map(|_| {
        let x = rng.random::<f64>() * total;
        cumulative.partition_point(|&c| c <= x).min(cumulative.len() - 1) as i64
    });
    for e in draws.chain(0..cumulative.len() as i64) {
        if chosen.len() == topk {
            break;
        }
        if !chosen.contains(&e) {
            chosen.push(e);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Group = Group { ranks: 4, experts: 16, topk: 4 };

    fn patterns() -> [Pattern; 6] {
        [
            Pattern::Uniform,
            Pattern::Zipf(3.0),
            Pattern::Hot,
            Pattern::Masked(0.5),
            Pattern::Idle(1),
            Pattern::Local,
        ]
    }

    #[test]
    fn ids_are_valid_and_distinct_and_repeatable() {
        for pattern in patterns() {
            for rank in 0..4 {
                let routing = generate(pattern, GROUP, rank, 200, 7);
                assert_eq!(routing, generate(pattern, GROUP, rank, 200, 7));
                assert_eq!(routing.tokens(), if pattern == Pattern::Idle(rank) { 0 } else { 200 });
                for t in 0..routing.tokens() {
                    let ids = routing.of(t);
                    for (k, &e) in ids.iter().enumerate() {
                        assert!((-1..16).contains(&e));
                        assert!(e == -1 || !ids[..k].contains(&e), "{pattern}: {ids:?}");
                        assert_eq!(routing.weights_of(t)[k] == 0.0, e == -1);
                    }
                }
            }
        }
    }

    #[test]
    fn patterns_are_what_they_say() {
        let count = |pattern, e| {
            let routing = generate(pattern, GROUP, 2, 1000, 1);
            routing.experts.iter().filter(|&&x| x == e).count()
        };
        assert_eq!(count(Pattern::Hot, 0), 1000);
        assert_eq!(count(Pattern::Hot, 5), 0);
        assert!(count(Pattern::Zipf(2.0), 0) > 4 * count(Pattern::Zipf(2.0), 9));
        assert!((150..350).contains(&count(Pattern::Uniform, 3)));
        assert!((1300..2700).contains(&count(Pattern::Masked(0.5), -1)));
        assert_eq!(count(Pattern::Local, 8), 1000);
    }

    #[test]
    fn names_round_trip() {
        for pattern in patterns() {
            assert_eq!(pattern.to_string().parse::<Pattern>().unwrap(), pattern);
        }
        assert_eq!("zipf".parse::<Pattern>().unwrap(), Pattern::Zipf(1.1));
        for bad in ["", "zipf:x", "masked:2", "hot:1", "idle:-1", "uniform:3"] {
            assert!(bad.parse::<Pattern>().is_err(), "{bad}");
        }
    }
}
