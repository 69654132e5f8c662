//! Recorded routing: JSON lines as inference engines log it, and safetensors.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use deepep_core::tensor::DType;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::routing::Routing;

/// A trace can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file can't be read.
    #[error("reading {path}: {cause}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What came back.
        cause: std::io::Error,
    },
    /// A line is broken.
    #[error("{path}, line {line}: {problem}")]
    Line {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// The file as a whole is not usable.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// Rows recorded along with the routing.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// Element type.
    pub dtype: DType,
    /// Elements of a row.
    pub hidden: usize,
    /// All rows, one after the other.
    pub bytes: Vec<u8>,
}

/// Routing of one layer, as recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Choices of all tokens, in the order of the file.
    pub routing: Routing,
    /// Number of experts, from the file or else the highest id plus one.
    pub experts: usize,
    /// Elements of a row, if the file says so.
    pub hidden: Option<usize>,
    /// Name of the model, if the file says so.
    pub model: Option<String>,
    /// Recorded rows, if there are any.
    pub rows: Option<Rows>,
}

impl Trace {
    /// Reads a trace; the name's ending says which kind: `.safetensors`, else JSON lines. `layer` picks one of several recorded
    /// layers, without it the first.
    ///
    /// # Errors
    /// [`TraceError`], with the line for JSON lines.
    pub fn read(path: &Path, layer: Option<i64>) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|cause| TraceError::Io { path: path.into(), cause })?;
        if path.extension().is_some_and(|e| e == "safetensors") {
            read_safetensors(file, path)
        } else {
            read_lines(BufReader::new(file), path, layer)
        }
    }

    /// The tokens of one of `ranks` ranks: equal consecutive shares.
    pub fn share(&self, rank: usize, ranks: usize) -> Routing {
        let (first, end) = self.share_range(rank, ranks);
        let k = self.routing.topk;
        Routing {
            topk: k,
            experts: self.routing.experts[first * k..end * k].to_vec(),
            weights: self.routing.weights[first * k..end * k].to_vec(),
        }
    }

    /// First token of a rank's share, and the first after it.
    pub fn share_range(&self, rank: usize, ranks: usize) -> (usize, usize) {
        let n = self.routing.tokens();
        (n * rank / ranks, n * (rank + 1) / ranks)
    }
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Line {
    Meta {
        model_id: Option<String>,
        top_k: Option<usize>,
        num_experts: Option<usize>,
        hidden: Option<usize>,
    },
    Route {
        layer: Option<i64>,
        topk_ids: Vec<i64>,
        topk_weights: Option<Vec<f32>>,
    },
    #[serde(other)]
    Other,
}

