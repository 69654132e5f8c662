//! Agreement before anything blocks: outcomes of local steps, and settings that must be the same everywhere.

use std::fmt::Display;

use super::Bootstrap;
use super::frame::{Reader, put_block};
use crate::error::{Difference, Error, Result};

/// Longest message of a failed rank that is passed on, in bytes.
const MAX_MESSAGE: usize = 4096;

/// Shares the outcome of a step that each rank did by itself. Returns the local value if the step succeeded everywhere;
/// otherwise drops it, and every rank gets an error: its own, or [`PeerFailed`](Error::PeerFailed) with the lowest failed rank's.
///
/// # Errors
/// As described, or those of [`Bootstrap::all_gather`].
pub fn agree<T, B: Bootstrap + ?Sized>(bootstrap: &B, phase: &'static str, local: Result<T>) -> Result<T> {
    agree_with(bootstrap, phase, local, |_| Vec::new()).map(|(value, _)| value)
}

/// As [`agree`], and in the same exchange gives the bytes that `share` makes of the local value to everybody. Returns every rank's
/// bytes beside the value.
///
/// # Errors
/// As [`agree`].
pub fn agree_with<T, B: Bootstrap + ?Sized>(
    bootstrap: &B,
    phase: &'static str,
    local: Result<T>,
    share: impl FnOnce(&T) -> Vec<u8>,
) -> Result<(T, Vec<Vec<u8>>)> {
    let mut mine = Vec::new();
    match &local {
        Ok(value) => {
            mine.push(1);
            mine.extend(share(value));
        }
        Err(error) => {
            mine.push(0);
            let message = error.to_string();
            let end = (0..=MAX_MESSAGE.min(message.len())).rev().find(|&i| message.is_char_boundary(i));
            mine.extend(&message.as_bytes()[..end.unwrap_or(0)]);
        }
    }
    let all = match (bootstrap.all_gather(&mine), &local) {
        // The local failure is the cause; that others couldn't be told is the lesser news.
        (Err(_), Err(_)) => Vec::new(),
        (all, _) => all?,
    };
    let value = local?;
    let mut shared = Vec::with_capacity(all.len());
    for (rank, bytes) in all.into_iter().enumerate() {
        match bytes.split_first() {
            Some((1, rest)) => shared.push(rest.to_vec()),
            Some((0, rest)) => {
                return Err(Error::PeerFailed {
                    phase: phase.into(),
                    rank,
                    message: String::from_utf8_lossy(rest).into_owned(),
                });
            }
            _ => return Err(Error::protocol(format!("rank {rank}"), format!("sent no outcome of {phase}"))),
        }
    }
    Ok((value, shared))
}

/// Settings to compare between ranks, as text, in the order in which they were added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(Vec<(String, String)>);

impl Settings {
    /// No settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a setting.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Display) -> Self {
        self.0.push((name.to_owned(), value.to_string()));
        self
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (name, value) in &self.0 {
            put_block(&mut bytes, name.as_bytes());
            put_block(&mut bytes, value.as_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let mut settings = Vec::new();
        while let Some(name) = reader.text() {
            settings.push((name.to_owned(), reader.text()?.to_owned()));
        }
        reader.end()?;
        Some(Self(settings))
    }

    fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(n, _)| n == name).map_or("not set", |(_, value)| value)
    }
}

/// Compares the settings of all ranks; `local` may be an error already, which then reaches every rank.
///
/// # Errors
/// [`RanksDisagree`](Error::RanksDisagree) with every setting that differs and who has which value; else as [`agree`].
pub fn compare<B: Bootstrap + ?Sized>(
    bootstrap: &B,
    phase: &'static str,
    local: Result<Settings>,
) -> Result<()> {
    let (_, shared) = agree_with(bootstrap, phase, local, Settings::encode)?;
    let mut all = Vec::with_capacity(shared.len());
    for (rank, bytes) in shared.iter().enumerate() {
        let settings = Settings::decode(bytes)
            .ok_or_else(|| Error::protocol(format!("rank {rank}"), "its settings don't parse"))?;
        all.push(settings);
    }
    let differences = differences(&all);
    if differences.is_empty() { Ok(()) } else { Err(Error::RanksDisagree { differences }) }
}

