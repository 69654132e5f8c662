//! The checked-in types, layouts and function list of `nccl-gin-sys`, generated from the headers in NCCL's wheels.

use crate::bindgen::{NOTE, compiler_headers, need_libclang};
use crate::nccl_functions::{EXTRA_TYPES, FUNCTIONS, LEFT_OUT, MACROS, VERSIONED, VERSIONED_PARTS};
use crate::wheels::{root, wheel};
use anyhow::{Context, Result, bail};
use quote::ToTokens;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

/// One NCCL release whose wheel the crates are checked against.
pub struct Nccl {
    /// Version of the wheel.
    pub version: &'static str,
    /// `NCCL_VERSION_CODE` of its headers.
    pub code: u32,
    /// Module of `nccl-gin-sys` with its generation's layouts.
    pub module: &'static str,
}

impl Nccl {
    /// Folder with `nccl.h`, downloaded if need be.
    pub fn include(&self) -> Result<PathBuf> {
        Ok(wheel("nvidia-nccl-cu13", self.version)?.join("nvidia/nccl/include"))
    }
}

const fn nccl(version: &'static str, code: u32, module: &'static str) -> Nccl {
    Nccl { version, code, module }
}

/// One release a generation, oldest first.
pub const RELEASES: &[Nccl] = &[
    nccl("2.28.3", 22803, "v2_28_3"),
    nccl("2.28.9", 22809, "v2_28"),
    nccl("2.29.7", 22907, "v2_29"),
    nccl("2.30.7", 23007, "v2_30"),
    nccl("2.31.2", 23102, "v2_31"),
    nccl("2.32.3", 23203, "v2_32"),
];

/// Other releases that the crates talk to in the layouts of a generation above. `xtask abi-check all` compares them; they are large, so
/// that CI does without.
pub const BETWEEN: &[Nccl] =
    &[nccl("2.28.7", 22807, "v2_28"), nccl("2.30.3", 23003, "v2_30"), nccl("2.30.4", 23004, "v2_30")];

/// CUDA's headers, as NCCL's include them: wheel, version, folder inside it.
const CUDA_WHEELS: [(&str, &str, &str); 3] = [
    ("nvidia-cuda-runtime", "13.0.96", "nvidia/cu13/include"),
    ("nvidia-cuda-crt", "13.0.88", "nvidia/cu13/include"),
    ("nvidia-cuda-cccl", "13.0.85", "nvidia/cu13/include/cccl"),
];

/// Downloads what the tests load and compile with: every release's library and headers, CUDA's headers, and NVRTC.
pub fn fetch() -> Result<()> {
    RELEASES.iter().try_for_each(|release| release.include().map(drop))?;
    CUDA_WHEELS.iter().try_for_each(|(name, version, _)| wheel(name, version).map(drop))?;
    wheel("nvidia-cuda-nvrtc", "13.0.88").map(drop)
}

/// Structs that are only pointed to.
const ONLY_POINTED_TO: &[&str] = &["ncclSegmentWindow", "ncclDevCommWindowTable"];

fn builder(release: &Nccl) -> Result<bindgen::Builder> {
    need_libclang()?;
    let mut include = vec![release.include()?];
    for (name, version, folder) in CUDA_WHEELS {
        include.push(wheel(name, version)?.join(folder));
    }
    let mut builder = crate::bindgen::builder()
        .header_contents("wrapper.hpp", "#include <nccl.h>\n#include <nccl_device.h>\n")
        .clang_args(["-x", "c++", "-std=c++17", "-idirafter", &compiler_headers()?]);
    for folder in include {
        builder = builder.clang_args(["-isystem", folder.to_str().context("path is not UTF-8")?]);
    }
    for name in ONLY_POINTED_TO {
        builder = builder.blocklist_type(name);
    }
    Ok(builder)
}

fn items(builder: bindgen::Builder) -> Result<Vec<syn::Item>> {
    let text = builder.generate().context("bindgen failed")?.to_string();
    Ok(syn::parse_file(&text)?.items)
}

/// What all generations share, as one release's headers declare it.
pub struct Common {
    /// Types and constants, in the headers' order.
    pub items: Vec<syn::Item>,
    /// Function name → its declaration.
    pub signatures: BTreeMap<String, syn::Signature>,
}

