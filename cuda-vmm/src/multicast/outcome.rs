//! The message that follows each step of a team: how it went on one member, and what the others need of it. 512 bytes:
//!
//! | offset | bytes | field, little-endian |
//! |---|---|---|
//! | 0 | 8 | magic, with the version |
//! | 8 | 1 | step |
//! | 9 | 1 | verdict |
//! | 10 | 2 | length of the text |
//! | 12 | 4 | code of the driver, or zero |
//! | 16 | 320 | what the step says to the others; zero if it failed |
//! | 336 | 176 | text of the error |

use super::agreement::Agreement;
use crate::error::{Error, Result};
use cuda_vmm_sys::CUresult;
use std::time::Instant;

const MAGIC: [u8; 8] = *b"CVMTEAM1";
const BYTES: usize = 512;
const TEXT_AT: usize = 336;
/// Bytes that a step can say to the others.
pub(super) const PAYLOAD: usize = TEXT_AT - 16;

/// What all members do at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Step {
    Check = 1,
    Create = 2,
    Import = 3,
    Add = 4,
    Bind = 5,
    Map = 6,
    Release = 7,
    Close = 8,
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Check => "checking what it brings",
            Self::Create => "creating the multicast object",
            Self::Import => "importing the multicast object",
            Self::Add => "adding its devices",
            Self::Bind => "binding its memory",
            Self::Map => "mapping the multicast object",
            Self::Release => "releasing everything for another attempt",
            Self::Close => "ending its use of the multicast object",
        }
    }
}

/// How a step went on one member. Ordered by which one counts for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Fared {
    Well = 0,
    /// It may go well another time, if everybody starts anew.
    Transiently = 1,
    Badly = 2,
}

/// One member's message.
#[derive(Debug)]
pub(super) struct Outcome {
    rank: usize,
    fared: Fared,
    code: i32,
    payload: [u8; PAYLOAD],
    text: String,
}

/// Why a step went wrong, for all members alike.
#[derive(Debug)]
pub(super) struct Verdict {
    /// Whether all members may start anew.
    pub(super) transient: bool,
    pub(super) error: Error,
}

impl From<Error> for Verdict {
    fn from(error: Error) -> Self {
        Self { transient: false, error }
    }
}

/// Tells all members how a step went here, and hears how it went there. `Ok`, with everyone's message, if it went well everywhere;
/// otherwise an error on every member: its own if it has one that counts, else that of the first rank that has.
pub(super) fn agree(
    agreement: &mut dyn Agreement,
    step: Step,
    mine: Result<Vec<u8>>,
    deadline: Instant,
) -> Result<Vec<Outcome>, Verdict> {
    let message = encode(step, &mine);
    let heard = hear(agreement, step, &message, deadline);
    let members = match (heard, mine) {
        (Ok(members), Ok(_)) => members,
        (Err(error), Ok(_)) => return Err(error.into()),
        // If the others could not be asked: what went wrong here says more.
        (Err(_), Err(error)) => return Err(error.into()),
        (Ok(members), Err(error)) => {
            let worst = worst(&members).max(how(&error));
            // A member that might try again, but may not because of another one, says which.
            return Err(match first(&members, Fared::Badly) {
                Some(other) if how(&error) < worst => Verdict { transient: false, error: other.error(step) },
                _ => Verdict { transient: worst == Fared::Transiently, error },
            });
        }
    };
    match worst(&members) {
        Fared::Well => Ok(members),
        worst => Err(first(&members, worst).map_or_else(
            || Error::BadMessage { rank: 0, why: "its message was lost" }.into(),
            |member| Verdict { transient: worst == Fared::Transiently, error: member.error(step) },
        )),
    }
}

fn hear(
    agreement: &mut dyn Agreement,
    step: Step,
    message: &[u8; BYTES],
    deadline: Instant,
) -> Result<Vec<Outcome>> {
    let ranks = agreement.ranks();
    let messages = agreement.exchange(message, deadline)?;
    if messages.len() != ranks {
        return Err(Error::BadMessage {
            rank: 0,
            why: "the agreement returned another number of messages than ranks",
        });
    }
    let decode = |(rank, bytes): (usize, &Vec<u8>)| {
        decode(step, rank, bytes).map_err(|why| Error::BadMessage { rank, why })
    };
    messages.iter().enumerate().map(decode).collect()
}

fn worst(members: &[Outcome]) -> Fared {
    members.iter().map(|member| member.fared).max().unwrap_or(Fared::Well)
}

/// The first member that fared like this.
fn first(members: &[Outcome], fared: Fared) -> Option<&Outcome> {
    members.iter().find(|member| member.fared == fared)
}

fn how(error: &Error) -> Fared {
    match error {
        Error::Call { cause, .. } if cause.status() == Some(CUresult::CUDA_ERROR_SYSTEM_NOT_READY) => {
            Fared::Transiently
        }
        _ => Fared::Badly,
    }
}

