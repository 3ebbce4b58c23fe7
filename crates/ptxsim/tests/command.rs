//! The command as a user calls it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn kernels(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

fn ptxsim(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ptxsim")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Standard output of a call that must succeed.
fn succeeds(args: &[&str]) -> String {
    let output = ptxsim(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Standard error of a call that must end with status 1.
fn fails(args: &[&str]) -> String {
    let output = ptxsim(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {}", text(&output.stderr));
    text(&output.stderr)
}

/// A file of this test's own.
fn temporary(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("command");
    std::fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

fn run(file: &str, kernel: &str, rest: &[&str]) -> Vec<String> {
    let path = kernels(file);
    let mut args = vec!["run".into(), path.to_string_lossy().into_owned(), "--kernel".into(), kernel.into()];
    args.extend(rest.iter().map(|a| a.to_string()));
    args
}

fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

#[test]
fn info_lists_kernels_and_parameters() {
    let path = kernels("kernels/basic.ptx");
    let shown = succeeds(&["info", path.to_str().unwrap()]);
    let head = shown.lines().next().unwrap();
    assert!(head.contains("PTX 9.0 for sm_80") && head.contains("ptxsim"), "{head}");
    let add = shown.split("\nkernel ").find(|k| k.starts_with("vector_add\n")).unwrap();
    let parameters: Vec<Vec<&str>> =
        add.lines().skip(1).take(4).map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(parameters[0][..6], ["0", "u64", "at", "0,", "8", "bytes"]);
    assert_eq!(parameters[3][..6], ["3", "u32", "at", "24,", "4", "bytes"]);
    let transpose = shown.split("\nkernel ").find(|k| k.starts_with("transpose\n")).unwrap();
    assert!(transpose.contains("4096 bytes of shared"), "{transpose}");
    assert!(transpose.contains("(estimated)"), "{transpose}");
}

#[test]
fn info_of_a_fatbin_knows_registers() {
    let path = kernels("data/zstd.fatbin");
    let json = succeeds(&["info", path.to_str().unwrap(), "--json"]);
    let info: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(info["target"], "sm_80");
    let sizes = &info["kernels"][0]["sizes"];
    assert_eq!((&sizes["registers"], &sizes["registers_estimated"]), (&8.into(), &false.into()));
    assert_eq!(info["kernels"][0]["parameters"][1]["type"], "f32");
    let json = succeeds(&["info", path.to_str().unwrap(), "--json", "--cc", "9.0"]);
    assert!(json.contains("sm_90a"));
}

#[test]
fn info_names_unknown_instructions_with_their_lines() {
    let path = temporary("unknown.ptx");
    let ptx = ".version 8.0\n.target sm_80\n.address_size 64\n.entry k() {\nfrobnicate.b32;\n\nwiggle.s32;\nret;\n}\n";
    std::fs::write(&path, ptx).unwrap();
    let shown = succeeds(&["info", path.to_str().unwrap()]);
    let unknown: Vec<_> = shown.lines().filter(|l| l.contains("cannot run")).collect();
    assert!(unknown.len() == 2 && unknown[0].contains("frobnicate") && unknown[0].contains('5'), "{shown}");
    assert!(unknown[1].contains("wiggle.s32") && unknown[1].contains('7'), "{shown}");
}

#[test]
fn run_computes_dumps_and_counts() {
    let input: Vec<u8> = (0..100).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let (from, to) = (temporary("in.bin"), temporary("out.bin"));
    std::fs::write(&from, &input).unwrap();
    let buffer = format!("buf:{}", from.display());
    let dump = format!("2:{}", to.display());
    let args = run(
        "kernels/basic.ptx",
        "vector_add",
        &[
            "--grid",
            "4",
            "--block",
            "32",
            "--arg",
            &buffer,
            "--arg",
            &buffer,
            "--arg",
            "zeros:400",
            "--arg",
            "i32:100",
        ],
    );
    let mut with_dump = args.clone();
    with_dump.extend(["--dump", &dump, "--print", "2:f32:4"].map(String::from));
    let shown = succeeds(&strs(&with_dump));
    assert_eq!(shown.lines().next().unwrap(), "0 2 4 6");
    let expected: Vec<u8> = (0..100).flat_map(|i| (2.0 * i as f32).to_le_bytes()).collect();
    assert_eq!(std::fs::read(&to).unwrap(), expected);

    let mut with_json = args;
    with_json.extend(["--stats", "--json"].map(String::from));
    let outcome: serde_json::Value = serde_json::from_str(&succeeds(&strs(&with_json))).unwrap();
    // two loads and a store of 4 bytes for each of 100 elements, whole sectors of 32 bytes
    assert_eq!(outcome["stats"]["total"]["global_bytes"], 1200);
    assert_eq!(outcome["stats"]["total"]["global_requests"], 12);
    assert_eq!(outcome["stats"]["total"]["global_sectors"], 3 * 13);
    assert!(outcome.get("fault").is_none());
}

#[test]
fn run_of_a_fatbin_and_of_a_name_s_beginning() {
    let rest = [
        "--grid",
        "1",
        "--block",
        "64",
        "--arg",
        "f32:1,2,3",
        "--arg",
        "f32:2",
        "--arg",
        "i32:3",
        "--print",
        "0:f32",
    ];
    for file in ["stored", "zstd", "lz4", "size"] {
        let args = run(&format!("data/{file}.fatbin"), "sca", &rest);
        assert_eq!(succeeds(&strs(&args)).lines().next(), Some("2 4 6"), "{file}");
    }
}

#[test]
fn a_fault_is_told_and_fails() {
    let rest = ["--grid", "1", "--block", "64", "--arg", "iota:50", "--arg", "zeros:200", "--arg", "i32:50"];
    let message = fails(&strs(&run("kernels/checks.ptx", "bad_past_end", &rest)));
    for part in ["OutOfBounds", "bad_past_end", "thread (50,0,0)", "checks.cu:"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let mut json = run("kernels/checks.ptx", "bad_past_end", &rest);
    json.push("--json".into());
    let output = ptxsim(&strs(&json));
    assert_eq!(output.status.code(), Some(1));
    let outcome: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(outcome["fault"]["thread"], serde_json::json!([50, 0, 0]));
    succeeds(&strs(&run("kernels/checks.ptx", "good_past_end", &rest)));
}

#[test]
fn mistakes_are_explained() {
    let shape = ["--grid", "1", "--block", "32"];
    let with = |kernel: &str, more: &[&str]| {
        let mut rest = shape.to_vec();
        rest.extend(more);
        fails(&strs(&run("kernels/basic.ptx", kernel, &rest)))
    };
    let four = ["--arg", "zeros:64", "--arg", "zeros:64", "--arg", "zeros:64", "--arg", "i32:4"];
    for (message, parts) in [
        (with("nothing", &[]), &["no kernel is called `nothing`", "vector_add"][..]),
        (with("trans", &[]), &["may mean", "transpose_padded"]),
        (with("vector_add", &["--arg", "i32:1"]), &["1 arguments", "takes 4", "vector_add(u64 "]),
        (
            with("vector_add", &[&four[..6], &["--arg", "i64:1"]].concat()),
            &["argument 3", "8 bytes, not 4", "u32 "],
        ),
        (with("vector_add", &[&four[..6], &["--arg", "f32:1"]].concat()), &["argument 3", "no integer"]),
        (with("vector_add", &[&four[..6], &["--arg", "int:1"]].concat()), &["`int` is no kind"]),
        (with("vector_add", &[&four[..], &["--dump", "3:x"]].concat()), &["argument 3 is no memory"]),
        (with("vector_add", &[&four[..], &["--print", "0:b32"]].concat()), &["no type of numbers"]),
        (with("vector_add", &[&four[..], &["--shared", "200000"]].concat()), &["200000", "166912"]),
        (with("vector_add", &[&four[..], &["--cluster", "2"]].concat()), &["no clusters"]),
        (with("vector_add", &[&four[..], &["--cc", "75"]].concat()), &["choose one of 80, 86"]),
    ] {
        for part in parts {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
    let mut rest = vec!["--grid", "1", "--block", "1024,2"];
    rest.extend(four);
    let message = fails(&strs(&run("kernels/basic.ptx", "vector_add", &rest)));
    assert!(message.contains("at most 1024 threads"), "{message}");

    for (name, contents, part) in [
        ("nonsense.ptx", &b"hello"[..], "`.version`"),
        ("binary.ptx", &[0xff, 0xfe], "neither PTX text nor a fatbin"),
        ("program", b"\x7fELF", "machine code"),
        ("short.fatbin", &[0x50, 0xed, 0x55, 0xba, 1, 0], "shorter than its header"),
    ] {
        let path = temporary(name);
        std::fs::write(&path, contents).unwrap();
        let message = fails(&["info", path.to_str().unwrap()]);
        assert!(message.contains(part) && message.contains(name), "{message}");
    }
    let message = fails(&["info", kernels("data/cubin.fatbin").to_str().unwrap()]);
    assert!(message.contains("machine code only"), "{message}");
    let message = fails(&["info", kernels("data/new.fatbin").to_str().unwrap(), "--cc", "90"]);
    assert!(message.contains("compute_100f"), "{message}");
    assert!(fails(&["info", "/nowhere/at/all"]).contains("/nowhere/at/all"));
}

#[test]
fn printf_writes_what_c_does() {
    let shown = succeeds(&strs(&run(
        "kernels/assert.ptx",
        "formats",
        &["--grid", "1", "--block", "1", "--arg", "zeros:4", "--print", "0:i32"],
    )));
    let want = "-7|   42|42   |-0042|+8|-5000000000|7000000000|2345|BEEF|0xff|1.234568e+04|0.1|1e-07|   2.718|     5|3.14\
                |text|te|Q|100%\n21\n";
    assert!(shown.starts_with(want), "{shown}");
}

#[test]
#[cfg(target_os = "linux")]
fn files_without_an_end_are_refused() {
    assert!(fails(&["info", "/dev/zero"]).contains("longer than"));
    let args =
        ["--grid", "1", "--block", "1", "--arg", "buf:/dev/zero", "--arg", "zeros:4", "--arg", "i32:1"];
    assert!(fails(&strs(&run("kernels/checks.ptx", "bad_past_end", &args))).contains("longer than"));
}
