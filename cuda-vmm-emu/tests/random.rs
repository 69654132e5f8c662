//! Random sequences of calls: each is answered as a small model says, nothing crashes, and the ledger agrees with the model at every step.

mod common;

use common::*;
use cuda_vmm_emu::sys::{CUresult, Driver};
use cuda_vmm_emu::{Access, Config, Emulator};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ptr;

/// Granularity: small, so that sequences touch much.
const G: u64 = 64 << 10;
const DEVICES: usize = 2;
/// Memory of each device, in grains.
const MEMORY: u64 = 12;

/// One call. Places are picked among what exists by number, and sizes are in grains, so that good calls and bad ones mix.
#[derive(Clone, Debug)]
enum Call {
    Reserve { grains: u64, odd: bool },
    Free { pick: usize, grains: Option<u64> },
    Create { device: i32, grains: u64 },
    Release { pick: usize },
    Map { place: usize, offset: u64, grains: u64, pick: usize },
    Unmap { place: usize, offset: u64, grains: u64 },
    Access { place: usize, offset: u64, grains: u64, device: i32, level: u8 },
    Retain { place: usize, offset: u64 },
    Set { place: usize, offset: u64, length: u64, device: usize, value: u8 },
    Copy { from: usize, to: usize, offset: u64, length: u64, device: usize },
    Junk { function: u8, number: u64, size: u64 },
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let grains = || 0..5_u64;
    let pick = || 0..6_usize;
    // Mostly devices that exist.
    let device = || prop_oneof![9 => 0..DEVICES as i32, 1 => Just(-1), 1 => Just(DEVICES as i32)];
    let call = prop_oneof![
        2 => (grains(), proptest::bool::weighted(0.1)).prop_map(|(grains, odd)| Call::Reserve { grains, odd }),
        1 => (pick(), prop_oneof![Just(None), grains().prop_map(Some)])
            .prop_map(|(pick, grains)| Call::Free { pick, grains }),
        3 => (device(), grains()).prop_map(|(device, grains)| Call::Create { device, grains }),
        2 => pick().prop_map(|pick| Call::Release { pick }),
        6 => (pick(), grains(), grains(), pick())
            .prop_map(|(place, offset, grains, pick)| Call::Map { place, offset, grains, pick }),
        3 => (pick(), grains(), grains())
            .prop_map(|(place, offset, grains)| Call::Unmap { place, offset, grains }),
        5 => (pick(), grains(), grains(), device(), 0..4_u8).prop_map(
            |(place, offset, grains, device, level)| Call::Access { place, offset, grains, device, level }
        ),
        1 => (pick(), grains()).prop_map(|(place, offset)| Call::Retain { place, offset }),
        4 => (pick(), 0..4 * G, 0..G, 0..DEVICES, any::<u8>()).prop_map(
            |(place, offset, length, device, value)| Call::Set { place, offset, length, device, value }
        ),
        4 => (pick(), pick(), 0..3 * G, 0..G, 0..DEVICES).prop_map(
            |(from, to, offset, length, device)| Call::Copy { from, to, offset, length, device }
        ),
        2 => (any::<u8>(), any::<u64>(), any::<u64>())
            .prop_map(|(function, number, size)| Call::Junk { function, number, size }),
    ];
    proptest::collection::vec(call, 1..80)
}

struct Physical {
    device: usize,
    size: u64,
    references: u64,
    bytes: Vec<u8>,
}

struct Mapping {
    size: u64,
    handle: u64,
    access: [Access; DEVICES],
}

/// What should be there.
#[derive(Default)]
struct Model {
    reservations: BTreeMap<u64, u64>,
    memory: BTreeMap<u64, Physical>,
    mappings: BTreeMap<u64, Mapping>,
}

impl Model {
    fn place(&self, pick: usize) -> Option<(u64, u64)> {
        self.reservations.iter().nth(pick % self.reservations.len().max(1)).map(|(&a, &s)| (a, s))
    }

    fn handle(&self, pick: usize) -> Option<u64> {
        let valid: Vec<_> = self.memory.iter().filter(|(_, m)| m.references > 0).map(|(&h, _)| h).collect();
        (!valid.is_empty()).then(|| valid[pick % valid.len()])
    }

