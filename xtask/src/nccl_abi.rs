//! `xtask abi-check`, the part about NCCL: the checked-in files against the headers of six releases, or of all.

use crate::nccl_bindgen::{
    BETWEEN, Common, Nccl, RELEASES, common, generate, layouts as versioned, type_name, unlisted,
};
use crate::nccl_functions::FUNCTIONS;
use crate::wheels::root;
use anyhow::{Context, Result, bail};
use quote::ToTokens;
use std::collections::BTreeMap;

/// Regenerates the bindings and compares every release's declarations with them; with `all` those of the releases in between too.
pub fn check(all_releases: bool) -> Result<()> {
    let mut complaints = Vec::new();
    for (path, text) in generate()? {
        let present = std::fs::read_to_string(root().join(&path)).with_context(|| path.clone())?;
        // By tokens: the checked-in files have been through rustfmt.
        if tokens(&present)? != tokens(&text)? {
            complaints.push(format!("{path} is not what `cargo xtask bindgen` makes"));
        }
    }
    let all = RELEASES.iter().map(common).collect::<Result<Vec<_>>>()?;
    let newest = all.last().context("no release")?;
    for (release, common) in RELEASES.iter().zip(&all) {
        let context = |what: String| format!("NCCL {}: {what}", release.version);
        complaints.extend(differences(common, newest).into_iter().map(context));
        complaints
            .extend(unlisted(release)?.into_iter().map(|name| context(format!("{name} is not listed"))));
        println!(
            "NCCL {}: {} types, {} constants and {} functions compared",
            release.version,
            declarations(common).len(),
            constants(common).len(),
            common.signatures.len()
        );
    }
    if all_releases {
        for between in BETWEEN {
            complaints.extend(strays(between, newest)?);
        }
    } else {
        let rest = BETWEEN.iter().map(|release| release.version).collect::<Vec<_>>().join(", ");
        println!("skipped: NCCL {rest}: compared by `cargo xtask abi-check all`, which fetches their wheels");
    }
    if !complaints.is_empty() {
        bail!("{}", complaints.join("\n"));
    }
    Ok(())
}

/// Where a release is not what its generation's module says: every struct as large as there, or smaller if it only lacks a part that
/// the library does not read, and every field that both have at the same place.
fn strays(release: &Nccl, newest: &Common) -> Result<Vec<String>> {
    let path = format!("nccl-gin-sys/src/layouts/{}.rs", release.module);
    let module = RELEASES.iter().find(|r| r.module == release.module).with_context(|| path.clone())?;
    let of = |release| Ok::<_, anyhow::Error>(places(&versioned(release, newest)?));
    let (theirs, ours) = (of(release)?, of(module)?);
    let mut found = Vec::new();
    let mut same = 0;
    for (what, place) in &theirs {
        match ours.get(what) {
            Some(other) if other == place => same += 1,
            // What is inlined in a device communicator: later releases took its unused tail for a field of their own.
            Some(_) if what.contains("ncclResourceWindow_vidmem") => {}
            // The library is told the size, or reads through a pointer to its own struct.
            Some(other) if what.starts_with("Size of") && !what.ends_with("ncclDevComm") && place < other => {
            }
            Some(other) => {
                found.push(format!("NCCL {}: {what}: {place} there, {other} here", release.version))
            }
            None => {}
        }
    }
    println!("NCCL {}: {same} sizes and offsets are those of {}", release.version, release.module);
    if same == 0 {
        found.push(format!("NCCL {}: nothing to compare with {path}", release.version));
    }
    Ok(found)
}

/// Sizes and offsets by what they are of. The number in the name of a struct's revision is left out.
fn places(items: &[syn::Item]) -> BTreeMap<String, usize> {
    let plain = |what: &str| {
        let what = what.trim_matches(['[', ']', ' ', '"']);
        match (what.find("_v2"), what.find("::")) {
            (Some(from), Some(to)) if from < to => format!("{}{}", &what[..from], &what[to..]),
            (Some(from), None) => what[..from].to_owned(),
            _ => what.to_owned(),
        }
    };
    let number = |text: &str| text.rsplit("- ").next()?.split("usize").next()?.parse().ok();
    let found = layouts(items).into_iter();
    found.filter_map(|(what, text)| Some((plain(&what), number(&text)?))).collect()
}

fn tokens(text: &str) -> Result<String> {
    // rustfmt adds trailing commas and drops them; neither means anything here.
    let text =
        text.parse::<proc_macro2::TokenStream>().map_err(|error| anyhow::anyhow!("{error}"))?.to_string();
    Ok(text.chars().filter(|c| !c.is_whitespace() && *c != ',').collect())
}