fn read_lines(input: impl BufRead, path: &Path, layer: Option<i64>) -> Result<Trace, TraceError> {
    let mut trace = Trace { routing: Routing::default(), experts: 0, hidden: None, model: None, rows: None };
    let (mut layer, mut topk, mut experts) = (layer, None, None);
    for (number, line) in input.lines().enumerate() {
        let broken = |problem: String| TraceError::Line { path: path.into(), line: number + 1, problem };
        let line = line.map_err(|e| broken(e.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        match serde_json::from_str(&line).map_err(|e| broken(e.to_string()))? {
            Line::Meta { model_id, top_k, num_experts, hidden } => {
                (topk, experts) = (topk.or(top_k), experts.or(num_experts));
                trace.hidden = trace.hidden.or(hidden);
                trace.model = trace.model.or(model_id);
            }
            Line::Route { layer: of, topk_ids, topk_weights } => {
                if of.is_some() && *layer.get_or_insert(of.unwrap_or_default()) != of.unwrap_or_default() {
                    continue;
                }
                let k = *topk.get_or_insert(topk_ids.len());
                if topk_ids.len() != k || k == 0 {
                    return Err(broken(format!("{} experts, expected {k}", topk_ids.len())));
                }
                if let Some(&e) = topk_ids.iter().find(|&&e| e < -1 || experts.is_some_and(|n| e >= n as i64))
                {
                    return Err(broken(format!(
                        "expert {e} is not in -1..{}",
                        experts.unwrap_or(usize::MAX)
                    )));
                }
                let duplicate = |i: usize| topk_ids[i] >= 0 && topk_ids[..i].contains(&topk_ids[i]);
                if let Some(i) = (0..k).find(|&i| duplicate(i)) {
                    return Err(broken(format!("expert {} is chosen twice", topk_ids[i])));
                }
                let weights = topk_weights.unwrap_or_else(|| vec![1.0 / k as f32; k]);
                if weights.len() != k || weights.iter().any(|w| !w.is_finite()) {
                    return Err(broken(format!("weights {weights:?} are not {k} finite numbers")));
                }
                trace.routing.topk = k;
                trace.routing.experts.extend(topk_ids);
                trace.routing.weights.extend(weights);
            }
            Line::Other => {}
        }
    }
    finish(trace, experts, path)
}

fn finish(mut trace: Trace, experts: Option<usize>, path: &Path) -> Result<Trace, TraceError> {
    if trace.routing.tokens() == 0 {
        let problem = "no token of the wanted layer is in it".into();
        return Err(TraceError::File { path: path.into(), problem });
    }
    let highest = trace.routing.experts.iter().max().copied().unwrap_or(-1);
    trace.experts = experts.unwrap_or(usize::try_from(highest).map_or(1, |highest| highest + 1));
    Ok(trace)
}

fn read_safetensors(mut file: File, path: &Path) -> Result<Trace, TraceError> {
    let bad = |problem: String| TraceError::File { path: path.into(), problem };
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|cause| TraceError::Io { path: path.into(), cause })?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| bad(e.to_string()))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| bad(e.to_string()))?;
    let told = |key: &str| header.metadata().as_ref().and_then(|m| m.get(key)).map(String::as_str);
    let matrix = |name: &str| {
        let tensor = tensors.tensor(name).map_err(|e| bad(format!("{name}: {e}")))?;
        match *tensor.shape() {
            [rows, columns] if columns > 0 => Ok((tensor, rows, columns)),
            ref shape => Err(bad(format!("{name} has shape {shape:?}, expected two dimensions"))),
        }
    };

    let (idx, tokens, topk) = matrix("topk_idx")?;
    let experts: Vec<i64> = match idx.dtype() {
        Dtype::I64 => words(idx.data(), i64::from_le_bytes),
        Dtype::I32 => words(idx.data(), |b| i64::from(i32::from_le_bytes(b))),
        other => return Err(bad(format!("topk_idx is {other:?}, expected I32 or I64"))),
    };
    let count = match told("num_experts").map(str::parse::<usize>) {
        Some(Err(_)) => return Err(bad("num_experts in the metadata is not a number".into())),
        Some(Ok(n)) => Some(n),
        None => None,
    };
    for (i, &e) in experts.iter().enumerate() {
        let (token, lane) = (i / topk, i % topk);
        if e < -1 || count.is_some_and(|n| e >= n as i64) {
            return Err(bad(format!("topk_idx[{token}][{lane}] = {e} is not an expert")));
        }
        if e >= 0 && experts[token * topk..i].contains(&e) {
            return Err(bad(format!("topk_idx[{token}] chooses expert {e} twice")));
        }
    }
    let weights = if tensors.tensor("topk_weights").is_ok() {
        let (tensor, rows, columns) = matrix("topk_weights")?;
        if (rows, columns) != (tokens, topk) {
            return Err(bad(format!("topk_weights is [{rows}, {columns}], topk_idx [{tokens}, {topk}]")));
        }
        match tensor.dtype() {
            Dtype::F32 => words(tensor.data(), f32::from_le_bytes),
            Dtype::BF16 => words(tensor.data(), |b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => words(tensor.data(), |b| f16::from_le_bytes(b).to_f32()),
            other => return Err(bad(format!("topk_weights is {other:?}, expected F32, BF16 or F16"))),
        }
    } else {
        vec![1.0 / topk as f32; tokens * topk]
    };
    let rows = if tensors.tensor("x").is_ok() {
        let (tensor, rows, hidden) = matrix("x")?;
        if rows != tokens {
            return Err(bad(format!("x has {rows} rows, topk_idx {tokens}")));
        }
        let dtype = match tensor.dtype() {
            Dtype::BF16 => DType::Bf16,
            Dtype::F16 => DType::F16,
            Dtype::F32 => DType::F32,
            other => return Err(bad(format!("x is {other:?}, expected BF16, F16 or F32"))),
        };
        Some(Rows { dtype, hidden, bytes: tensor.data().to_vec() })
    } else {
        None
    };
    let trace = Trace {
        routing: Routing { topk, experts, weights },
        experts: 0,
        hidden: rows.as_ref().map(|r| r.hidden),
        model: told("model_id").map(str::to_owned),
        rows,
    };
    finish(trace, count, path)
}