    fn at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.size).then_some((start, mapping))
    }

    fn whole(&self, start: u64, size: u64) -> Option<Vec<u64>> {
        let (mut next, mut found) = (start, Vec::new());
        while next < start + size {
            found.push(next);
            next += self.mappings.get(&next)?.size;
        }
        (size > 0 && next == start + size).then_some(found)
    }

    /// The pieces of memory behind a range, if a device may use all of it so.
    fn pieces(&self, at: u64, length: u64, device: usize, need: Access) -> Option<Vec<(u64, usize, usize)>> {
        let (mut next, mut found) = (at, Vec::new());
        loop {
            let (start, mapping) = self.at(next)?;
            if mapping.access[device] < need {
                return None;
            }
            let part = (start + mapping.size - next).min(at + length - next);
            found.push((mapping.handle, (next - start) as usize, part as usize));
            next += part;
            if next >= at + length {
                return Some(found);
            }
        }
    }

    fn read(&self, pieces: &[(u64, usize, usize)]) -> Vec<u8> {
        pieces.iter().flat_map(|&(h, at, n)| &self.memory[&h].bytes[at..at + n]).copied().collect()
    }

    fn write(&mut self, pieces: &[(u64, usize, usize)], mut bytes: &[u8]) {
        for &(handle, at, n) in pieces {
            self.memory.get_mut(&handle).unwrap().bytes[at..at + n].copy_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
        }
    }

    /// Memory that neither a handle nor a mapping keeps is gone.
    fn sweep(&mut self) {
        let mapped: Vec<u64> = self.mappings.values().map(|mapping| mapping.handle).collect();
        self.memory.retain(|handle, memory| memory.references > 0 || mapped.contains(handle));
    }

    fn used(&self, device: usize) -> u64 {
        self.memory.values().filter(|memory| memory.device == device).map(|memory| memory.size).sum()
    }
}

struct Run {
    emulator: Emulator,
    driver: Driver,
    streams: [cuda_vmm_emu::sys::CUstream; DEVICES],
    contexts: [cuda_vmm_emu::sys::CUcontext; DEVICES],
    model: Model,
}

fn expect(happened: Result<(), CUresult>, good: bool, call: &Call) {
    assert_eq!(happened.is_ok(), good, "{call:?} returned {happened:?}");
}

impl Run {
    fn new() -> Self {
        let config = Config::new(DEVICES).granularity(G as usize);
        let (emulator, driver) = start(config.each_device(|device| device.memory(MEMORY * G)));
        let contexts = [0, 1].map(|device| make_current(&driver, device));
        let streams = contexts.map(|context| {
            call!(driver, cuCtxSetCurrent(context)).unwrap();
            new_stream(&driver, 1)
        });
        Self { emulator, driver, streams, contexts, model: Model::default() }
    }

    /// Something to work with: a mapping that each device may write, one that device 0 may read, and one with no access yet.
    fn prelude(&mut self) {
        self.step(&Call::Reserve { grains: 4, odd: false });
        let map = |offset, grains| Call::Map { place: 0, offset, grains, pick: 0 };
        let grant = |offset, grains, device, level| Call::Access { place: 0, offset, grains, device, level };
        self.step(&Call::Create { device: 0, grains: 2 });
        for call in [map(0, 1), map(1, 2), map(3, 1), grant(0, 1, 0, 3), grant(0, 1, 1, 3), grant(1, 2, 0, 1)]
        {
            self.step(&call);
        }
        self.step(&Call::Create { device: 1, grains: 3 });
        self.step(&Call::Reserve { grains: 3, odd: false });
    }

    fn use_device(&self, device: usize) {
        call!(self.driver, cuCtxSetCurrent(self.contexts[device])).unwrap();
    }

