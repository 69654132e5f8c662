//! What members of a team send each other: lost descriptors, FABRIC handles instead, and hostile bytes. On the software driver.

use cuda_vmm::multicast::{Agreement, SocketStar, Team};
use cuda_vmm::sys::CUresult;
use cuda_vmm::{Error, Result};
use cuda_vmm_emu::{Config, Fabric};
use integration_tests::multicast::{GRANULE, allowed};
use integration_tests::team::{LONG, Member, errors, members, options, stars};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// An agreement that does something to what another one does.
struct Bent<'a> {
    star: &'a mut SocketStar,
    fds: bool,
    lose_fd: bool,
    exchanges: usize,
    change: &'a dyn Fn(usize, &mut Vec<Vec<u8>>),
}

impl<'a> Bent<'a> {
    fn new(star: &'a mut SocketStar) -> Self {
        Self { star, fds: true, lose_fd: false, exchanges: 0, change: &|_, _| {} }
    }
}

impl Agreement for Bent<'_> {
    fn rank(&self) -> usize {
        self.star.rank()
    }

    fn ranks(&self) -> usize {
        self.star.ranks()
    }

    fn exchange(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let mut all = self.star.exchange(mine, deadline)?;
        (self.change)(self.exchanges, &mut all);
        self.exchanges += 1;
        Ok(all)
    }

    fn carries_fds(&self) -> bool {
        self.fds
    }

    fn distribute(&mut self, fd: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<Option<OwnedFd>> {
        let got = self.star.distribute(fd, deadline)?;
        if self.lose_fd {
            Err(Error::DescriptorCount { received: 0, expected: 1, truncated: true })
        } else {
            Ok(got)
        }
    }
}

#[test]
fn a_lost_descriptor_is_an_error_on_all() {
    if !allowed("a_lost_descriptor_is_an_error_on_all") {
        return;
    }
    let errors = errors(3, |member| {
        let (rank, memory) = (member.rank, member.memory(GRANULE));
        let mut bent = Bent { lose_fd: rank == 2, ..Bent::new(&mut member.star) };
        Team::create(&[memory], &mut bent, &options())
    });
    assert!(matches!(errors[2], Error::DescriptorCount { .. }), "{}", errors[2]);
    for error in &errors[..2] {
        assert!(matches!(error, Error::Member { rank: 2, .. }), "{error}");
    }
}

#[test]
fn fabric_handles_need_no_descriptors() {
    if !allowed("fabric_handles_need_no_descriptors") {
        return;
    }
    let team = |member: &mut Member| {
        let memory = member.memory(GRANULE);
        Team::create(&[memory], &mut Bent { fds: false, ..Bent::new(&mut member.star) }, &options())
    };
    members(
        3,
        |_| Config::new(3).fabric(Fabric::Working),
        |member| {
            let made = team(member).unwrap();
            made.close(&mut member.star, LONG).unwrap();
        },
    );
    // Without an IMEX channel all hear why.
    for error in errors(3, team) {
        assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_NOT_PERMITTED), "{error}");
        assert!(error.to_string().contains("IMEX"), "{error}");
    }
    // Some can pass descriptors and some cannot.
    let mixed = errors(2, |member| {
        let (memory, fds) = (member.memory(GRANULE), member.rank == 0);
        Team::create(&[memory], &mut Bent { fds, ..Bent::new(&mut member.star) }, &options())
    });
    for error in mixed {
        assert!(matches!(error, Error::Disagreement { .. }), "{error}");
    }
}