fn words<const N: usize, T>(bytes: &[u8], convert: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&b| convert(b)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use safetensors::tensor::TensorView;

    use super::*;

    const META: &str = r#"{"type": "meta", "model_id": "m", "top_k": 2, "num_experts": 6, "hidden": 64}"#;

    fn lines(text: &str) -> Result<Trace, TraceError> {
        read_lines(text.as_bytes(), Path::new("t.jsonl"), None)
    }

    fn route(layer: i64, ids: &str) -> String {
        format!(r#"{{"type": "route", "layer": {layer}, "topk_ids": {ids}, "topk_weights": [0.5, 0.25]}}"#)
    }

    #[test]
    fn lines_of_one_layer() {
        let text = [META.into(), route(3, "[1, 5]"), String::new(), route(4, "[0, 1]"), route(3, "[2, -1]")];
        let trace = lines(&text.join("\n")).unwrap();
        assert_eq!(trace.routing.experts, [1, 5, 2, -1]);
        assert_eq!(trace.routing.weights, [0.5, 0.25, 0.5, 0.25]);
        assert_eq!((trace.experts, trace.hidden, trace.model.as_deref()), (6, Some(64), Some("m")));
        let fourth = read_lines(text.join("\n").as_bytes(), Path::new("t"), Some(4)).unwrap();
        assert_eq!(fourth.routing.experts, [0, 1]);
        assert!(matches!(read_lines(META.as_bytes(), Path::new("t"), None), Err(TraceError::File { .. })));
    }

    #[test]
    fn a_broken_line_is_named() {
        for bad in [
            "{".to_owned(),
            "[1]".to_owned(),
            route(0, "[1]"),
            route(0, "[1, 6]"),
            route(0, "[1, -2]"),
            route(0, "[3, 3]"),
            route(0, "[1, \"x\"]"),
            r#"{"type": "route", "topk_ids": [1, 2], "topk_weights": [1.0]}"#.to_owned(),
            r#"{"type": "route", "topk_ids": [1, 2], "topk_weights": [1.0, 1e99]}"#.to_owned(),
        ] {
            let text = [META.to_owned(), route(0, "[0, 1]"), bad.clone(), route(0, "[2, 3]")].join("\n");
            let error = lines(&text).unwrap_err();
            assert!(matches!(error, TraceError::Line { line: 3, .. }), "{bad}: {error}");
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        let text: Vec<String> = (0..11).map(|i| route(0, &format!("[{i}, {}]", i + 1))).collect();
        let trace = lines(&text.join("\n")).unwrap();
        assert_eq!(trace.experts, 12);
        let all: Vec<i64> = (0..4).flat_map(|r| trace.share(r, 4).experts).collect();
        assert_eq!(all, trace.routing.experts);
    }

    fn safetensors(
        tensors: Vec<(&str, Dtype, Vec<usize>, Vec<u8>)>,
        experts: &str,
    ) -> Result<Trace, TraceError> {
        let views: Vec<_> = tensors
            .iter()
            .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()))
            .collect();
        let meta = HashMap::from([("num_experts".to_owned(), experts.to_owned())]);
        let bytes = safetensors::serialize(views, Some(meta)).unwrap();
        let path = tempfile::Builder::new().suffix(".safetensors").tempfile().unwrap();
        std::fs::write(path.path(), bytes).unwrap();
        Trace::read(path.path(), None)
    }

    fn ids(ids: &[i64]) -> Vec<u8> {
        ids.iter().flat_map(|i| i.to_le_bytes()).collect()
    }

    #[test]
    fn safetensors_with_and_without_rows() {
        let weights: Vec<u8> = [0.5f32, 0.5, 0.25, 0.0].iter().flat_map(|w| w.to_le_bytes()).collect();
        let trace = safetensors(
            vec![
                ("topk_idx", Dtype::I64, vec![2, 2], ids(&[3, 1, 7, -1])),
                ("topk_weights", Dtype::F32, vec![2, 2], weights),
                ("x", Dtype::BF16, vec![2, 8], (0..32).collect()),
            ],
            "8",
        )
        .unwrap();
        assert_eq!(trace.routing.experts, [3, 1, 7, -1]);
        assert_eq!(trace.routing.weights, [0.5, 0.5, 0.25, 0.0]);
        assert_eq!((trace.experts, trace.hidden), (8, Some(8)));
        assert_eq!(trace.rows.unwrap().bytes, (0..32).collect::<Vec<u8>>());
        let bare = safetensors(vec![("topk_idx", Dtype::I64, vec![1, 2], ids(&[3, 1]))], "4").unwrap();
        assert_eq!(bare.routing.weights, [0.5, 0.5]);
    }

    #[test]
    fn safetensors_that_can_not_be_used() {
        for (tensors, experts) in [
            (vec![("x", Dtype::BF16, vec![1, 2], vec![0; 4])], "4"),
            (vec![("topk_idx", Dtype::F64, vec![1, 1], ids(&[0]))], "4"),
            (vec![("topk_idx", Dtype::I64, vec![2], ids(&[0, 1]))], "4"),
            (vec![("topk_idx", Dtype::I64, vec![1, 2], ids(&[0, 4]))], "4"),
            (vec![("topk_idx", Dtype::I64, vec![1, 2], ids(&[1, 1]))], "4"),
            (vec![("topk_idx", Dtype::I64, vec![1, 2], ids(&[0, 1]))], "many"),
            (
                vec![
                    ("topk_idx", Dtype::I64, vec![1, 2], ids(&[0, 1])),
                    ("x", Dtype::BF16, vec![2, 2], vec![0; 8]),
                ],
                "4",
            ),
        ] {
            let error = safetensors(tensors, experts).unwrap_err();
            assert!(matches!(error, TraceError::File { .. }), "{error}");
        }
    }
}