    fn step(&mut self, call: &Call) {
        let driver = self.driver.clone();
        match *call {
            Call::Reserve { grains, odd } => {
                let size = grains * G + u64::from(odd);
                let mut address = 0;
                let result = call!(driver, cuMemAddressReserve(&mut address, size as usize, 0, 0, 0));
                expect(result, grains > 0 && !odd, call);
                if result.is_ok() {
                    self.model.reservations.insert(address, size);
                }
            }
            Call::Free { pick, grains } => {
                let Some((address, size)) = self.model.place(pick) else { return };
                let asked = grains.map_or(size, |grains| grains * G);
                let empty = self.model.mappings.range(address..address + size).next().is_none();
                let result = call!(driver, cuMemAddressFree(address, asked as usize));
                expect(result, empty && asked == size, call);
                if result.is_ok() {
                    self.model.reservations.remove(&address);
                }
            }
            Call::Create { device, grains } => {
                let exists = (0..DEVICES as i32).contains(&device);
                let fits = exists && self.model.used(device as usize) + grains * G <= MEMORY * G;
                let result = create(&driver, on_device(device), (grains * G) as usize, NONE);
                expect(result.map(drop), fits && grains > 0, call);
                if let Ok(handle) = result {
                    let size = grains * G;
                    let bytes = vec![0; size as usize];
                    let memory = Physical { device: device as usize, size, references: 1, bytes };
                    assert!(self.model.memory.insert(handle, memory).is_none(), "a handle is new");
                }
            }
            Call::Release { pick } => {
                let Some(handle) = self.model.handle(pick) else { return };
                call!(driver, cuMemRelease(handle)).unwrap();
                self.model.memory.get_mut(&handle).unwrap().references -= 1;
                self.model.sweep();
            }
            Call::Map { place, offset, grains, pick } => {
                let (Some((base, reserved)), Some(handle)) =
                    (self.model.place(place), self.model.handle(pick))
                else {
                    return;
                };
                let (address, size) = (base + offset * G, grains * G);
                let inside = offset * G < reserved && offset * G + size <= reserved;
                let free = (0..grains).all(|grain| self.model.at(address + grain * G).is_none());
                let fits = size > 0 && size <= self.model.memory[&handle].size;
                // Behind its own reservation there may be another that fits.
                let elsewhere = self
                    .model
                    .reservations
                    .range(..=address)
                    .next_back()
                    .is_some_and(|(&b, &s)| b != base && address < b + s && address + size <= b + s);
                let result = call!(driver, cuMemMap(address, size as usize, 0, handle, 0));
                expect(result, (inside || elsewhere) && free && fits, call);
                if result.is_ok() {
                    let mapping = Mapping { size, handle, access: [Access::None; DEVICES] };
                    self.model.mappings.insert(address, mapping);
                }
            }
            Call::Unmap { place, offset, grains } => {
                let Some((base, _)) = self.model.place(place) else { return };
                let (address, size) = (base + offset * G, grains * G);
                let whole = self.model.whole(address, size);
                let result = call!(driver, cuMemUnmap(address, size as usize));
                expect(result, whole.is_some(), call);
                for start in whole.into_iter().flatten() {
                    self.model.mappings.remove(&start);
                }
                self.model.sweep();
            }
            Call::Access { place, offset, grains, device, level } => {
                let Some((base, _)) = self.model.place(place) else { return };
                let (address, size) = (base + offset * G, grains * G);
                let access = match level {
                    0 => Some((NO_ACCESS, Access::None)),
                    1 => Some((READ, Access::Read)),
                    3 => Some((READ_WRITE, Access::ReadWrite)),
                    _ => None,
                };
                let mut flags = NO_ACCESS;
                flags.0 = level.into();
                let exists = (0..DEVICES as i32).contains(&device);
                let whole = self.model.whole(address, size);
                let result = set_access(&driver, address, size as usize, on_device(device), flags);
                expect(result, whole.is_some() && exists && access.is_some(), call);
                if let (Ok(()), Some((_, access))) = (result, access) {
                    for start in whole.into_iter().flatten() {
                        self.model.mappings.get_mut(&start).unwrap().access[device as usize] = access;
                    }
                }
            }
            Call::Retain { place, offset } => {
                let Some((base, _)) = self.model.place(place) else { return };
                let address = base + offset * G;
                let mapped = self.model.at(address).map(|(_, mapping)| mapping.handle);
                let mut handle = 0;
                let result = call!(driver, cuMemRetainAllocationHandle(&mut handle, address as *mut _));
                expect(result, mapped.is_some(), call);
                if let Some(expected) = mapped {
                    assert_eq!(handle, expected);
                    self.model.memory.get_mut(&handle).unwrap().references += 1;
                }
            }
            Call::Set { place, offset, length, device, value } => {
                let Some((base, _)) = self.model.place(place) else { return };
                let at = base + offset;
                let pieces = self.model.pieces(at, length, device, Access::ReadWrite);
                self.use_device(device);
                let stream = self.streams[device];
                let result = call!(driver, cuMemsetD8Async(at, value, length as usize, stream));
                let one = pieces.as_ref().is_some_and(|pieces| pieces.len() == 1);
                expect(result, one || length == 0, call);
                if let (Ok(()), Some(pieces), true) = (result, pieces, length > 0) {
                    self.model.write(&pieces, &vec![value; length as usize]);
                }
            }
            Call::Copy { from, to, offset, length, device } => {
                let (Some((from, _)), Some((to, _))) = (self.model.place(from), self.model.place(to)) else {
                    return;
                };
                let (from, to) = (from + offset / 2, to + offset);
                let source = self.model.pieces(from, length, device, Access::Read);
                let target = self.model.pieces(to, length, device, Access::ReadWrite);
                self.use_device(device);
                let stream = self.streams[device];
                let result = call!(driver, cuMemcpyDtoDAsync(to, from, length as usize, stream));
                expect(result, length == 0 || source.is_some() && target.is_some(), call);
                if let (Ok(()), Some(source), Some(target), true) = (result, source, target, length > 0) {
                    // What overlaps through two mappings of one memory is nobody's promise.
                    let overlaps = source.iter().any(|s| target.iter().any(|t| s.0 == t.0));
                    if overlaps {
                        call!(driver, cuStreamSynchronize(stream)).unwrap();
                        let bytes = self.emulator.read(to, length as usize).unwrap();
                        self.model.write(&target, &bytes);
                    } else {
                        let bytes = self.model.read(&source);
                        self.model.write(&target, &bytes);
                    }
                }
            }
            Call::Junk { function, number, size } => self.junk(function, number, size as usize),
        }
    }

