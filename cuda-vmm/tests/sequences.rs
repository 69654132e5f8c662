//! Any sequence of calls against a model of what must come of it: which are refused and why, which bytes are where, and that nothing
//! is left at the end.

use cuda_vmm::{
    Context, Cuda, Error, Grant, Granularity, GrowableRange, HandleTypes, Mapping, PhysicalMemory,
    Properties, Reservation, SegmentedRange,
};
use cuda_vmm_emu::{Config, Emulator};
use proptest::collection::vec;
use proptest::prelude::*;

/// Granularity of the software driver here: small, so that many calls are cheap.
const GRANULE: usize = 64 << 10;

fn on(
    config: Config,
    body: impl FnOnce(&Cuda, &Context) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let emulator = Emulator::new(config.granularity(GRANULE)).unwrap();
    {
        let cuda = Cuda::with_driver(emulator.driver()).unwrap();
        let context = cuda.device(0).unwrap().primary_context().unwrap();
        body(&cuda, &context)?;
    }
    emulator.assert_empty();
    Ok(())
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() }
}

/// One call; numbers choose among what there is, and lengths are in granules.
#[derive(Clone, Debug)]
enum Step {
    Reserve(usize),
    Create(usize),
    Import(usize),
    DropReservation(usize),
    DropMemory(usize),
    Map { reservation: usize, memory: usize, offset: usize },
    Clone(usize),
    Unmap(usize),
    DropMapping(usize),
    Write { mapping: usize, value: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    let index = 0..8_usize;
    prop_oneof![
        1 => (1..6_usize).prop_map(Step::Reserve),
        2 => (1..4_usize).prop_map(Step::Create),
        1 => index.clone().prop_map(Step::Import),
        1 => index.clone().prop_map(Step::DropReservation),
        1 => index.clone().prop_map(Step::DropMemory),
        6 => (index.clone(), index.clone(), 0..7_usize)
            .prop_map(|(reservation, memory, offset)| Step::Map { reservation, memory, offset }),
        1 => index.clone().prop_map(Step::Clone),
        2 => index.clone().prop_map(Step::Unmap),
        2 => index.clone().prop_map(Step::DropMapping),
        4 => (index, any::<u8>()).prop_map(|(mapping, value)| Step::Write { mapping, value }),
    ]
}

/// A reservation and its number in the model.
struct Place {
    object: Reservation,
    number: usize,
}

/// A memory handle and the number of the bytes behind it: imports share them.
struct Handle {
    object: PhysicalMemory,
    bytes: usize,
}

/// A mapping, and the model of it.
struct Mapped {
    object: Mapping,
    place: usize,
    from: usize,
    to: usize,
    bytes: usize,
    /// Equal for clones.
    number: usize,
}

#[derive(Default)]
struct World {
    places: Vec<Place>,
    handles: Vec<Handle>,
    mapped: Vec<Mapped>,
    /// What was written last, by number of the bytes.
    values: Vec<u8>,
    numbers: usize,
}

impl World {
    fn number(&mut self) -> usize {
        self.numbers += 1;
        self.numbers
    }

    fn apply(&mut self, cuda: &Cuda, context: &Context, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Reserve(granules) => {
                let object =
                    Reservation::new(cuda, granules * GRANULE, Granularity::new(GRANULE).unwrap()).unwrap();
                let number = self.number();
                self.places.push(Place { object, number });
            }
            Step::Create(granules) => {
                let properties = Properties::device(0).handle_types(HandleTypes::POSIX_FD);
                let object = PhysicalMemory::create(cuda, granules * GRANULE, &properties).unwrap();
                self.values.push(0);
                self.handles.push(Handle { object, bytes: self.values.len() - 1 });
            }
            Step::Import(index) => {
                if let Some(Handle { object, bytes }) = self.handles.get(index) {
                    if object.is_imported() {
                        let error = object.export_fd().unwrap_err();
                        prop_assert!(matches!(error, Error::NotExportable { imported: true, .. }), "{error}");
                        return Ok(());
                    }
                    let fd = object.export_fd().unwrap();
                    let import = PhysicalMemory::import_fd(cuda, fd, object.size()).unwrap();
                    prop_assert!(import.is_imported() && &import != object);
                    let bytes = *bytes;
                    self.handles.push(Handle { object: import, bytes });
                }
            }
            Step::DropReservation(index) if index < self.places.len() => drop(self.places.swap_remove(index)),
            Step::DropMemory(index) if index < self.handles.len() => drop(self.handles.swap_remove(index)),
            Step::Map { reservation, memory, offset } => self.map(reservation, memory, offset)?,
            Step::Clone(index) => {
                if let Some(&Mapped { ref object, place, from, to, bytes, number }) = self.mapped.get(index) {
                    let object = object.clone();
                    self.mapped.push(Mapped { object, place, from, to, bytes, number });
                }
            }
            Step::Unmap(index) if index < self.mapped.len() => self.unmap(index)?,
            Step::DropMapping(index) if index < self.mapped.len() => drop(self.mapped.swap_remove(index)),
            Step::Write { mapping, value } => {
                if let Some(Mapped { object, bytes, .. }) = self.mapped.get(mapping) {
                    context.fill(object, 0, object.size(), value).unwrap();
                    self.values[*bytes] = value;
                }
            }
            Step::DropReservation(_) | Step::DropMemory(_) | Step::Unmap(_) | Step::DropMapping(_) => {}
        }
        Ok(())
    }

