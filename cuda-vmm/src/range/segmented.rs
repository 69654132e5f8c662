//! One contiguous range of addresses over several pieces of physical memory.

use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::granularity::Granularity;
use crate::location::Grant;
use crate::memory::{DeviceAddress, Memory};
use crate::physical::PhysicalMemory;
use crate::properties::Properties;
use crate::reservation::{Mapping, Reservation, common_granularity};

/// Memory of several kinds, back to back in one range of addresses: for example a device's memory followed by host memory, so that
/// a kernel reaches both from one base. The segments may be this process's own or imported from others.
///
/// ```no_run
/// use cuda_vmm::{Cuda, Grant, Properties, SegmentedRange};
///
/// # fn main() -> cuda_vmm::Result<()> {
/// let cuda = Cuda::get()?;
/// let range = SegmentedRange::builder(cuda)
///     .create(Properties::device(0).shareable(), 64 << 20)
///     .create(Properties::host_numa(0).shareable(), 16 << 20)
///     .grant(Grant::device(0))
///     .build()?;
/// println!("{} bytes at {}", range.size(), range.address());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SegmentedRange {
    reservation: Reservation,
    segments: Vec<Mapping>,
}

/// One segment of a range, from [`SegmentedRange::segments`].
#[derive(Clone, Copy, Debug)]
pub struct Segment<'range> {
    /// Offset in the range, in bytes.
    pub offset: usize,
    /// The mapping.
    pub mapping: &'range Mapping,
}

/// Makes a [`SegmentedRange`].
#[derive(Debug)]
#[must_use = "nothing happens before `build`"]
pub struct SegmentedRangeBuilder {
    cuda: Cuda,
    plan: Vec<Plan>,
    grants: Vec<Grant>,
    alignment: Option<Granularity>,
}

#[derive(Debug)]
enum Plan {
    Create(Properties, usize),
    Existing(PhysicalMemory),
}

impl SegmentedRange {
    /// A range without segments yet.
    pub fn builder(cuda: &Cuda) -> SegmentedRangeBuilder {
        SegmentedRangeBuilder { cuda: cuda.clone(), plan: Vec::new(), grants: Vec::new(), alignment: None }
    }

    /// First address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.reservation.address()
    }

    /// Length of all segments together, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.reservation.size()
    }

    /// The segments in the order of their addresses.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = Segment<'_>> {
        self.segments.iter().map(|mapping| Segment { offset: mapping.offset(), mapping })
    }

    /// The segment at an index.
    #[must_use]
    pub fn segment(&self, index: usize) -> Option<Segment<'_>> {
        self.segments.get(index).map(|mapping| Segment { offset: mapping.offset(), mapping })
    }

    /// Sets access for more locations, for every segment: device grants for all, host grants for segments of host memory.
    ///
    /// Calls `cuMemSetAccess`.
    ///
    /// # Errors
    /// As [`Mapping::set_access`]; [`Error::AccessNotPossible`] for the host if no segment is host memory. If the driver refuses,
    /// segments before the one that failed keep the new access.
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_access(&self, grants: &[Grant]) -> Result<()> {
        let places = self.segments.iter().map(|mapping| mapping.memory().location());
        Grant::check(self.reservation.cuda(), grants, places)?;
        grant_each(&self.segments, grants)
    }
}

/// Host grants apply to host memory only: the CPU cannot be let into a device's memory.
fn grant_each(segments: &[Mapping], grants: &[Grant]) -> Result<()> {
    for mapping in segments {
        let host = mapping.memory().location().is_host();
        let fitting: Vec<_> =
            grants.iter().filter(|grant| host || !grant.location.is_host()).copied().collect();
        if !fitting.is_empty() {
            mapping.set_access(&fitting)?;
        }
    }
    Ok(())
}

impl SegmentedRangeBuilder {
    /// Appends new memory of `size` bytes.
    pub fn create(mut self, properties: Properties, size: usize) -> Self {
        self.plan.push(Plan::Create(properties, size));
        self
    }

    /// Appends memory that exists already, for example an import.
    pub fn existing(mut self, memory: PhysicalMemory) -> Self {
        self.plan.push(Plan::Existing(memory));
        self
    }

    /// Grants access: to all segments for a device, to segments of host memory for the host. Segments of host memory are open to
    /// the CPUs of their node without being told.
    pub fn grant(mut self, grant: Grant) -> Self {
        self.grants.push(grant);
        self
    }

    /// Aligns the range's address to more than the segments need.
    pub fn alignment(mut self, alignment: Granularity) -> Self {
        self.alignment = Some(alignment);
        self
    }

    /// Creates, reserves, maps and grants. If a step fails, what the earlier ones made is gone again.
    ///
    /// # Errors
    /// [`Error::Zero`] without segments or without a grant, [`Error::Misaligned`], [`Error::Overflow`], [`Error::UnknownDevice`],
    /// [`Error::AccessNotPossible`], [`Error::ForeignDriver`], or [`Error::Call`].
    pub fn build(self) -> Result<SegmentedRange> {
        let Self { cuda, plan, grants, alignment } = self;
        if plan.is_empty() {
            return Err(Error::Zero { what: "number of segments" });
        }
        // Everything that can be refused without the driver is refused before memory is created.
        let places = plan.iter().map(|step| match step {
            Plan::Create(properties, _) => properties.location(),
            Plan::Existing(memory) => memory.location(),
        });
        Grant::check(&cuda, &grants, places)?;
        for step in &plan {
            if let Plan::Existing(memory) = step {
                cuda.check_same(memory.cuda(), "a segment")?;
            }
        }
        let kinds = plan.iter().map(|step| match step {
            Plan::Create(properties, _) => *properties,
            Plan::Existing(memory) => *memory.properties(),
        });
        let granularity = common_granularity(&cuda, kinds)?;
        let mut total = 0_usize;
        for step in &plan {
            let size = match step {
                Plan::Create(_, size) => *size,
                Plan::Existing(memory) => memory.size(),
            };
            granularity.check("size of a segment", size)?;
            total = total.checked_add(size).ok_or(Error::Overflow { what: "the sum of the segments" })?;
        }
        let reservation =
            Reservation::new(&cuda, total, alignment.map_or(granularity, |a| a.max(granularity)))?;
        let mut segments = Vec::with_capacity(plan.len());
        let mut offset = 0;
        for step in plan {
            let memory = match step {
                Plan::Create(properties, size) => PhysicalMemory::create(&cuda, size, &properties)?,
                Plan::Existing(memory) => memory,
            };
            segments.push(reservation.map(offset, &memory)?);
            offset += memory.size();
        }
        for mapping in &segments {
            let location = mapping.memory().location();
            if location.is_host() {
                mapping.set_access(&[Grant { location, access: crate::Access::ReadWrite }])?;
            }
        }
        grant_each(&segments, &grants)?;
        Ok(SegmentedRange { reservation, segments })
    }
}

impl Memory for SegmentedRange {
    fn address(&self) -> DeviceAddress {
        self.address()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn cuda(&self) -> &Cuda {
        self.reservation.cuda()
    }

    fn piece_end(&self, offset: usize) -> usize {
        let index = self.segments.partition_point(|mapping| mapping.offset() + mapping.size() <= offset);
        self.segments.get(index).map_or(self.size(), |mapping| mapping.offset() + mapping.size())
    }
}
