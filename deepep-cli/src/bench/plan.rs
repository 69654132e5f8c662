//! What is measured: settings, each with one buffer, and operations on it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::routing::Pattern;

/// Width of a row, experts of a token, experts in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Elements of a row.
    pub hidden: usize,
    /// Experts of a token.
    pub topk: usize,
    /// Experts of all ranks together.
    pub experts: usize,
}

impl FromStr for Shape {
    type Err = String;

    /// `hidden,topk,experts`.
    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Vec<usize> =
            text.split(',').map(str::parse).collect::<Result<_, _>>().unwrap_or_default();
        match numbers[..] {
            [hidden, topk, experts] if hidden > 0 && topk > 0 && experts >= topk => {
                Ok(Self { hidden, topk, experts })
            }
            _ => Err("expected hidden,topk,experts, such as 7168,8,256, with topk at most experts".into()),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hidden {}, top-{} of {} experts", self.hidden, self.topk, self.experts)
    }
}

/// Where tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Routes {
    /// Generated.
    Pattern(Pattern),
    /// The recorded tokens, all of them, in equal shares.
    Trace,
}

impl fmt::Display for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pattern(pattern) => pattern.fmt(f),
            Self::Trace => f.write_str("trace"),
        }
    }
}

impl From<Routes> for String {
    fn from(routes: Routes) -> Self {
        routes.to_string()
    }
}

impl TryFrom<String> for Routes {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text == "trace" { Ok(Self::Trace) } else { text.parse().map(Self::Pattern) }
    }
}

/// Element type of dispatched rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// E4M3 with a scale for each 128 columns.
    Fp8,
    /// BF16.
    Bf16,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp8 => "FP8",
            Self::Bf16 => "BF16",
        })
    }
}

/// Arrangement of received rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// A row for each received token.
    Plain,
    /// A row for each received token and expert.
    Expanded,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Expanded => "expanded",
        })
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// Dispatch of tokens whose routes are new.
    Dispatch,
    /// Dispatch along the routes of an earlier one.
    Cached,
    /// Combine.
    Combine,
    /// Combine of rows that lie in the heap and are read where they are; plain layout only.
    Pulled,
    /// Dispatch, then combine.
    Pair,
    /// The same, replayed as a CUDA graph.
    Graph,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Dispatch, Self::Cached, Self::Combine, Self::Pulled, Self::Pair, Self::Graph];
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dispatch => "dispatch",
            Self::Cached => "dispatch, cached",
            Self::Combine => "combine",
            Self::Pulled => "combine, pulled",
            Self::Pair => "dispatch + combine",
            Self::Graph => "dispatch + combine, graph",
        })
    }
}

/// One buffer and what goes through it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// Rows and experts.
    pub shape: Shape,
    /// Where tokens go.
    pub routing: Routes,
    /// Tokens of each rank (at most, where ranks differ).
    pub tokens: usize,
    /// Element type of dispatched rows.
    pub dtype: Precision,
    /// Arrangement of received rows.
    pub layout: Layout,
    /// Most multiprocessors that an operation may use; without it the library's choice.
    pub sms: Option<usize>,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, T = {}, {}, {}", self.shape, self.routing, self.tokens, self.dtype, self.layout)?;
        self.sms.map_or(Ok(()), |sms| write!(f, ", {sms} SMs"))
    }
}

/// What to vary.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// Shapes.
    pub shapes: Vec<Shape>,
    /// Numbers of tokens.
    pub tokens: Vec<usize>,
    /// Routings.
    pub routings: Vec<Pattern>,
    /// Element types.
    pub dtypes: Vec<Precision>,
    /// Layouts.
    pub layouts: Vec<Layout>,
    /// Numbers of multiprocessors.
    pub sms: Vec<Option<usize>>,
    /// Everything with everything; otherwise routings and multiprocessors after the first vary at the first shape and `focus` alone.
    pub cross: bool,
    /// Numbers of tokens at which they vary.
    pub focus: Vec<usize>,
    /// Shape and tokens of the trace.
    pub trace: Option<(Shape, usize)>,
}