    /// Arguments from nowhere: refused, whatever they are. (Only those that no lucky number makes good.)
    fn junk(&self, function: u8, number: u64, size: usize) {
        let driver = &self.driver;
        let (mut out, mut flags) = (0, 0);
        let odd = number | 1;
        let refused = match function % 12 {
            0 => call!(driver, cuMemRelease(odd)),
            1 => call!(driver, cuMemAddressFree(odd, size)),
            2 => call!(driver, cuMemMap(odd, size, 0, number, 0)),
            3 => call!(driver, cuMemUnmap(odd, size)),
            4 => call!(driver, cuMemGetAccess(&mut flags, &on_device(size as i32 | 16), number)),
            5 => call!(
                driver,
                cuMemImportFromShareableHandle(&mut out, (odd | 1 << 33) as usize as *mut _, FD)
            ),
            6 => call!(driver, cuMulticastBindMem(odd, size, number, size, size, 0)),
            7 => call!(driver, cuMulticastAddDevice(odd, number as i32)),
            8 => call!(driver, cuStreamSynchronize((odd | 1 << 40) as usize as *mut _)),
            9 => call!(driver, cuEventRecord(odd as usize as *mut _, self.streams[0])),
            10 => call!(driver, cuMemFree(odd)),
            _ => call!(driver, cuCtxSetCurrent(odd as usize as *mut _)),
        };
        assert!(refused.is_err(), "{function} {number:#x} {size:#x}");
    }

    /// The ledger says what the model says, and the memory holds what the model's memory holds.
    fn compare(&self) {
        for stream in self.streams {
            call!(self.driver, cuStreamSynchronize(stream)).unwrap();
        }
        let (ledger, model) = (self.emulator.ledger(), &self.model);
        let reservations: Vec<_> = ledger.reservations.iter().map(|span| (span.address, span.size)).collect();
        assert_eq!(reservations, model.reservations.iter().map(|(&a, &s)| (a, s)).collect::<Vec<_>>());
        let handles: Vec<_> = ledger.handles.iter().map(|h| (h.handle, h.references, h.size)).collect();
        let held = model.memory.iter().filter(|(_, memory)| memory.references > 0);
        assert_eq!(handles, held.map(|(&h, m)| (h, m.references, m.size)).collect::<Vec<_>>());
        assert_eq!(ledger.device_bytes, [model.used(0), model.used(1)]);
        assert_eq!(ledger.mappings.len(), model.mappings.len());
        for (found, (&start, expected)) in ledger.mappings.iter().zip(&model.mappings) {
            assert_eq!(
                (found.span.address, found.span.size, found.handle),
                (start, expected.size, expected.handle)
            );
            assert_eq!(found.devices, expected.access);
            if expected.access.iter().any(|&access| access >= Access::Read) {
                let bytes = self.emulator.read(start, expected.size as usize).unwrap();
                assert!(bytes == model.memory[&expected.handle].bytes[..bytes.len()], "contents differ");
            }
        }
        assert!(ledger.incidents.is_empty(), "{ledger}");
    }

    /// Takes everything back.
    fn end(mut self) {
        for (start, mapping) in std::mem::take(&mut self.model.mappings) {
            call!(self.driver, cuMemUnmap(start, mapping.size as usize)).unwrap();
        }
        for (start, size) in std::mem::take(&mut self.model.reservations) {
            call!(self.driver, cuMemAddressFree(start, size as usize)).unwrap();
        }
        for (handle, memory) in std::mem::take(&mut self.model.memory) {
            for _ in 0..memory.references {
                call!(self.driver, cuMemRelease(handle)).unwrap();
            }
        }
        for stream in self.streams {
            call!(self.driver, cuStreamDestroy(stream)).unwrap();
        }
        call!(self.driver, cuCtxSetCurrent(ptr::null_mut())).unwrap();
        // Each context was made current once on top of the other.
        call!(self.driver, cuCtxSetCurrent(ptr::null_mut())).unwrap();
        for device in 0..DEVICES as i32 {
            call!(self.driver, cuDevicePrimaryCtxRelease(device)).unwrap();
        }
        self.emulator.assert_empty();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_is_answered_as_the_model_says(calls in calls()) {
        let mut run = Run::new();
        run.prelude();
        for (index, call) in calls.iter().enumerate() {
            run.step(call);
            if index % 8 == 0 {
                run.compare();
            }
        }
        run.compare();
        run.end();
    }
}