fn encode(step: Step, result: &Result<Vec<u8>>) -> [u8; BYTES] {
    let mut out = [0; BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8] = step as u8;
    match result {
        Ok(payload) => {
            let length = payload.len().min(PAYLOAD);
            out[16..16 + length].copy_from_slice(&payload[..length]);
        }
        Err(error) => {
            out[9] = how(error) as u8;
            let code = error.status().map_or(0, |status| status.0 as i32);
            out[12..16].copy_from_slice(&code.to_le_bytes());
            let text = error.to_string();
            let mut end = text.len().min(BYTES - TEXT_AT);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            out[10..12].copy_from_slice(&(end as u16).to_le_bytes());
            out[TEXT_AT..TEXT_AT + end].copy_from_slice(&text.as_bytes()[..end]);
        }
    }
    out
}

/// Reads a message. Any bytes may come.
fn decode(step: Step, rank: usize, bytes: &[u8]) -> Result<Outcome, &'static str> {
    let bytes: &[u8; BYTES] = bytes.try_into().map_err(|_| "it has another length")?;
    if bytes[..8] != MAGIC {
        return Err("it does not start like one (is its cuda-vmm another version?)");
    }
    if bytes[8] != step as u8 {
        return Err("it is at another step");
    }
    let fared = match bytes[9] {
        0 => Fared::Well,
        1 => Fared::Transiently,
        2 => Fared::Badly,
        _ => return Err("its verdict is none that there is"),
    };
    let length = usize::from(u16::from_le_bytes([bytes[10], bytes[11]]));
    let text = bytes[TEXT_AT..].get(..length).ok_or("its text is longer than the message")?;
    // It ends up in errors, and so on terminals and in logs.
    let text =
        String::from_utf8_lossy(text).chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    let code = i32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
    let mut payload = [0; PAYLOAD];
    payload.copy_from_slice(&bytes[16..TEXT_AT]);
    Ok(Outcome { rank, fared, code, payload, text })
}

impl Outcome {
    fn error(&self, step: Step) -> Error {
        let status = (self.code != 0).then_some(CUresult(self.code as _));
        Error::Member { rank: self.rank, step: step.name(), status, reason: self.text.clone() }
    }

    /// What the step says to the others.
    pub(super) fn payload(&self) -> &[u8; PAYLOAD] {
        &self.payload
    }

    /// A number in it.
    pub(super) fn number(&self, at: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|index| self.payload[at + index]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_vmm_sys::{CallError, Function};

    fn failed(status: CUresult) -> Error {
        let cause = CallError::Status { function: Function::cuMulticastBindMem, status };
        Error::Call { attempt: "binding".into(), cause }
    }

    #[test]
    fn a_message_says_how_it_went() {
        let well = decode(Step::Add, 0, &encode(Step::Add, &Ok(vec![1, 0, 0, 0, 2]))).unwrap();
        assert_eq!((well.fared, well.number(0), well.number(4)), (Fared::Well, 1, 2));

        let transient = Err(failed(CUresult::CUDA_ERROR_SYSTEM_NOT_READY));
        let transient = decode(Step::Bind, 0, &encode(Step::Bind, &transient)).unwrap();
        assert_eq!((transient.fared, transient.code), (Fared::Transiently, 802));
        let badly = decode(Step::Bind, 0, &encode(Step::Bind, &Err(Error::ForeignBinding))).unwrap();
        assert_eq!((badly.fared, badly.code), (Fared::Badly, 0));
        assert_eq!(badly.text, Error::ForeignBinding.to_string());
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let what = "größe ".repeat(100);
        let error = Error::Unsupported { what: "x", why: what };
        let member = decode(Step::Bind, 0, &encode(Step::Bind, &Err(error))).unwrap();
        assert!(member.text.len() <= BYTES - TEXT_AT && member.text.len() > 170);
        assert!(!member.text.contains('\u{fffd}'), "{}", member.text);
    }

    #[test]
    fn hostile_bytes_are_refused_or_harmless() {
        let good = encode(Step::Map, &Err(Error::ForeignBinding));
        let broken = |change: &dyn Fn(&mut [u8; BYTES])| {
            let mut bytes = good;
            change(&mut bytes);
            decode(Step::Map, 0, &bytes)
        };
        assert!(broken(&|b| b[0] = 0).unwrap_err().contains("does not start"));
        assert!(broken(&|b| b[8] = Step::Bind as u8).unwrap_err().contains("another step"));
        assert!(broken(&|b| b[9] = 3).unwrap_err().contains("verdict"));
        assert!(broken(&|b| b[10..12].fill(0xff)).unwrap_err().contains("longer"));
        assert!(decode(Step::Map, 0, &good[1..]).unwrap_err().contains("length"));
        let control = broken(&|b| b[TEXT_AT..].fill(0x1b)).unwrap();
        assert!(!control.text.is_empty() && control.text.chars().all(|c| c == '\u{fffd}'));
    }
}
