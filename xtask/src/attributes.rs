//! When each device attribute appeared: a table of `cuda-vmm-emu`, generated from one header of each CUDA release.

use crate::bindgen::NOTE;
use crate::wheels::wheel;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The table's file, below the root.
pub const FILE: &str = "cuda-vmm-emu/src/attributes.rs";

/// One release each of CUDA: its version as `CUDA_VERSION` counts, and the runtime's wheel of it. Oldest first.
const RELEASES: [(u32, &str); 15] = [
    (12_000, "12.0.146"),
    (12_010, "12.1.105"),
    (12_020, "12.2.140"),
    (12_030, "12.3.101"),
    (12_040, "12.4.127"),
    (12_050, "12.5.82"),
    (12_060, "12.6.77"),
    (12_080, "12.8.90"),
    (12_090, "12.9.79"),
    (13_000, "13.0.96"),
    (13_010, "13.1.80"),
    (13_020, "13.2.86"),
    (13_030, "13.3.29"),
    (13_040, "13.4.92"),
    (13_050, "13.5.37"),
];

/// Attributes by number, as one `cuda.h` declares them. Several names may stand for one number.
fn declared(header: &str) -> Result<BTreeMap<u32, String>> {
    let (_, rest) = header.split_once("typedef enum CUdevice_attribute_enum {").context("no attributes")?;
    let (list, _) = rest.split_once("} CUdevice_attribute").context("the attributes do not end")?;
    let mut found = BTreeMap::new();
    for line in list.lines() {
        let Some((name, rest)) = line.trim().split_once('=') else { continue };
        let name = name.trim();
        // The last one counts the others.
        if !name.starts_with("CU_DEVICE_ATTRIBUTE_") || name == "CU_DEVICE_ATTRIBUTE_MAX" {
            continue;
        }
        let digits: String = rest.trim().chars().take_while(char::is_ascii_digit).collect();
        let number = digits.parse().with_context(|| format!("the number of {name}"))?;
        found.entry(number).or_insert_with(|| name.to_owned());
    }
    Ok(found)
}

/// The first release of each attribute that some release lacks, and its name there.
fn introduced(headers: &[(u32, String)]) -> Result<BTreeMap<u32, (u32, String)>> {
    let mut first = BTreeMap::new();
    let mut before = BTreeMap::new();
    for (version, header) in headers {
        let here = declared(header)?;
        if let Some((number, name)) = before.iter().find(|(number, _)| !here.contains_key(number)) {
            bail!("CUDA {version} has lost attribute {number}, {name}");
        }
        for (number, name) in &here {
            first.entry(*number).or_insert_with(|| (*version, name.clone()));
        }
        before = here;
    }
    let oldest = headers.first().context("no headers")?.0;
    first.retain(|_, (version, _)| *version > oldest);
    Ok(first)
}

/// The table's file.
pub fn generate() -> Result<String> {
    let mut headers = Vec::new();
    for (version, release) in RELEASES {
        let (name, include) = if version < 13_000 {
            ("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/include")
        } else {
            ("nvidia-cuda-runtime", "nvidia/cu13/include")
        };
        let file = wheel(name, release)?.join(include).join("cuda.h");
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        if !text.contains(&format!("#define CUDA_VERSION {version}")) {
            bail!("{} is not of CUDA {version}", file.display());
        }
        headers.push((version, text));
    }
    let (oldest, newest) = (RELEASES[0].1, RELEASES[RELEASES.len() - 1].1);
    let mut text = format!(
        "{NOTE}\n//! When device attributes appeared, from the headers of CUDA {oldest} to {newest}.\n"
    );
    text.push_str(
        "\n/// CUDA version that introduced an attribute, by the attribute's number. Attributes that are not here are older than all of them.\n\
         pub(crate) const INTRODUCED: &[(u32, i32)] = &[\n",
    );
    for (number, (version, name)) in introduced(&headers)? {
        let name = name.trim_start_matches("CU_DEVICE_ATTRIBUTE_").to_lowercase().replace('_', " ");
        writeln!(text, "    ({number}, {version}), // {name}").expect("a string");
    }
    text.push_str("];\n");
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(lines: &str) -> String {
        format!("x\ntypedef enum CUdevice_attribute_enum {{\n{lines}\n}} CUdevice_attribute;\n")
    }

    #[test]
    fn attributes_count_from_their_first_release() {
        let old = header("CU_DEVICE_ATTRIBUTE_A = 1, /**< text = 7 */\nCU_DEVICE_ATTRIBUTE_MAX");
        let new = header(
            "CU_DEVICE_ATTRIBUTE_A = 1,\nCU_DEVICE_ATTRIBUTE_B = 5,\nCU_DEVICE_ATTRIBUTE_OLD_B = 5,\nCU_DEVICE_ATTRIBUTE_MAX = 6",
        );
        let found = introduced(&[(1, old.clone()), (2, new.clone()), (3, new.clone())]).unwrap();
        assert_eq!(found, BTreeMap::from([(5, (2, "CU_DEVICE_ATTRIBUTE_B".to_owned()))]));
        assert!(introduced(&[(1, new), (2, old)]).unwrap_err().to_string().contains("lost attribute 5"));
        assert!(declared("no such list").is_err());
    }
}
