//! The multicast instructions: every element, order and scope that there is compiles to the instruction that is meant, and no other compiles.

use std::io::Write as _;

use super::{Arch, Compiler, JitError, Program};

const ELEMENTS: [(&str, &str, &str); 8] = [
    ("F32", ".f32", ".f32"),
    ("F16x2", ".acc::f32.f16x2", ".f16x2"),
    ("BF16x2", ".acc::f32.bf16x2", ".bf16x2"),
    ("F32x4", ".v4.f32", ".v4.f32"),
    ("F16x8", ".acc::f32.v4.f16x2", ".v4.f16x2"),
    ("BF16x8", ".acc::f32.v4.bf16x2", ".v4.bf16x2"),
    ("U32", ".u32", ".u32"),
    ("U64", ".u64", ".u64"),
];
const ORDERS: [&str; 4] = ["weak", "relaxed", "acquire", "release"];
const SCOPES: [&str; 3] = ["none", "gpu", "sys"];

fn compiler(test: &str) -> Option<Compiler> {
    match Compiler::find(None) {
        Ok(compiler) => Some(compiler),
        Err(error @ JitError::NotFound { .. }) => {
            // Past the test runner's capture of what passing tests print.
            writeln!(std::io::stderr(), "skipped: {test}: {error}").ok();
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn compile(compiler: &Compiler, body: &str, arch: Arch) -> Result<String, JitError> {
    let source = format!(
        "#include \"arch/multimem.cuh\"\nusing namespace arch;\n\
         extern \"C\" __global__ void probe(void* p, void* q) {{\n{body}}}\n"
    );
    let headers = Program::MultimemBarrier { ranks: 2 }.headers();
    compiler.compile_text("probe", &source, headers, arch).map(|output| output.assembly)
}

/// Whether an access may have an order and a scope: the rules of PTX, written down once more.
fn allowed(access: &str, order: &str, scope: &str) -> bool {
    let ordered = match access {
        "ld_reduce" => order != "release",
        "st" => order != "acquire",
        _ => order == "relaxed" || order == "release",
    };
    ordered && (order == "weak") == (scope == "none")
}

/// One line of CUDA, and the instruction that it must become.
fn line(access: &str, element: usize, order: &str, scope: &str) -> (String, String) {
    let (name, reduced, stored) = ELEMENTS[element];
    let arguments = format!("{name}, Order::{order}, Scope::{scope}");
    let qualified = if order == "weak" { ".weak".into() } else { format!(".{order}.{scope}") };
    match access {
        "ld_reduce" => (
            format!("*({name}::Value*)q = multimem_ld_reduce_add<{arguments}>(p);\n"),
            format!("multimem.ld_reduce{qualified}.global.add{reduced} "),
        ),
        "st" => (
            format!("multimem_st<{arguments}>(p, *({name}::Value*)q);\n"),
            format!("multimem.st{qualified}.global{stored} "),
        ),
        _ => (
            format!("multimem_red_add<{arguments}>(p, *({name}::Value*)q);\n"),
            format!("multimem.red{qualified}.global.add{stored} "),
        ),
    }
}

#[test]
fn every_meaningful_access_is_the_instruction_that_is_meant() {
    let Some(compiler) = compiler("every_meaningful_access_is_the_instruction_that_is_meant") else { return };
    let (mut body, mut expected) = (String::new(), Vec::new());
    for access in ["ld_reduce", "st", "red"] {
        for element in 0..ELEMENTS.len() {
            for order in ORDERS {
                for scope in SCOPES.into_iter().filter(|scope| allowed(access, order, scope)) {
                    let (source, instruction) = line(access, element, order, scope);
                    body += &source;
                    expected.push(instruction);
                }
            }
        }
    }
    for (order, scope) in [("relaxed", "gpu"), ("relaxed", "sys"), ("release", "gpu"), ("release", "sys")] {
        body += &format!("multimem_red_xor<Order::{order}, Scope::{scope}>((u32*)p, *(u32*)q);\n");
        expected.push(format!("multimem.red.{order}.{scope}.global.xor.b32 "));
    }
    assert_eq!(expected.len(), 8 * (5 + 5 + 4) + 4);
    for arch in [Arch::new(9, 0), Arch::new(10, 0)] {
        let assembly = compile(&compiler, &body, arch).unwrap_or_else(|e| panic!("{e}"));
        for instruction in &expected {
            assert_eq!(assembly.matches(instruction.as_str()).count(), 1, "{arch}: {instruction}");
        }
    }
}

#[test]
fn an_access_without_meaning_does_not_compile() {
    let Some(compiler) = compiler("an_access_without_meaning_does_not_compile") else { return };
    for access in ["ld_reduce", "st", "red"] {
        for order in ORDERS {
            for scope in SCOPES.into_iter().filter(|scope| !allowed(access, order, scope)) {
                let (source, _) = line(access, 0, order, scope);
                let error = compile(&compiler, &source, Arch::new(9, 0)).expect_err(&source).to_string();
                let reasons = [
                    "a load does not release",
                    "a store does not acquire",
                    "a reduction is relaxed or releases",
                    "weak accesses have no scope",
                ];
                assert!(reasons.iter().any(|reason| error.contains(reason)), "{source}: {error}");
            }
        }
    }
    let error = compile(&compiler, "multimem_st<u8, Order::weak, Scope::none>(p, 0);\n", Arch::new(9, 0));
    assert!(matches!(error, Err(JitError::Compile { .. })), "an element that there is not");
}
