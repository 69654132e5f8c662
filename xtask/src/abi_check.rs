//! `xtask abi-check`: the checked-in bindings against what several versions of NVIDIA's headers declare.
//!
//! First the generated files must come out of the generator as they are checked in. Then every fact in them (size, alignment and offset
//! of each field, value of each constant, target of each alias, signature of each function) must hold in every version of the
//! headers that has the thing at all.

use crate::bindgen::{Parsed, files, need_libclang, parse};
use crate::cuda_functions::FUNCTIONS;
use crate::wheels::{CUDA_HEADERS, CudaHeaders, root};
use anyhow::{Context, Result, bail};
use quote::ToTokens;
use std::collections::BTreeMap;

/// Facts that differ between versions, and why that is right.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("offset CUmemLocation_st::id", "inside an anonymous union since 13.2, at the same place"),
    ("field CUmemLocation_st::id", "inside an anonymous union since 13.2, with the same type"),
    ("constant CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX", "counts the attributes of one version"),
    ("constant CUjit_option_enum::CU_JIT_NUM_OPTIONS", "counts the options of one version"),
    ("constant CUlibraryOption_enum::CU_LIBRARY_NUM_OPTIONS", "counts the options of one version"),
    ("constant CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX", "counts the attributes of one version"),
];

/// Runs the check; with `all_releases` over the NCCL releases in between too.
pub fn check(all_releases: bool) -> Result<()> {
    need_libclang()?;
    for (path, fresh) in files()? {
        let here = std::fs::read_to_string(root().join(path)).with_context(|| path.to_owned())?;
        if here != fresh {
            bail!(
                "{path} is not what the generator makes: run `cargo xtask bindgen` and look at the difference"
            );
        }
        println!("abi-check: {path} is what the generator makes");
    }
    let ours = facts(&parse(&CUDA_HEADERS[0])?.items);
    let newest = parse(CUDA_HEADERS.last().expect("the list is not empty"))?;
    for headers in CUDA_HEADERS {
        compare(headers, &ours, &newest)?;
    }
    crate::nccl_abi::check(all_releases)
}

fn compare(headers: &CudaHeaders, ours: &BTreeMap<String, String>, newest: &Parsed) -> Result<()> {
    let theirs = parse(headers)?;
    let their_facts = facts(&theirs.items);
    let (mut same, mut newer, mut wrong) = (0, 0, Vec::new());
    for (key, value) in ours {
        match their_facts.get(key) {
            Some(theirs) if theirs == value => same += 1,
            _ if EXCEPTIONS.iter().any(|(name, _)| name == key) => {}
            Some(theirs) => wrong.push(format!("{key}: {value} here, {theirs} there")),
            None if headers.cuda < CUDA_HEADERS[0].cuda => newer += 1,
            None => wrong.push(format!("{key}: not there")),
        }
    }
    let (mut functions, mut later) = (0, 0);
    for function in FUNCTIONS {
        let key = format!("PFN_{}_v{}", function.name, function.since);
        let ours = newest.signatures.get(&key).map(|s| s.to_token_stream().to_string());
        match theirs.signatures.get(&key).map(|s| s.to_token_stream().to_string()) {
            theirs if theirs == ours => functions += 1,
            None if function.since > headers.cuda => later += 1,
            theirs => wrong.push(format!("{key}: {ours:?} here, {theirs:?} there")),
        }
    }
    println!(
        "abi-check: CUDA headers {}: {same} facts and {functions} signatures agree, {} not in that version, {} wrong",
        headers.version,
        newer + later,
        wrong.len()
    );
    if !wrong.is_empty() {
        bail!("CUDA headers {}:\n  {}", headers.version, wrong.join("\n  "));
    }
    Ok(())
}

/// What a set of items says, as comparable strings.
fn facts(items: &[syn::Item]) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    for item in items {
        match item {
            // bindgen's layout tests: `["Size of X"][size_of::<X>() - 8usize];`
            syn::Item::Const(constant) if constant.ident == "_" => {
                layouts(&constant.expr.to_token_stream().to_string(), &mut facts);
            }
            syn::Item::Const(constant) => {
                facts.insert(
                    format!("constant {}", constant.ident),
                    constant.expr.to_token_stream().to_string(),
                );
            }
            syn::Item::Type(alias) => {
                facts.insert(format!("alias {}", alias.ident), alias.ty.to_token_stream().to_string());
            }
            syn::Item::Struct(structure) => {
                for field in &structure.fields {
                    if let Some(name) = &field.ident {
                        let key = format!("field {}::{name}", structure.ident);
                        facts.insert(key, field.ty.to_token_stream().to_string());
                    }
                }
            }
            syn::Item::Impl(block) if block.trait_.is_none() => {
                let of = block.self_ty.to_token_stream().to_string();
                for member in &block.items {
                    if let syn::ImplItem::Const(constant) = member {
                        let key = format!("constant {of}::{}", constant.ident);
                        facts.insert(key, constant.expr.to_token_stream().to_string());
                    }
                }
            }
            _ => {}
        }
    }
    facts
}

/// Reads the sizes, alignments and offsets that bindgen asserts of one type.
fn layouts(block: &str, facts: &mut BTreeMap<String, String>) {
    for part in block.split("[\"").skip(1) {
        let Some((what, rest)) = part.split_once('"') else { continue };
        let value = rest.rsplit_once("- ").and_then(|(_, v)| v.split_once("usize")).map_or("", |(v, _)| v);
        let key = what
            .replace("Size of ", "size ")
            .replace("Alignment of ", "alignment ")
            .replace("Offset of field: ", "offset ");
        facts.insert(key, value.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_tell_layouts_constants_and_aliases_apart() {
        let text = r#"
            pub type A = u32;
            pub struct S { pub x: i32 }
            const _: () = {
                ["Size of S"][::core::mem::size_of::<S>() - 8usize];
                ["Offset of field: S::x"][::core::mem::offset_of!(S, x) - 4usize];
            };
            impl E { pub const ONE: E = E(1); }
        "#;
        let facts = facts(&syn::parse_file(text).unwrap().items);
        let expected = [
            ("alias A", "u32"),
            ("constant E::ONE", "E (1)"),
            ("field S::x", "i32"),
            ("offset S::x", "4"),
            ("size S", "8"),
        ];
        let expected: BTreeMap<_, _> = expected.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect();
        assert_eq!(facts, expected);
    }
}