/// Parses the types and functions that all generations share.
pub fn common(release: &Nccl) -> Result<Common> {
    let mut builder = builder(release)?;
    for function in FUNCTIONS {
        builder = builder.allowlist_function(function.name);
    }
    for name in EXTRA_TYPES {
        builder = builder.allowlist_type(name);
    }
    for name in MACROS {
        builder = builder.allowlist_var(name);
    }
    for (pattern, name) in VERSIONED {
        builder = builder.blocklist_type(pattern).blocklist_type(name);
    }
    for part in VERSIONED_PARTS {
        builder = builder.blocklist_type(part);
    }
    let mut types = Vec::new();
    let mut signatures = BTreeMap::new();
    for item in items(builder)? {
        match item {
            syn::Item::ForeignMod(block) => {
                for item in block.items {
                    let syn::ForeignItem::Fn(function) = item else { bail!("not a function") };
                    signatures.insert(function.sig.ident.to_string(), function.sig);
                }
            }
            syn::Item::Use(_) => {}
            item => types.push(item),
        }
    }
    Ok(Common { items: types, signatures })
}

/// Name of a type item.
pub fn type_name(item: &syn::Item) -> Option<String> {
    match item {
        syn::Item::Struct(item) => Some(item.ident.to_string()),
        syn::Item::Union(item) => Some(item.ident.to_string()),
        syn::Item::Type(item) => Some(item.ident.to_string()),
        _ => None,
    }
}

/// The versioned structs of one release.
pub fn layouts(release: &Nccl, common: &Common) -> Result<Vec<syn::Item>> {
    let mut builder = builder(release)?;
    for (pattern, name) in VERSIONED {
        builder = builder.allowlist_type(pattern).allowlist_type(name);
    }
    for part in VERSIONED_PARTS {
        builder = builder.allowlist_type(part);
    }
    for name in common.items.iter().filter_map(type_name) {
        builder = builder.blocklist_type(name);
    }
    let mut items = items(builder)?;
    items.retain(|item| !matches!(item, syn::Item::Use(_)));
    Ok(items)
}

fn unparse(items: Vec<syn::Item>) -> String {
    prettyplease::unparse(&syn::File { shebang: None, attrs: Vec::new(), items })
}

/// The opaque structs that stand for what is versioned or only pointed to.
fn opaque() -> String {
    let mut text = String::new();
    for name in VERSIONED.iter().map(|(_, name)| name).chain(ONLY_POINTED_TO) {
        write!(text, "#[repr(C)]\n#[derive(Debug)]\npub struct {name} {{\n    _unused: [u8; 0],\n}}\n")
            .expect("a string");
    }
    text
}

/// Version code of the oldest release here that declares `name`.
pub fn since(name: &str, all: &[Common]) -> Option<u32> {
    RELEASES.iter().zip(all).find(|(_, common)| common.signatures.contains_key(name)).map(|(r, _)| r.code)
}

fn qualified(ty: &syn::Type) -> String {
    match ty {
        syn::Type::Ptr(pointer) => {
            let kind = if pointer.mutability.is_some() { "mut" } else { "const" };
            format!("*{kind} {}", qualified(&pointer.elem))
        }
        other => {
            let name = other.to_token_stream().to_string().replace(' ', "");
            if let Some(c_type) = name.trim_start_matches("::").strip_prefix("core::ffi::") {
                format!("$crate::ffi::{c_type}")
            } else if matches!(&*name, "usize" | "i8" | "i16" | "i32" | "i64" | "u8" | "u16" | "u32" | "u64")
            {
                name
            } else {
                format!("$crate::{name}")
            }
        }
    }
}

fn entry(name: &str, doc: &str, since: u32, signature: &syn::Signature) -> String {
    let mut arguments = Vec::new();
    for argument in &signature.inputs {
        if let syn::FnArg::Typed(argument) = argument {
            arguments.push(format!("{}: {}", argument.pat.to_token_stream(), qualified(&argument.ty)));
        }
    }
    let result = match &signature.output {
        syn::ReturnType::Default => "()".to_owned(),
        syn::ReturnType::Type(_, ty) => qualified(ty),
    };
    format!(
        "        /// {doc}\n        {name} = {name:?}, {since}: fn({}) -> {result};\n",
        arguments.join(", ")
    )
}

