//! The parser over everything in `tests/kernels`.

use ptxsim::ptx::ast::{Function, Module, Operand, Space};
use ptxsim::ptx::parse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels")
}

/// Name, text and tree of every PTX file.
fn modules() -> BTreeMap<String, (String, Module)> {
    let files = std::fs::read_dir(folder()).unwrap().map(|f| f.unwrap().path());
    files
        .filter(|p| p.extension().is_some_and(|e| e == "ptx"))
        .map(|path| {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&path).unwrap();
            let module = parse(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
            (name, (text, module))
        })
        .collect()
}

fn function<'a>(modules: &'a BTreeMap<String, (String, Module)>, file: &str, name: &str) -> &'a Function {
    let found = modules[file].1.functions.iter().find(|f| f.name == name);
    found.unwrap_or_else(|| panic!("{file} has no {name}"))
}

/// Lines of the text that hold an instruction: they end in a semicolon and are neither directives nor labels. Counted
/// without the parser; statements of inline assembly that share a line are split at semicolons.
fn instructions(text: &str) -> usize {
    let mut count = 0;
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default();
        for statement in line.split(';') {
            let statement = statement.trim_start_matches(['{', '}', ' ', '\t']).trim();
            let statement = statement
                .rsplit_once(':')
                .filter(|(l, _)| !l.contains(' ') && !l.ends_with(':'))
                .map_or(statement, |(_, rest)| rest.trim());
            let first = statement.split_whitespace().next().unwrap_or_default();
            let starts = first.starts_with('@') || first.starts_with(|c: char| c.is_ascii_lowercase());
            // the continuation lines of calls start with names too
            let opcode = first.contains('.')
                || matches!(first, "ret" | "exit" | "trap" | "bra" | "call")
                || first.starts_with('@');
            count += usize::from(starts && opcode);
        }
    }
    count
}

#[test]
fn every_instruction_of_every_file() {
    let modules = modules();
    assert!(modules.len() >= 14, "{:?}", modules.keys());
    for (name, (text, module)) in &modules {
        let parsed: usize = module.functions.iter().map(|f| f.body.len()).sum();
        assert_eq!(parsed, instructions(text), "{name}");
        assert!(parsed > 10, "{name}");
        for function in module.functions.iter().filter(|f| f.kernel) {
            assert!(!function.body.is_empty() && !function.declaration, "{name}: {}", function.name);
            // line information: most instructions know a line (nvcc gives some line 0) of a file that is named
            let known = function.body.iter().filter(|i| i.location.line > 0).count();
            assert!(known * 2 > function.body.len(), "{name}: {}", function.name);
            for i in &function.body {
                assert!(i.location.file == 0 || module.files.iter().any(|f| f.0 == i.location.file));
                assert!(text.lines().nth(i.location.ptx_line as usize - 1).unwrap().contains(&*i.opcode));
            }
        }
    }
}

#[test]
fn what_the_kernels_declare() {
    let modules = modules();
    let add = function(&modules, "basic", "vector_add");
    assert_eq!(add.param_offsets(), [(0, 8), (8, 8), (16, 8), (24, 4)]);
    let shared = |file, name: &str| -> Vec<u64> {
        let locals = &function(&modules, file, name).locals;
        locals.iter().filter(|v| v.space == Space::Shared).map(|v| v.bytes).collect()
    };
    assert_eq!(shared("basic", "transpose"), [32 * 32 * 4]);
    assert_eq!(shared("basic", "transpose_padded"), [32 * 33 * 4]);
    assert_eq!(shared("gemm", "gemm"), [3 * 64 * 40 * 2, 3 * 32 * 72 * 2]);
    assert_eq!(function(&modules, "gemm", "gemm").limits.max_threads, Some([128, 1, 1]));
    assert_eq!(function(&modules, "cluster", "exchange").limits.cluster, Some([2, 1, 1]));
    assert_eq!(function(&modules, "cluster", "cluster_sum").limits.cluster, Some([4, 1, 1]));

    let basic = &modules["basic"].1;
    let variable = |name: &str| basic.variables.iter().find(|v| v.name == name).unwrap();
    let coefficients: Vec<u8> =
        [1.0f32, -0.5, 0.25, -0.125, 0.0625].iter().flat_map(|c| c.to_le_bytes()).collect();
    let coefficient = variable("coefficients");
    assert_eq!((coefficient.space, &coefficient.init.as_ref().unwrap().bytes), (Space::Const, &coefficients));
    assert_eq!(variable("offsets").space, Space::Global);
    let dynamic = basic.variables.iter().find(|v| v.external).unwrap();
    assert_eq!((dynamic.space, dynamic.bytes), (Space::Shared, 0));

    let depot = &function(&modules, "basic", "local_sort").locals;
    assert!(depot.iter().any(|v| v.space == Space::Local && v.bytes == 64));
    let table = function(&modules, "basic", "branch_table");
    assert_eq!(table.branch_targets[0].1.len(), 3);
    let branch = table.body.iter().find(|i| &*i.opcode == "brx").unwrap();
    assert_eq!(branch.operands[1], Operand::Symbol(table.branch_targets[0].0.clone(), 0));
    assert!(modules["assert"].1.functions.iter().any(|f| f.declaration && f.name == "__assertfail"));
}

#[test]
fn calls_name_functions_of_the_module() {
    let modules = modules();
    let module = &modules["basic"].1;
    let calls: Vec<_> =
        function(&modules, "basic", "calls").body.iter().filter(|i| &*i.opcode == "call").collect();
    assert_eq!(calls.len(), 3);
    for call in calls {
        let [Operand::List(returned), Operand::Symbol(name, 0), Operand::List(arguments)] =
            &call.operands[..]
        else {
            panic!("{call:?}");
        };
        let callee = module.functions.iter().find(|f| f.name == *name).unwrap();
        assert_eq!((returned.len(), arguments.len()), (callee.returns.len(), callee.params.len()));
        let caller = function(&modules, "basic", "calls");
        for operand in returned.iter().chain(arguments) {
            let Operand::Symbol(name, 0) = operand else { panic!("{operand:?}") };
            assert!(caller.locals.iter().any(|v| v.space == Space::Param && v.name == *name));
        }
    }
}

#[test]
fn a_large_file_is_parsed_in_no_time() {
    // 5 MB: copies of the bodies under other names
    let text = std::fs::read_to_string(folder().join("gemm.ptx")).unwrap();
    let (head, rest) = text.split_at(text.find(".visible .entry").unwrap());
    let kernel = &rest[..rest.find("\n}").unwrap() + 2];
    let copies = 5_000_000 / kernel.len() + 1;
    let mut large = head.to_string();
    for i in 0..copies {
        large.push_str(&kernel.replacen(".entry gemm(", &format!(".entry gemm{i}("), 1));
        large.push('\n');
    }
    let start = std::time::Instant::now();
    assert_eq!(parse(&large).unwrap().functions.len(), copies);
    // about 0.2 s on one core; a wide margin for machines under load
    assert!(start.elapsed().as_secs() < 5, "{:?} for {} bytes", start.elapsed(), large.len());
}