#[test]
fn hostile_messages_do_no_harm() {
    if !allowed("hostile_messages_do_no_harm") {
        return;
    }
    // What both members read from rank 1, in each exchange, is something else than it sent.
    type Change = fn(&mut Vec<Vec<u8>>);
    let changes: [(&str, Change); 7] = [
        ("zeros", |all| all[1].fill(0)),
        ("ones", |all| all[1].fill(0xff)),
        ("short", |all| all[1].truncate(100)),
        ("another step", |all| all[1][8] += 1),
        ("no such verdict", |all| all[1][9] = 7),
        ("a long text", |all| all[1][10..12].fill(0xff)),
        ("no message", |all| drop(all.pop())),
    ];
    for (what, change) in changes {
        for when in 0..6 {
            let errors = errors(2, |member| {
                let memory = member.memory(GRANULE);
                let change = move |exchange: usize, all: &mut Vec<Vec<u8>>| {
                    if exchange == when {
                        change(all);
                    }
                };
                let mut bent = Bent { change: &change, ..Bent::new(&mut member.star) };
                Team::create(&[memory], &mut bent, &options())
            });
            for error in errors {
                assert!(matches!(error, Error::BadMessage { .. }), "{what} in exchange {when}: {error}");
            }
        }
    }
    // Impossible numbers in the first message.
    for bytes in [[0_u8; 4], [0xff; 4], 19_u32.to_le_bytes()] {
        let errors = errors(2, |member| {
            let memory = member.memory(GRANULE);
            let change = |exchange: usize, all: &mut Vec<Vec<u8>>| {
                if exchange == 0 {
                    all[1][16..20].copy_from_slice(&bytes);
                }
            };
            let mut bent = Bent { change: &change, ..Bent::new(&mut member.star) };
            Team::create(&[memory], &mut bent, &options())
        });
        for error in errors {
            assert!(matches!(error, Error::BadMessage { .. }), "{bytes:?}: {error}");
        }
    }
}

#[test]
fn a_star_refuses_what_is_no_star() {
    use std::io::Write;
    let deadline = || Instant::now() + Duration::from_secs(5);
    let hear = |bytes: &[u8]| {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(bytes).unwrap();
        drop(far);
        SocketStar::root(vec![near]).exchange(b"mine", deadline()).unwrap_err().to_string()
    };
    let header = |kind: u32, rank: u32, sequence: u32, length: u32| {
        let mut bytes = b"CVMSTAR1".to_vec();
        bytes.extend([kind, rank, sequence, length].iter().flat_map(|value| value.to_le_bytes()));
        bytes.extend(b"mine");
        bytes
    };
    assert!(hear(b"").contains("rank 1"));
    assert!(hear(&[0; 24]).contains("does not start"));
    assert!(hear(&header(9, 1, 1, 4)).contains("something else"));
    assert!(hear(&header(3, 1, 1, 4)).contains("something else"), "only rank 0 says who is missing");
    assert!(hear(&header(1, 2, 1, 4)).contains("another rank"));
    assert!(hear(&header(1, 1, 2, 4)).contains("another exchange"));
    assert!(hear(&header(1, 1, 1, u32::MAX)).contains("another length"));
    assert!(hear(&header(1, 1, 1, 4)[..26]).contains("closed the connection after 2 of 4 bytes"));

    // A message that no rank may send, and one that is not for this rank.
    let (near, _far) = UnixStream::pair().unwrap();
    let mut star = SocketStar::root(vec![near]);
    assert!(matches!(star.exchange(b"", deadline()), Err(Error::Unsupported { .. })));
    assert!(matches!(star.distribute(None, deadline()), Err(Error::Unsupported { .. })));
    // What rank 0 says of a third one is heard by the second.
    let (near, mut far) = UnixStream::pair().unwrap();
    let mut bytes = header(3, 2, 1, 7)[..24].to_vec();
    bytes.extend(b"\x1b[2Jbye");
    far.write_all(&bytes).unwrap();
    let error = SocketStar::member(1, 3, near).exchange(b"mine", deadline()).unwrap_err();
    assert!(matches!(&error, Error::Member { rank: 2, reason, .. } if reason == "\u{fffd}[2Jbye"), "{error}");
}

/// Rank 0 finds rank 2 gone only while it answers the others, and leaves: rank 1 hears who is missing though nothing can be sent any more.
#[test]
fn who_is_missing_is_heard_after_rank_0_has_left() {
    let mut stars = stars(3).into_iter();
    let (mut root, mut first, mut second) =
        (stars.next().unwrap(), stars.next().unwrap(), stars.next().unwrap());
    // Rank 2 says its part, does not wait for the answer, and is gone.
    assert!(second.exchange(b"2", Instant::now()).is_err());
    drop(second);
    let (has_left, left) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let error = root.exchange(b"0", Instant::now() + LONG).unwrap_err();
            assert!(matches!(error, Error::Member { rank: 2, .. }), "{error}");
            drop(root);
            has_left.send(()).unwrap();
        });
        assert_eq!(first.exchange(b"1", Instant::now() + LONG).unwrap(), [b"0", b"1", b"2"]);
        left.recv().unwrap();
        let error = first.exchange(b"1", Instant::now() + LONG).unwrap_err();
        assert!(matches!(error, Error::Member { rank: 2, .. }), "{error}");
    });
}