fn differences(all: &[Settings]) -> Vec<Difference> {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in all.iter().flat_map(|settings| &settings.0) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let mut found = Vec::new();
    for name in names {
        let mut values: Vec<(String, Vec<usize>)> = Vec::new();
        for (rank, settings) in all.iter().enumerate() {
            let value = settings.get(name);
            match values.iter_mut().find(|(v, _)| v == value) {
                Some((_, ranks)) => ranks.push(rank),
                None => values.push((value.to_owned(), vec![rank])),
            }
        }
        if values.len() > 1 {
            found.push(Difference { field: name.to_owned(), values });
        }
    }
    found
}

#[cfg(test)]
pub(crate) mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::bootstrap::{ThreadBootstrap, thread_group};

    pub(crate) fn on_ranks<T: Send>(n: usize, f: impl Fn(&ThreadBootstrap) -> T + Sync) -> Vec<T> {
        let ranks = thread_group(n, Duration::from_secs(20)).unwrap();
        let f = &f;
        thread::scope(|scope| {
            let running: Vec<_> = ranks.iter().map(|b| scope.spawn(move || f(b))).collect();
            running.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn one_failure_is_everybodys() {
        let results = on_ranks(3, |b| {
            let local = if b.rank() == 1 { Err(Error::invalid("x", 5, "too big")) } else { Ok(b.rank()) };
            agree(b, "allocation", local)
        });
        assert!(matches!(results[1], Err(Error::Invalid { .. })));
        for rank in [0, 2] {
            let error = results[rank].as_ref().unwrap_err().to_string();
            assert_eq!(error, "allocation failed on rank 1: x = 5: too big");
        }
    }

    #[test]
    fn bytes_travel_with_the_outcome() {
        let results = on_ranks(3, |b| agree_with(b, "x", Ok(b.rank()), |r| vec![*r as u8; *r]).unwrap());
        for (rank, (value, shared)) in results.into_iter().enumerate() {
            assert_eq!(value, rank);
            assert_eq!(shared, [vec![], vec![1], vec![2, 2]]);
        }
    }

    #[test]
    fn differences_are_named_rank_by_rank() {
        let results = on_ranks(4, |b| {
            let hidden = if b.rank() == 2 { 4096 } else { 7168 };
            let mut settings = Settings::new().with("experts", 256).with("hidden", hidden);
            if b.rank() == 3 {
                settings = settings.with("extra", "yes");
            }
            compare(b, "configuration", Ok(settings))
        });
        for result in results {
            let Err(Error::RanksDisagree { differences }) = result else { panic!("{result:?}") };
            let expected = [
                ("hidden", vec![("7168".to_owned(), vec![0, 1, 3]), ("4096".to_owned(), vec![2])]),
                ("extra", vec![("not set".to_owned(), vec![0, 1, 2]), ("yes".to_owned(), vec![3])]),
            ];
            assert_eq!(differences.len(), 2);
            for (difference, (field, values)) in differences.iter().zip(expected) {
                assert_eq!((difference.field.as_str(), &difference.values), (field, &values));
            }
        }
        for result in on_ranks(3, |b| compare(b, "configuration", Ok(Settings::new().with("a", 1)))) {
            result.unwrap();
        }
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let results = on_ranks(2, |b| {
            let local = if b.rank() == 0 { Err(Error::invalid("x", "ü".repeat(5000), "y")) } else { Ok(()) };
            agree(b, "x", local)
        });
        let Err(Error::PeerFailed { message, .. }) = &results[1] else { panic!("{:?}", results[1]) };
        assert!(message.len() <= MAX_MESSAGE && !message.contains('\u{fffd}'));
    }
}
