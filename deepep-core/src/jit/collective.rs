//! The collectives' kernels, in the variants that are compiled separately.

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// Every rank gets the values of all.
    AllGather,
    /// Every rank gets its part of the sum.
    ReduceScatter,
    /// Every rank gets the sum.
    AllReduce,
}

/// What is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// FP32.
    F32,
    /// BF16, added in FP32 and rounded once.
    Bf16,
    /// FP16, added in FP32 and rounded once.
    F16,
}

impl Element {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Bytes of one.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// How values travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// In cells that say themselves when they are there: small values.
    Cells,
    /// Through stages; an all-reduce reads everything from everybody.
    OneShot,
    /// Through stages; each rank sums one part and gives it to all. All-reduce only.
    TwoShot,
}

/// A collective's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// Which one.
    pub kind: CollectiveKind,
    /// Ranks of the domain, 2 or more.
    pub ranks: usize,
    /// How values travel.
    pub way: Way,
    /// What is added; without meaning for an all-gather, which moves bytes.
    pub element: Element,
    /// Through a multicast address rather than the peers' addresses.
    pub multicast: bool,
}

impl Collective {
    /// Every variant that makes a difference, for a number of ranks.
    pub(super) fn all(ranks: usize) -> Vec<Self> {
        use CollectiveKind as Kind;
        let mut all = Vec::new();
        for multicast in [false, true] {
            for way in [Way::Cells, Way::OneShot] {
                let (kind, element) = (Kind::AllGather, Element::F32);
                all.push(Self { kind, ranks, way, element, multicast });
            }
            for element in Element::ALL {
                // In cells each rank gets other values: there is nothing to send to all.
                if !multicast {
                    let (kind, way) = (Kind::ReduceScatter, Way::Cells);
                    all.push(Self { kind, ranks, way, element, multicast });
                }
                let (kind, way) = (Kind::ReduceScatter, Way::OneShot);
                all.push(Self { kind, ranks, way, element, multicast });
                for way in [Way::Cells, Way::OneShot, Way::TwoShot] {
                    all.push(Self { kind: Kind::AllReduce, ranks, way, element, multicast });
                }
            }
        }
        all
    }

    pub(super) const fn entry(&self) -> &'static str {
        match self.kind {
            CollectiveKind::AllGather => "deepep_all_gather",
            CollectiveKind::ReduceScatter => "deepep_reduce_scatter",
            CollectiveKind::AllReduce => "deepep_all_reduce",
        }
    }

    pub(super) const fn source(&self) -> &'static str {
        match self.kind {
            CollectiveKind::AllGather => include_str!("../../kernels/ops/all_gather.cu"),
            CollectiveKind::ReduceScatter => include_str!("../../kernels/ops/reduce_scatter.cu"),
            CollectiveKind::AllReduce => include_str!("../../kernels/ops/all_reduce.cu"),
        }
    }

    /// What the variant fixes, for the generated header.
    pub(super) fn constants(&self) -> String {
        let (cells, two_shot) = (self.way == Way::Cells, self.way == Way::TwoShot);
        let element = match self.element {
            Element::F32 => "ELEMENT_F32",
            Element::Bf16 => "ELEMENT_BF16",
            Element::F16 => "ELEMENT_F16",
        };
        let elements = "constexpr u32 ELEMENT_F32 = 1, ELEMENT_BF16 = 2, ELEMENT_F16 = 3;";
        let multicast = self.multicast;
        format!(
            "constexpr bool CELLS = {cells}, TWO_SHOT = {two_shot}, MULTICAST = {multicast};\n{elements}\nconstexpr u32 ELEMENT = {element};"
        )
    }
}