const LIST_HEAD: &str = r#"
/// Passes the list of NCCL functions to another macro: `for_each_function!(callback)` expands to `callback! { ... }` with one
/// entry a function,
///
/// ```text
/// /// What it does.
/// method = "exported symbol", version: fn(argument: Type, ...) -> Type;
/// ```
///
/// where `version` is the oldest checked release that has the function (22907 is 2.29.7). The table of this crate and software
/// stand-ins for NCCL in tests are made from it, so that neither can lack a function of the other.
#[macro_export]
macro_rules! for_each_function {
    ($callback:ident) => { $callback! {
"#;

/// The generated files: path below the root, and contents.
pub fn generate() -> Result<Vec<(String, String)>> {
    let all = RELEASES.iter().map(common).collect::<Result<Vec<_>>>()?;
    let common = all.last().context("no release")?;
    let mut files = Vec::new();
    files.push((
        "nccl-gin-sys/src/bindings.rs".to_owned(),
        format!("{NOTE}\n{}{}", opaque(), unparse(common.items.clone())),
    ));
    let mut list = format!("{NOTE}{LIST_HEAD}");
    for function in FUNCTIONS {
        let name = function.name;
        let signature = common.signatures.get(name).with_context(|| format!("{name} is not declared"))?;
        let since = since(name, &all).with_context(|| format!("{name} is in no release"))?;
        list.push_str(&entry(name, function.doc, since, signature));
    }
    list.push_str("    } };\n}\n");
    files.push(("nccl-gin-sys/src/functions.rs".to_owned(), list));
    let mut newer: Option<(&str, Module)> = None;
    for release in RELEASES.iter().rev() {
        let mut module = Module::new(layouts(release, common)?);
        if let Some((name, newer)) = &newer {
            module.share(name, newer);
        }
        files.push((format!("nccl-gin-sys/src/layouts/{}.rs", release.module), module.text()));
        newer = Some((release.module, module));
    }
    Ok(files)
}

/// The layouts of one generation: each type's declaration, with the assertions and implementations that go with it.
struct Module {
    /// Names of the types, in the headers' order.
    order: Vec<String>,
    types: BTreeMap<String, Vec<syn::Item>>,
    /// Types that are the same in a newer generation, and the module that declares them.
    shared: BTreeMap<String, String>,
}

impl Module {
    fn new(items: Vec<syn::Item>) -> Self {
        let mut order: Vec<String> = Vec::new();
        let mut types = BTreeMap::<String, Vec<syn::Item>>::new();
        for item in items {
            order.extend(type_name(&item));
            // What follows a declaration belongs to it.
            types.entry(order.last().cloned().unwrap_or_default()).or_default().push(item);
        }
        Self { order, types, shared: BTreeMap::new() }
    }

    fn words(items: &[syn::Item]) -> Vec<String> {
        let text: String = items.iter().map(|item| item.to_token_stream().to_string() + " ").collect();
        text.split(' ').map(str::to_owned).collect()
    }

    /// Finds the types that `newer`, the module `name`, declares word for word the same, down to the types that they hold.
    fn share(&mut self, name: &str, newer: &Self) {
        let words: BTreeMap<_, _> = self.types.iter().map(|(ty, items)| (ty, Self::words(items))).collect();
        let mut same: Vec<&String> = self.types.keys().collect();
        same.retain(|ty| newer.types.get(*ty).is_some_and(|items| Self::words(items) == words[ty]));
        loop {
            let before = same.len();
            let all = same.clone();
            same.retain(|ty| {
                words[ty].iter().all(|word| !self.types.contains_key(word) || all.contains(&word))
            });
            if same.len() == before {
                break;
            }
        }
        self.shared = same
            .into_iter()
            .map(|ty| (ty.clone(), newer.shared.get(ty).map_or(name, |owner| owner).to_owned()))
            .collect();
    }

    fn text(&self) -> String {
        let mut text = NOTE.to_owned();
        for (ty, owner) in &self.shared {
            writeln!(text, "pub use super::{owner}::{ty};").expect("a string");
        }
        let own = self.order.iter().filter(|ty| !self.shared.contains_key(*ty));
        let own: Vec<_> = own.flat_map(|ty| self.types[ty].clone()).collect();
        if !own.is_empty() {
            write!(text, "\nuse crate::bindings::*;\n{}", unparse(own)).expect("a string");
        }
        text
    }
}

/// Writes the generated files.
pub fn write() -> Result<()> {
    for (path, text) in generate()? {
        let file = root().join(&path);
        std::fs::create_dir_all(file.parent().context("a file lies in a folder")?)?;
        std::fs::write(file, text)?;
        println!("wrote {path}");
    }
    Ok(())
}

/// Names declared by `release` that are neither in the list nor left out on purpose.
pub fn unlisted(release: &Nccl) -> Result<Vec<String>> {
    let items = items(builder(release)?.allowlist_function("nccl[A-Z].*"))?;
    let mut names = Vec::new();
    for item in items {
        let syn::Item::ForeignMod(block) = item else { continue };
        for item in block.items {
            let syn::ForeignItem::Fn(function) = item else { continue };
            let name = function.sig.ident.to_string();
            let known = FUNCTIONS.iter().any(|f| f.name == name) || LEFT_OUT.iter().any(|(n, _)| *n == name);
            if !known {
                names.push(name);
            }
        }
    }
    Ok(names)
}
