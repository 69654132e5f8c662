//! Registering memory, together with the other ranks.
//!
//! Three exchanges: what each has; what each could make of the others'; and whether all went well. A failure of one rank is an error on all.
//! Before the last one every rank must have the registration in its table: from then on commands about it may come.

use super::share::{self, Exported, Mapping};
use super::{PeerView, Region, needs_staging, zeroed_shadow};
use crate::abi::PTR_HOST;
use crate::cuda::{Cuda, Pinned};
use crate::error::{Error, Result};
use crate::log::info;
use crate::net::{Control, Deadline, MAX_FDS, Message};
use crate::ring::{Channel, STAGING};
use bytemuck::{Pod, Zeroable};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// What NCCL wants to register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    pub(crate) id: u64,
    pub(crate) base: u64,
    pub(crate) size: u64,
    pub(crate) kind: i32,
    pub(crate) flags: u64,
}

/// Another rank, as registering sees it.
pub(crate) struct Partner<'a> {
    pub(crate) rank: usize,
    pub(crate) control: &'a Control,
    /// Whether it is on this host: descriptors can be passed to it.
    pub(crate) local: bool,
    pub(crate) inbound: &'a Channel,
    pub(crate) outbound: &'a Channel,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Offer {
    id: u64,
    size: u64,
    flags: u64,
    kind: u32,
    /// Whether this rank could do its part.
    ok: u32,
    lead: u64,
    offset: u64,
    parts: u64,
    lengths: [u64; MAX_FDS],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Verdict {
    id: u64,
    mapped: u32,
    ok: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Outcome {
    id: u64,
    ok: u64,
}

/// The first two exchanges. The context must be current. `share` is false where payload is to be staged in any case. Whatever comes of it,
/// [`conclude`] must follow, unless the connection itself has failed.
pub(crate) fn prepare(
    cuda: &Arc<Cuda>,
    ranks: usize,
    partners: &[Partner<'_>],
    registration: Registration,
    share: bool,
    deadline: Deadline,
) -> Result<Result<Region>> {
    let Registration { id, base, size, kind, flags } = registration;
    let signals = needs_no_sharing(kind, flags);
    let exported = if share && !signals { share::export(cuda, base, size) } else { None };
    exchange_offers(partners, registration, exported.as_ref(), deadline)?;

    let mut region = Region {
        id,
        base,
        size,
        cpu: kind == PTR_HOST && is_readable_and_writable(base, size),
        device: kind != PTR_HOST || cuda.allocation(base).is_some(),
        shadow: zeroed_shadow(kind, flags, size),
        peers: (0..ranks).map(|_| PeerView::default()).collect(),
    };
    // Errors wait until the others have heard of them.
    let mut failed: Option<Error> = None;
    for partner in partners {
        if let Err(error) = take_offer(cuda, partner, &mut region, deadline) {
            failed.get_or_insert(error);
        }
    }
    let mut verdicts = Vec::new();
    for partner in partners {
        let (verdict, fds) = partner.control.receive::<Verdict>(Message::Verdict, 1, deadline)?;
        check_id(partner.rank, verdict.id, id)?;
        verdicts.push((verdict, fds));
    }
    for (partner, (verdict, mut fds)) in partners.iter().zip(verdicts) {
        if verdict.ok == 0 {
            failed.get_or_insert(Error::PeerFailed { rank: partner.rank });
            continue;
        }
        let mapped = verdict.mapped != 0;
        region.peers[partner.rank].maps_ours = mapped;
        if needs_staging(kind as u32, flags, size, mapped) && partner.outbound.staging().is_none() {
            let staging = match fds.pop() {
                Some(fd) => Pinned::open(cuda, fd, STAGING as usize),
                None if !partner.local => Pinned::create(cuda, STAGING as usize),
                None => {
                    let reason = "its staging memory did not come".into();
                    Err(Error::Protocol { rank: partner.rank, reason })
                }
            };
            match staging {
                Ok(staging) => partner.outbound.set_staging(staging),
                Err(error) => {
                    failed.get_or_insert(error);
                }
            }
        }
    }
    Ok(failed.map_or(Ok(region), Err))
}

/// The last exchange: whether this rank has done its part. Returns a rank that has not done its own, if there is one.
///
/// # Errors
/// The connection itself has failed.
pub(crate) fn conclude(
    partners: &[Partner<'_>],
    id: u64,
    ok: bool,
    deadline: Deadline,
) -> Result<Option<usize>> {
    let own = Outcome { id, ok: u64::from(ok) };
    for partner in partners {
        partner.control.send(Message::Outcome, &own, &[], deadline)?;
    }
    let mut failed = None;
    for partner in partners {
        let (outcome, _) = partner.control.receive::<Outcome>(Message::Outcome, 0, deadline)?;
        check_id(partner.rank, outcome.id, id)?;
        if outcome.ok == 0 {
            failed.get_or_insert(partner.rank);
        }
    }
    Ok(failed)
}

fn needs_no_sharing(kind: i32, flags: u64) -> bool {
    // An array of signals is only ever written, by its own rank's agent.
    zeroed_shadow(kind, flags, 0).is_some()
}

fn exchange_offers(
    partners: &[Partner<'_>],
    registration: Registration,
    exported: Option<&Exported>,
    deadline: Deadline,
) -> Result<()> {
    let Registration { id, size, kind, flags, .. } = registration;
    let mut offer = Offer { id, size, flags, kind: kind as u32, ok: 1, ..Offer::zeroed() };
    let far = offer;
    let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
    if let Some(exported) = exported {
        offer.lead = exported.lead;
        offer.offset = exported.offset;
        offer.parts = exported.parts.len() as u64;
        for ((length, fd), place) in exported.parts.iter().zip(&mut offer.lengths) {
            *place = *length;
            fds.push(fd.as_fd());
        }
    }
    for partner in partners {
        if partner.local {
            partner.control.send(Message::Offer, &offer, &fds, deadline)?;
        } else {
            partner.control.send(Message::Offer, &far, &[], deadline)?;
        }
    }
    Ok(())
}

/// Maps what another rank offers, makes the staging memory that its payload needs otherwise, and tells it how that went.
fn take_offer(
    cuda: &Arc<Cuda>,
    partner: &Partner<'_>,
    region: &mut Region,
    deadline: Deadline,
) -> Result<()> {
    let (offer, fds) = partner.control.receive::<Offer>(Message::Offer, MAX_FDS, deadline)?;
    check_id(partner.rank, offer.id, region.id)?;
    let count = offer.parts as usize;
    let whole = offer.lengths[..count.min(MAX_FDS)].iter().try_fold(0u64, |sum, one| sum.checked_add(*one));
    if count != fds.len() || whole.is_none() {
        let reason = format!("an offer of {count} allocations with {} descriptors", fds.len());
        return Err(Error::Protocol { rank: partner.rank, reason });
    }
    let view = &mut region.peers[partner.rank];
    view.size = offer.size;
    let inside = super::in_bounds(whole.unwrap_or(0), offer.offset, offer.size);
    if count > 0 && inside && offer.lead < 2 << 20 {
        let parts = offer.lengths.iter().copied().zip(fds).collect();
        let exported = Exported { lead: offer.lead, offset: offer.offset, parts };
        // Memory that cannot be mapped here (no peer access) is staged.
        let rank = partner.rank;
        view.mapping = Mapping::import(cuda, &exported)
            .inspect_err(|error| info!("memory of rank {rank} goes through the host: {error}"))
            .ok();
    }
    let mapped = view.mapping.is_some();
    let mut staged = Ok(());
    if needs_staging(offer.kind, offer.flags, offer.size, mapped) && partner.inbound.staging().is_none() {
        staged = Pinned::create(cuda, STAGING as usize).map(|staging| partner.inbound.set_staging(staging));
    }
    let verdict = Verdict { id: region.id, mapped: u32::from(mapped), ok: u32::from(staged.is_ok()) };
    let passes = partner.local && needs_staging(offer.kind, offer.flags, offer.size, mapped);
    let fd = partner.inbound.staging().filter(|_| passes).map(Pinned::fd);
    partner.control.send(Message::Verdict, &verdict, fd.as_slice(), deadline)?;
    staged
}

fn check_id(rank: usize, found: u64, expected: u64) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let reason = format!(
        "registration {found} where this rank is at {expected}: ranks must register in the same order"
    );
    Err(Error::Protocol { rank, reason })
}

/// Whether the process itself may read and write a range.
fn is_readable_and_writable(base: u64, size: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    covers(&maps, base, size)
}

/// The same, by the text of `/proc/self/maps`, which is in order of addresses.
fn covers(maps: &str, base: u64, size: u64) -> bool {
    let Some(end) = base.checked_add(size) else { return false };
    let mut at = base;
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let range = words.next().and_then(|range| range.split_once('-'));
        let parse = |text| u64::from_str_radix(text, 16).ok();
        let Some((Some(from), Some(to))) = range.map(|(from, to)| (parse(from), parse(to))) else { continue };
        if from <= at && at < to && words.next().is_some_and(|access| access.starts_with("rw")) {
            at = to;
        }
    }
    at >= end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_is_read_from_the_memory_map() {
        let maps = "1000-3000 rw-p 0 0:0 0\n3000-4000 rw-s 0 0:0 0 /dev/zero\n4000-5000 ---p 0 0:0 0\n";
        assert!(covers(maps, 0x1000, 0x3000) && covers(maps, 0x2ff8, 16));
        assert!(!covers(maps, 0x3ff8, 16) && !covers(maps, 0x4000, 8) && !covers(maps, 0x800, 0x1000));
        let here = vec![0u8; 100_000];
        assert!(is_readable_and_writable(here.as_ptr() as u64, 100_000));
        static CONSTANT: [u8; 4096] = [1; 4096];
        assert!(!is_readable_and_writable(CONSTANT.as_ptr() as u64, 4096));
    }
}