/// Each type's name and declaration.
fn declarations(common: &Common) -> BTreeMap<String, String> {
    let named = common.items.iter().filter_map(|item| Some((type_name(item)?, item)));
    named.map(|(name, item)| (name, item.to_token_stream().to_string().replace(',', " ,"))).collect()
}

/// Constants: macros by their name, enumerators as `type::name`.
fn constants(common: &Common) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for item in &common.items {
        match item {
            syn::Item::Const(item) if item.ident != "_" => {
                found.insert(item.ident.to_string(), item.expr.to_token_stream().to_string());
            }
            syn::Item::Impl(block) if block.trait_.is_none() => {
                let ty = block.self_ty.to_token_stream().to_string();
                for item in &block.items {
                    if let syn::ImplItem::Const(item) = item {
                        found
                            .insert(format!("{ty}::{}", item.ident), item.expr.to_token_stream().to_string());
                    }
                }
            }
            _ => {}
        }
    }
    found
}

/// Sizes and offsets, which the assertions beside each struct hold.
fn layouts(items: &[syn::Item]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for item in items {
        let syn::Item::Const(item) = item else { continue };
        let syn::Expr::Block(block) = &*item.expr else { continue };
        for statement in &block.block.stmts {
            let syn::Stmt::Expr(syn::Expr::Index(index), _) = statement else { continue };
            found.insert(index.expr.to_token_stream().to_string(), index.index.to_token_stream().to_string());
        }
    }
    found
}

/// Counts of enumerators, which grow.
const COUNTS: [&str; 4] = ["NumResults", "NumOps", "NumTypes", "MAX_TYPES"];

/// Types that differ between releases in names alone: the second word of this handle is unused from 2.29 on.
const RENAMED_FIELDS: [&str; 1] = ["ncclGinBarrierHandle"];

/// Types that only grew at their end, and whose callers hand out the whole of them: 2.28.3 knows four fields of the one, and neither reads
/// nor writes behind them.
const GREW: [&str; 1] = ["ncclDevResourceRequirements"];

/// A declaration without the `_t` of C's typedefs, which releases use or not for the same type.
fn plain(text: &str) -> String {
    let words = text.split(' ').map(|word| match word.strip_suffix("_t") {
        Some(stem) if word.starts_with("nccl") => stem,
        _ => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Whether a struct's declaration is the start of another one's.
fn starts(old: &str, new: &str) -> bool {
    plain(new).starts_with(plain(old).trim_end_matches(['}', ',', ' ']))
}

/// What a release declares otherwise than the newest one.
fn differences(old: &Common, newest: &Common) -> Vec<String> {
    let mut found = Vec::new();
    let mut compare = |kind: &str, old: BTreeMap<String, String>, new: BTreeMap<String, String>| {
        for (name, text) in old {
            match new.get(&name) {
                Some(other) if plain(other) == plain(&text) => {}
                _ if COUNTS.iter().any(|count| name.ends_with(count)) => {}
                Some(other) if GREW.contains(&name.as_str()) && starts(&text, other) => {}
                Some(_) if GREW.iter().any(|ty| name == format!("[\"Size of {ty}\"]")) => {}
                _ if RENAMED_FIELDS.iter().any(|ty| name.contains(ty) && kind != "constant") => {}
                Some(other) => found.push(format!("{kind} {name} is {text}, in the newest release {other}")),
                None => found.push(format!("{kind} {name} is gone from the newest release")),
            }
        }
    };
    compare("type", declarations(old), declarations(newest));
    compare("constant", constants(old), constants(newest));
    compare("layout", layouts(&old.items), layouts(&newest.items));
    let signatures = |common: &Common| {
        let listed =
            FUNCTIONS.iter().filter_map(|f| Some((f.name.to_owned(), common.signatures.get(f.name)?)));
        listed.map(|(name, signature)| (name, shape(signature))).collect()
    };
    compare("function", signatures(old), signatures(newest));
    found
}

/// Types of a function, without its arguments' names.
fn shape(signature: &syn::Signature) -> String {
    let mut text = String::new();
    for argument in &signature.inputs {
        if let syn::FnArg::Typed(argument) = argument {
            text.push_str(&argument.ty.to_token_stream().to_string());
            text.push_str(" , ");
        }
    }
    text + &signature.output.to_token_stream().to_string()
}