    fn map(&mut self, reservation: usize, memory: usize, offset: usize) -> Result<(), TestCaseError> {
        let (Some(place), Some(handle)) = (self.places.get(reservation), self.handles.get(memory)) else {
            return Ok(());
        };
        let (from, to) = (offset * GRANULE, offset * GRANULE + handle.object.size());
        let outside = to > place.object.size();
        let overlaps =
            self.mapped.iter().any(|other| other.place == place.number && from < other.to && other.from < to);
        match place.object.map(from, &handle.object) {
            Ok(object) => {
                prop_assert!(!outside && !overlaps, "{}..{} was mapped", from, to);
                object.set_access(&[Grant::device(0)]).unwrap();
                let (place, bytes, number) = (place.number, handle.bytes, self.number());
                self.mapped.push(Mapped { object, place, from, to, bytes, number });
            }
            Err(Error::OutOfBounds { limit, .. }) => prop_assert!(outside && limit == place.object.size()),
            Err(Error::Overlap { offset, mapped_offset, mapped_length, .. }) => {
                prop_assert!(overlaps && !outside && offset == from);
                prop_assert!(self.mapped.iter().any(|other| other.place == place.number
                    && (other.from, other.to) == (mapped_offset, mapped_offset + mapped_length)));
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
        Ok(())
    }

    fn unmap(&mut self, index: usize) -> Result<(), TestCaseError> {
        let mapped = self.mapped.swap_remove(index);
        let others = self.mapped.iter().filter(|other| other.number == mapped.number).count();
        match mapped.object.unmap() {
            Ok(memory) => {
                prop_assert_eq!(others, 0);
                prop_assert_eq!(memory.size(), mapped.to - mapped.from);
            }
            Err(rejected) => {
                let right = matches!(rejected.error, Error::StillShared { holders, .. } if holders == others);
                prop_assert!(right && others > 0, "{}", rejected.error);
                self.mapped.push(Mapped { object: rejected.object, ..mapped });
            }
        }
        Ok(())
    }

    /// Every mapping shows what was written last to its bytes, and every reservation counts what is mapped in it.
    fn check(&self, context: &Context) -> Result<(), TestCaseError> {
        for Mapped { object, from, bytes, .. } in &self.mapped {
            prop_assert_eq!(object.offset(), *from);
            prop_assert_eq!(object.address().get(), object.reservation().address().get() + *from as u64);
            let mut last = [0xaa];
            context.download(object, object.size() - 1, &mut last).unwrap();
            prop_assert_eq!(last[0], self.values[*bytes]);
        }
        for place in &self.places {
            let mut ranges: Vec<_> = self
                .mapped
                .iter()
                .filter(|m| m.place == place.number)
                .map(|m| (m.number, m.to - m.from))
                .collect();
            ranges.sort_unstable();
            ranges.dedup();
            prop_assert_eq!(
                place.object.mapped_bytes(),
                ranges.iter().map(|(_, length)| length).sum::<usize>()
            );
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn mappings_follow_the_model(steps in vec(step(), 1..60)) {
        on(Config::h200x2(), |cuda, context| {
            let mut world = World::default();
            for step in steps {
                world.apply(cuda, context, step)?;
                world.check(context)?;
            }
            Ok(())
        })?;
    }

    /// Grows, shrinks, and chunks that somebody holds, on a device that has too little memory for all of it.
    #[test]
    fn growable_ranges_follow_the_model(steps in vec((0..20_usize, any::<bool>(), 0..12_usize), 1..30)) {
        const MEMORY: usize = 10;
        const CAPACITY: usize = 16;
        let small = Config::new(1).device(0, |device| device.memory((MEMORY * GRANULE) as u64));
        on(small, |cuda, context| {
            let grants = [Grant::device(0)];
            let mut range =
                GrowableRange::new(cuda, Properties::device(0), CAPACITY * GRANULE, GRANULE, &grants).unwrap();
            let address = range.address();
            let mut held: Vec<(usize, Mapping)> = Vec::new();
            let mut size = 0;
            for (target, hold, which) in steps {
                let grown = range.grow_to(target * GRANULE);
                match grown {
                    Ok(()) => {
                        prop_assert!(target <= CAPACITY.min(MEMORY) || target <= size);
                        size = size.max(target);
                    }
                    Err(Error::OutOfBounds { .. }) => prop_assert!(target > CAPACITY),
                    Err(error) => {
                        prop_assert!(error.status().is_some() && target > MEMORY && target <= CAPACITY, "{}", error);
                    }
                }
                prop_assert_eq!((range.size(), range.address()), (size * GRANULE, address));
                if hold && let Some(chunk) = range.chunks().get(which) {
                    held.push((which, chunk.clone()));
                } else {
                    held.retain(|(index, _)| *index != which);
                }
                for (index, chunk) in range.chunks().iter().enumerate() {
                    context.fill(chunk, 0, 1, index as u8).unwrap();
                }
                // Down to where it may: a held chunk stops it there.
                let lowest = held.iter().map(|(index, _)| index + 1).max().unwrap_or(0);
                let down = which.min(size);
                match range.shrink_to(down * GRANULE) {
                    Ok(()) => prop_assert!(lowest <= down),
                    Err(Error::StillShared { .. }) => prop_assert!(lowest > down),
                    Err(error) => return Err(TestCaseError::fail(error.to_string())),
                }
                size = size.min(down.max(lowest));
                prop_assert_eq!(range.size(), size * GRANULE);
                for index in 0..size {
                    let mut byte = [0xaa];
                    context.download(&range, index * GRANULE, &mut byte).unwrap();
                    prop_assert_eq!(byte[0], index as u8);
                }
            }
            Ok(())
        })?;
    }

    /// Copies anywhere in a range of any segments: the same bytes as in one vector.
    #[test]
    fn segmented_ranges_are_one_piece_of_memory(
        segments in vec((1..4_usize, any::<bool>()), 1..6),
        copies in vec((any::<prop::sample::Index>(), 0..3 * GRANULE, any::<u8>()), 1..12),
    ) {
        on(Config::h200x2(), |cuda, context| {
            let mut builder = SegmentedRange::builder(cuda).grant(Grant::device(0));
            let mut offsets = vec![0];
            for (granules, host) in segments {
                let properties = if host { Properties::host_numa(0) } else { Properties::device(1) };
                builder = builder.create(properties, granules * GRANULE);
                offsets.push(offsets[offsets.len() - 1] + granules * GRANULE);
            }
            let range = builder.build().unwrap();
            let total = offsets.pop().unwrap();
            prop_assert_eq!(range.size(), total);
            prop_assert_eq!(range.segments().map(|segment| segment.offset).collect::<Vec<_>>(), offsets);
            context.fill(&range, 0, total, 0).unwrap();
            let mut model = vec![0; total];
            for (start, length, seed) in copies {
                let offset = start.index(total);
                let bytes: Vec<u8> = (0..length).map(|at| seed.wrapping_add((at % 251) as u8)).collect();
                let result = context.upload(&range, offset, &bytes);
                if offset + length > total {
                    let refused = matches!(result, Err(Error::OutOfBounds { limit, .. }) if limit == total);
                    prop_assert!(refused, "{} bytes at {}: {:?}", length, offset, result);
                } else {
                    result.unwrap();
                    model[offset..offset + length].copy_from_slice(&bytes);
                }
            }
            let mut back = vec![0xaa; total];
            context.download(&range, 0, &mut back).unwrap();
            prop_assert!(back == model, "the range differs from one vector");
            Ok(())
        })?;
    }
}