impl Selection {
    /// All settings, those of one shape, routing and number of multiprocessors one after the other.
    pub fn settings(&self) -> Vec<Setting> {
        let mut all: Vec<Setting> = Vec::new();
        let mut add = |shape: Shape, routing: Routes, tokens: &[usize], sms: &[Option<usize>]| {
            for &sms in sms {
                for &tokens in tokens {
                    for &dtype in &self.dtypes {
                        for &layout in &self.layouts {
                            let setting = Setting { shape, routing, tokens, dtype, layout, sms };
                            if !all.contains(&setting) {
                                all.push(setting);
                            }
                        }
                    }
                }
            }
        };
        let first = |sms: &[Option<usize>]| sms[..sms.len().min(1)].to_vec();
        for (s, &shape) in self.shapes.iter().enumerate() {
            for (r, &routing) in self.routings.iter().enumerate() {
                let routing = Routes::Pattern(routing);
                if self.cross {
                    add(shape, routing, &self.tokens, &self.sms);
                } else if r == 0 {
                    add(shape, routing, &self.tokens, &first(&self.sms));
                    if s == 0 {
                        add(shape, routing, &self.focus, &self.sms);
                    }
                } else if s == 0 {
                    add(shape, routing, &self.focus, &first(&self.sms));
                }
            }
        }
        if let Some((shape, tokens)) = self.trace {
            add(shape, Routes::Trace, &[tokens], &first(&self.sms));
        }
        all
    }

    /// Elements of rows, each number once.
    pub fn hidden(&self) -> Vec<usize> {
        let traced = self.trace.as_ref().map(|(shape, _)| shape);
        let mut all: Vec<usize> = self.shapes.iter().chain(traced).map(|shape| shape.hidden).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Settings by shape, routing and multiprocessors: [`settings`](Self::settings) in pieces.
    pub fn sections(&self) -> Vec<Vec<Setting>> {
        let same = |a: &Setting, b: &Setting| (a.shape, a.routing, a.sms) == (b.shape, b.routing, b.sms);
        self.settings().chunk_by(same).map(<[Setting]>::to_vec).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection() -> Selection {
        let shape = |hidden| Shape { hidden, topk: 2, experts: 8 };
        Selection {
            shapes: vec![shape(64), shape(128)],
            tokens: vec![1, 2, 3],
            routings: vec![Pattern::Uniform, Pattern::Hot],
            dtypes: vec![Precision::Fp8, Precision::Bf16],
            layouts: vec![Layout::Plain, Layout::Expanded],
            sms: vec![None, Some(8)],
            cross: true,
            focus: vec![2],
            trace: None,
        }
    }

    #[test]
    fn everything_with_everything() {
        let settings = selection().settings();
        assert_eq!(settings.len(), 2 * 3 * 2 * 2 * 2 * 2);
        assert_eq!(selection().sections().len(), 2 * 2 * 2);
    }

    #[test]
    fn one_at_a_time() {
        let mut selection = Selection { cross: false, ..selection() };
        let per = 4;
        // T at both shapes, SMs and routings at one T of the first.
        assert_eq!(selection.settings().len(), (3 + 3 + 1 + 1) * per);
        selection.trace = Some((Shape { hidden: 32, topk: 4, experts: 60 }, 9409));
        let sections = selection.sections();
        assert_eq!(selection.hidden(), [32, 64, 128]);
        // T, multiprocessors, routings; T of the other shape; the trace.
        assert_eq!(sections.iter().map(Vec::len).collect::<Vec<_>>(), [3 * per, per, per, 3 * per, per]);
        assert!(sections[4].iter().all(|s| s.routing == Routes::Trace && s.tokens == 9409));
    }

    #[test]
    fn names_round_trip() {
        assert_eq!("7168,8,256".parse(), Ok(Shape { hidden: 7168, topk: 8, experts: 256 }));
        for bad in ["", "7168", "7168,8", "7168,8,x", "7168,8,4", "0,1,1", "1,2,3,4"] {
            assert!(bad.parse::<Shape>().is_err(), "{bad}");
        }
        for routes in [Routes::Trace, Routes::Pattern(Pattern::Zipf(1.5))] {
            let json = serde_json::to_string(&routes).unwrap();
            assert_eq!(serde_json::from_str::<Routes>(&json).unwrap(), routes);
        }
    }
}
