//! What it means to the caller that a rank gave up; the same on all backends.

use std::borrow::Cow;
use std::time::Duration;

use crate::error::{Difference, Error};
use crate::layout::{AbortWord, Operation, Phase};

/// What was being waited for, in words.
fn phase_name(operation: Option<Operation>, phase: Option<Phase>) -> Cow<'static, str> {
    let operation = operation.map_or("unknown operation", Operation::describe);
    let phase = phase.map_or("unknown phase", Phase::describe);
    if operation == phase { operation.into() } else { format!("{operation}, {phase}").into() }
}

/// The error of an abort. `values` is what would have ended the wait and what was there instead; only the rank that gave up first knows.
pub(crate) fn gave_up(word: AbortWord, waited: Duration, values: Option<[u64; 2]>) -> Error {
    let (rank, missing) = (word.origin as usize, word.missing as usize);
    let (operation, phase) = (Operation::from_code(word.operation), Phase::from_code(word.phase));
    if phase == Some(Phase::Parameters) {
        let digest = |value: u64| format!("{:#010x}", value as u32);
        let [own, other] = match values {
            Some(values) => values.map(digest),
            None => ["one call".into(), "another".into()],
        };
        return differing(operation, vec![(own, vec![rank]), (other, vec![missing])]);
    }
    Error::PeerTimeout {
        phase: phase_name(operation, phase),
        rank,
        missing: vec![missing],
        waited,
        expected: values.map(|[expected, _]| expected),
        seen: values.map(|[_, seen]| seen),
    }
}

/// Ranks made different calls at the same time.
pub(crate) fn calls_differ(operation: Operation, digests: &[u32]) -> Error {
    let mut values: Vec<(String, Vec<usize>)> = Vec::new();
    for (rank, digest) in digests.iter().enumerate() {
        let value = format!("{digest:#010x}");
        match values.iter_mut().find(|(v, _)| *v == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => values.push((value, vec![rank])),
        }
    }
    differing(Some(operation), values)
}

fn differing(operation: Option<Operation>, values: Vec<(String, Vec<usize>)>) -> Error {
    let field = match operation {
        Some(Operation::AllGather | Operation::ReduceScatter | Operation::AllReduce) => {
            "collective call (digest of kind, element type, size, and place in symmetric memory)"
        }
        Some(Operation::Combine) => {
            "combine call (digest of hidden size, reduction, weights, whether rows are pulled, and the dispatch of the handle)"
        }
        _ => "dispatch call (digest of shape, layout, alignment, capacities and handle)",
    };
    let field = field.into();
    Error::RanksDisagree { differences: vec![Difference { field, values }] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(operation: Operation, phase: Phase) -> AbortWord {
        AbortWord { epoch: 5, missing: 3, origin: 1, phase: phase as u32, operation: operation as u32 }
    }

    #[test]
    fn errors_say_who_was_missing_and_when() {
        let waited = Duration::from_secs(2);
        let error = gave_up(word(Operation::Dispatch, Phase::Totals), waited, Some([9, 8])).to_string();
        assert_eq!(error, "dispatch, token counts: rank 1 waited 2s for rank 3 (expected 9, saw 8)");
        let error = gave_up(word(Operation::Barrier, Phase::Barrier), waited, None).to_string();
        assert_eq!(error, "barrier: rank 1 waited 2s for rank 3");
        let unknown = AbortWord { operation: 77, phase: 99, ..word(Operation::Barrier, Phase::Barrier) };
        let error = gave_up(unknown, waited, None).to_string();
        assert_eq!(error, "unknown operation, unknown phase: rank 1 waited 2s for rank 3");
    }

    #[test]
    fn different_calls_are_a_disagreement() {
        let at = word(Operation::Dispatch, Phase::Parameters);
        let error = gave_up(at, Duration::ZERO, Some([0xab, 0xcd])).to_string();
        assert!(error.contains("is 0x000000ab on rank 1, 0x000000cd on rank 3"), "{error}");
        let error = gave_up(at, Duration::ZERO, None).to_string();
        assert!(error.contains("is one call on rank 1, another on rank 3"), "{error}");
        let error = calls_differ(Operation::AllReduce, &[1, 2, 1]).to_string();
        assert!(error.contains("collective call"), "{error}");
        assert!(error.contains("is 0x00000001 on rank 0, 2, 0x00000002 on rank 1"), "{error}");
    }
}
