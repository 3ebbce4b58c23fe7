//! What the parser makes of texts: each expectation is read off the text by hand.

use super::ast::{Base, Function, Instruction, Module, Operand, Space, Special, Target, Type, Variant};
use super::{ParseErrors, parse};

const HEAD: &str = ".version 9.0\n.target sm_90a\n.address_size 64\n";

fn module(text: &str) -> Module {
    parse(&format!("{HEAD}{text}")).unwrap_or_else(|e| panic!("{e}"))
}

fn errors(text: &str) -> ParseErrors {
    parse(&format!("{HEAD}{text}")).expect_err("wrong on purpose")
}

/// The message of the only mistake, with its line after the head.
fn mistake(text: &str) -> (u32, String) {
    let errors = errors(text).errors;
    assert_eq!(errors.len(), 1, "{errors:?}");
    (errors[0].line - 3, errors[0].message.clone())
}

/// A kernel with `body`.
fn kernel(body: &str) -> Function {
    let module = module(&format!(
        ".global .align 16 .b32 table[8];\n.func callee(.param .b32 x);\n.entry k(.param .u64 p, .param .u32 n)\n{{\n\
         .reg .b32 %r<10>; .reg .b64 %rd<5>; .reg .pred %p<3>; .reg .f32 %f<4>;\n{body}\n}}\n"
    ));
    module.functions.into_iter().find(|f| f.kernel).unwrap()
}

fn names(function: &Function, operand: &Operand) -> String {
    let list = |l: &[Operand]| l.iter().map(|o| names(function, o)).collect::<Vec<_>>().join(",");
    match operand {
        Operand::Register(r) => function.register_name(*r).to_string(),
        Operand::Not(r) => format!("!{}", function.register_name(*r)),
        Operand::Integer(i) => i.to_string(),
        Operand::F32(b) => format!("0f{b:08x}"),
        Operand::F64(b) => format!("0d{b:016x}"),
        Operand::Vector(v) => format!("{{{}}}", list(v)),
        Operand::Pair(a, b) => format!("{}|{}", names(function, a), names(function, b)),
        Operand::Address(a) => address(function, a),
        Operand::Tensor(a, groups) => {
            let groups: Vec<_> = groups.iter().map(|g| format!("{{{}}}", list(g))).collect();
            format!("{}&{}", address(function, a), groups.join("&"))
        }
        Operand::Symbol(s, o) => format!("{s}+{o}"),
        Operand::Special(s) => format!("{s:?}"),
        Operand::Sink => "_".into(),
        Operand::Label(i) => format!("@{}:{}", function.labels[*i].0, function.labels[*i].1),
        Operand::List(l) => format!("({})", list(l)),
    }
}

fn address(function: &Function, a: &super::ast::Address) -> String {
    let base = match &a.base {
        Base::Register(r) => function.register_name(*r),
        Base::Symbol(s) => s,
        Base::Absolute => "",
    };
    format!("[{base}+{}]", a.offset)
}

/// Name and operands of the only instruction.
fn one(text: &str) -> String {
    let function = kernel(text);
    assert_eq!(function.body.len(), 1, "{text}");
    show(&function, &function.body[0])
}

fn show(function: &Function, i: &Instruction) -> String {
    let guard = i.guard.map_or(String::new(), |g| {
        format!("@{}{} ", if g.negated { "!" } else { "" }, function.register_name(g.register))
    });
    let operands: Vec<_> = i.operands.iter().map(|o| names(function, o)).collect();
    format!("{guard}{} {}", i.name(), operands.join(" ")).trim_end().to_string()
}

#[test]
fn operands_of_every_form() {
    for (text, expected) in [
        ("add.s32 %r1, %r2, -5;", "add.s32 %r1 %r2 -5"),
        ("mov.b32 %r1, 0x80000000;", "mov.b32 %r1 2147483648"),
        ("mov.b64 %rd1, 0xFFFFFFFFFFFFFFFFU;", "mov.b64 %rd1 18446744073709551615"),
        ("mov.b64 %rd1, -9223372036854775808;", "mov.b64 %rd1 -9223372036854775808"),
        ("mov.b32 %r1, 017;", "mov.b32 %r1 15"),
        ("mov.b32 %r1, 0b101;", "mov.b32 %r1 5"),
        ("mov.b32 %r1, (1 << 4) | 3;", "mov.b32 %r1 19"),
        ("mov.b32 %r1, 2 + 3 * 4 - 1;", "mov.b32 %r1 13"),
        ("mov.b32 %r1, ~0;", "mov.b32 %r1 -1"),
        ("mov.b32 %r1, !7 ? 5 : -7 / 2;", "mov.b32 %r1 -3"),
        ("mov.b32 %r1, 20 - 5 - 4;", "mov.b32 %r1 11"),
        ("mov.b32 %r1, 7 % 4;", "mov.b32 %r1 3"),
        ("mov.f32 %f1, 0f3F800000;", "mov.f32 %f1 0f3f800000"),
        ("mov.f32 %f1, -0f3F800000;", "mov.f32 %f1 0fbf800000"),
        ("mov.f32 %f1, 1.5;", "mov.f32 %f1 0d3ff8000000000000"),
        ("mov.f32 %f1, -1.5e0;", "mov.f32 %f1 0dbff8000000000000"),
        (
            "mma.x {%f1, %f2}, {%r1}, {%r2}, {0., 0.};",
            "mma.x {%f1,%f2} {%r1} {%r2} {0d0000000000000000,0d0000000000000000}",
        ),
        ("ld.global.v4.u32 {%r1, _, %r2, _}, [%rd1+16];", "ld.global.v4.u32 {%r1,_,%r2,_} [%rd1+16]"),
        ("ld.global.u32 %r1, [%rd1+-4];", "ld.global.u32 %r1 [%rd1+-4]"),
        ("ld.global.u32 %r1, [%rd1-4];", "ld.global.u32 %r1 [%rd1+-4]"),
        ("ld.param.u32 %r1, [n];", "ld.param.u32 %r1 [n+0]"),
        ("ld.global.u32 %r1, [table+8];", "ld.global.u32 %r1 [table+8]"),
        ("ld.global.u32 %r1, table[3];", "ld.global.u32 %r1 [table+12]"),
        ("mov.u64 %rd1, table[3];", "mov.u64 %rd1 table+12"),
        ("mov.u64 %rd1, table+4;", "mov.u64 %rd1 table+4"),
        ("ld.shared.u32 %r1, [16];", "ld.shared.u32 %r1 [+16]"),
        ("shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;", "shfl.sync.bfly.b32 %r1|%p1 %r2 1 31 -1"),
        ("lop3.or.b32 _|%p1, %r2, 1, 31, 0xc0, !%p2;", "lop3.or.b32 _|%p1 %r2 1 31 192 !%p2"),
        ("@%p1 exit;", "@%p1 exit"),
        ("@!%p1 ret;", "@!%p1 ret"),
        ("mov.u32 %r1, %tid.x;", "mov.u32 %r1 Tid(0)"),
        ("mov.u32 %r1, %nctaid.z;", "mov.u32 %r1 Nctaid(2)"),
        ("mov.u32 %r1, %cluster_ctaid.y;", "mov.u32 %r1 ClusterCtaid(1)"),
        ("mov.u32 %r1, %tid.w;", "mov.u32 %r1 0"),
        ("mov.u32 %r1, %envreg3;", "mov.u32 %r1 Envreg(3)"),
        ("mov.u64 %rd1, %clock64;", "mov.u64 %rd1 Clock64"),
        ("mov.u32 %r1, %lanemask_lt;", "mov.u32 %r1 LanemaskLt"),
        ("mov.u32 %r1, WARP_SZ;", "mov.u32 %r1 WarpSize"),
        ("mov.u32 %r1, WARP_SZ * 2;", "mov.u32 %r1 64"),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];",
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1+0] [%rd1+0]&{%r2,%r3} [%r4+0]",
        ),
        (
            "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r1], [%rd1], 16, %rd2;",
            "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r1+0] [%rd1+0] 16 %rd2",
        ),
        (
            "createpolicy.fractional.L2::evict_last.b64 %rd1, 1.0;",
            "createpolicy.fractional.L2::evict_last.b64 %rd1 0d3ff0000000000000",
        ),
        ("mbarrier.arrive.shared.b64 _, [%r1];", "mbarrier.arrive.shared.b64 _ [%r1+0]"),
        ("call callee;", "call () callee+0 ()"),
        ("call.uni callee, (n);", "call.uni () callee+0 (n+0)"),
        ("call (%r1), callee, (%r2, 5);", "call (%r1) callee+0 (%r2,5)"),
        (
            "call (%r1), %rd1, (n), proto; proto: .callprototype (.param .b32 _) _ (.param .b32 _);",
            "call (%r1) %rd1 (n+0) proto+0",
        ),
        ("mov.u64 %rd1, callee;", "mov.u64 %rd1 callee+0"),
        ("nothing.known.1d.128b;", "nothing.known.1d.128b"),
    ] {
        assert_eq!(one(text), expected);
    }
}

#[test]
fn labels_before_and_after_their_use() {
    let f = kernel("a: bra b; @%p1 bra a; b: c: ret; end:");
    let shown: Vec<_> = f.body.iter().map(|i| show(&f, i)).collect();
    assert_eq!(shown, ["bra @b:2", "@%p1 bra @a:0", "ret"]);
    assert_eq!(f.labels.last().unwrap(), &("end".to_string(), 3));
}

#[test]
fn scopes_hide_and_rename() {
    let f = kernel(
        "mov.b32 %r1, 1;
         { .reg .b32 t; .reg .b64 %r<2>; .param .b32 q; l: mov.b64 %r1, 2; st.param.b32 [q], t; bra l; }
         { .reg .b32 t; .param .b32 q; .shared .b32 table; { l: mov.u64 %rd1, table; } st.param.b32 [q], t; bra l; l: }
         mov.u64 %rd1, table;",
    );
    // the two registers %r1 differ, as do both t
    let register = |i: usize| match f.body[i].operands[0] {
        Operand::Register(r) => (r, f.registers[r as usize].ty),
        _ => panic!(),
    };
    assert_eq!((register(0).1, register(1).1), (Type::B32, Type::B64));
    assert_ne!(register(0).0, register(1).0);
    let Operand::Register(first) = f.body[2].operands[1] else { panic!() };
    let Operand::Register(second) = f.body[5].operands[1] else { panic!() };
    assert_ne!(first, second);
    let locals: Vec<_> = f.locals.iter().map(|v| v.name.clone()).collect();
    assert_eq!(locals.len(), 3);
    assert_ne!(locals[0], locals[1]);
    assert!(!locals.contains(&"table".to_string()), "the module's variable keeps its name: {locals:?}");
    assert_eq!(f.body[4].operands[1], Operand::Symbol(locals[2].clone(), 0));
    assert_eq!(f.body[7].operands[1], Operand::Symbol("table".into(), 0));
    // each scope has its own l
    let targets: Vec<_> = [3, 6].map(|i| names(&f, &f.body[i].operands[0])).into();
    assert!(targets[0].ends_with(":1") && targets[1].ends_with(":7"), "{targets:?}");
    let mut labels: Vec<_> = f.labels.iter().map(|l| &l.0).collect();
    labels.sort();
    labels.dedup();
    assert_eq!(labels.len(), 3);
}

#[test]
fn branch_tables() {
    let f = kernel(
        "{ l0: l1: ts: .branchtargets l1, l0, l2; brx.idx %r1, ts; l2: } { ts: .branchtargets x; x: brx.idx %r1, ts; }",
    );
    assert_eq!(f.branch_targets.len(), 2);
    assert_eq!(f.branch_targets[0].1, ["l1", "l0", "l2"]);
    for i in 0..2 {
        assert_eq!(f.body[i].operands[1], Operand::Symbol(f.branch_targets[i].0.clone(), 0));
    }
    assert_ne!(f.branch_targets[0].0, f.branch_targets[1].0);
}

#[test]
fn registers_are_made_when_used() {
    let f = kernel(
        ".reg .b16 %x<4000000000>, y, %r1<3>; .reg .v2 .f32 v; mov.b16 y, %x3999999999; add.f32 v.x, v.y, v.x; mov.b32 %r12, %r2; st.v2 [0], v;",
    );
    let names: Vec<_> = f.registers.iter().map(|r| (r.name.as_str(), r.ty)).collect();
    assert_eq!(
        names,
        [
            ("y", Type::B16),
            ("v.x", Type::F32),
            ("v.y", Type::F32),
            ("%x3999999999", Type::B16),
            ("%r12", Type::B16),
            ("%r2", Type::B32)
        ]
    );
    assert_eq!(f.body[1].operands[1], Operand::Register(2));
    assert_eq!(f.body[3].operands[1], Operand::Vector(vec![Operand::Register(1), Operand::Register(2)]));
}

#[test]
fn variables_and_initial_values() {
    let m = module(
        ".visible .global .align 16 .v4 .f32 a;
         .const .b8 b[2][3] = {{1, -1}, {0xff}};
         .extern .shared .align 16 .b8 dyn[];
         .global .f64 c[] = {1, 0.5, 0d3FF0000000000000};
         .global .u64 d[3] = {a, generic(b)+4, generic(b+2)};
         .global .b8 e[2] = {0xff00(a), mask(0xFF) a};
         .global .attribute(.managed) .u32 f = 1 << 4, g = -1;
         .weak .global .b32 h[2] = {0f3F800000, 1.0};
         .global .align 4 .v2 .b16 i[2] = {{1,2},{3,4}};
         .global .s16 j[2][2][2] = {{{1,2},{3}},{{5}}};",
    );
    let v = |name: &str| m.variables.iter().find(|v| v.name == name).unwrap();
    let bytes = |name: &str| v(name).init.as_ref().unwrap().bytes.clone();
    assert_eq!((v("a").bytes, v("a").align, v("a").array, v("a").space), (16, 16, false, Space::Global));
    assert_eq!((v("b").bytes, v("b").array, v("b").space), (6, true, Space::Const));
    assert_eq!(bytes("b"), [1, 0xff, 0, 0xff]);
    assert_eq!((v("dyn").bytes, v("dyn").external, v("dyn").align), (0, true, 16));
    assert_eq!(v("c").bytes, 24);
    let doubles: Vec<u8> = [1.0f64, 0.5, 1.0].iter().flat_map(|d| d.to_le_bytes()).collect();
    assert_eq!(bytes("c"), doubles);
    let relocations = |name: &str| -> Vec<_> {
        let list = &v(name).init.as_ref().unwrap().relocations;
        list.iter().map(|r| (r.offset, r.bytes, r.symbol.clone(), r.addend, r.shift)).collect()
    };
    assert_eq!(
        relocations("d"),
        [(0, 8, "a".into(), 0, 0), (8, 8, "b".into(), 4, 0), (16, 8, "b".into(), 2, 0)]
    );
    assert_eq!(relocations("e"), [(0, 1, "a".into(), 0, 8), (1, 1, "a".into(), 0, 0)]);
    assert_eq!((bytes("f"), bytes("g")), (16u32.to_le_bytes().to_vec(), vec![0xff; 4]));
    assert_eq!(bytes("h"), [0, 0, 128, 63, 0, 0, 128, 63]);
    assert_eq!(bytes("i"), [1, 0, 2, 0, 3, 0, 4, 0]);
    assert_eq!(bytes("j"), [1, 0, 2, 0, 3, 0, 0, 0, 5, 0]);
}

#[test]
fn heads_of_functions() {
    let m = module(
        ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
         .func (.reg .b32 r) f (.reg .b32 a, .reg .f64 b) .noreturn { mov.b32 r, a; ret; }
         .weak .func g() ;
         .alias h, f;
         .func h;
         .visible .entry k(.param .align 8 .b8 s[24], .param .u64 .ptr .global .align 16 p, .param .u16 c, .param .b8 d)
           .maxntid 128, 2 .minnctapersm 3 .reqntid 64 .maxnreg 40 .reqnctapercluster 2, 1, 1 .maxclusterrank 8
           .pragma \"nounroll\"; .attribute(.unified(1,2))
         { .reg .b32 %r; call (%r), h, (%r, 0); ret; }",
    );
    let names: Vec<_> = m.functions.iter().map(|f| (f.name.as_str(), f.declaration)).collect();
    assert_eq!(names, [("vprintf", true), ("f", false), ("g", true), ("k", false)]);
    let f = &m.functions[1];
    let registers: Vec<_> = f.registers.iter().map(|r| (r.name.as_str(), r.ty)).collect();
    assert_eq!(registers, [("r", Type::B32), ("a", Type::B32), ("b", Type::F64)]);
    let k = &m.functions[3];
    assert!(k.kernel && !k.declaration);
    assert_eq!(k.param_offsets(), [(0, 24), (24, 8), (32, 2), (34, 1)]);
    assert_eq!(k.limits.max_threads, Some([128, 2, 1]));
    assert_eq!(k.limits.required_threads, Some([64, 1, 1]));
    assert_eq!((k.limits.min_blocks, k.limits.max_registers), (Some(3), Some(40)));
    assert_eq!((k.limits.explicit_cluster, k.limits.cluster), (true, Some([2, 1, 1])));
    // an alias is the function itself
    assert_eq!(k.body[0].operands[1], Operand::Symbol("f".into(), 0));
}

#[test]
fn line_information() {
    let m = module(
        ".entry k() {\n.loc 1 7 3\nret;\n.loc 2 708 1, function_name $L__info_string0 + 4, inlined_at 1 5 30\nret; }
         .file 1 \"/a \\\"b\\\".cu\"\n.file 2 \"c.h\", 123, 456\n
         .section .debug_str { $L__info_string0: .b8 1, 2\n .b64 k }\n.section .debug_loc\n{\n}",
    );
    let body = &m.functions[0].body;
    assert_eq!((body[0].location.file, body[0].location.line, body[0].location.ptx_line), (1, 7, 6));
    assert_eq!((body[1].location.file, body[1].location.line, body[1].location.ptx_line), (2, 708, 8));
    assert_eq!(m.files[1], (2, "c.h".into()));
}

#[test]
fn head_of_the_module() {
    let m = parse(".version 8.10 .target sm_100f, texmode_independent, debug .address_size 32").unwrap();
    assert_eq!((m.version, m.address_size), ((8, 10), 32));
    assert_eq!(m.target, Target { arch: 100, variant: Variant::Family });
    assert_eq!(parse(".version 7.0 .target sm_80").unwrap().address_size, 64);
    let m = parse(
        ".version 7.0 .target sm_80 .address_size 64 .target texmode_unified, sm_80 .section .a.b \"c\" {}",
    );
    assert_eq!(m.map(|m| m.target.arch), parse(".version 7.0 .target sm_80").map(|m| m.target.arch));
    for (text, part) in [
        ("", "`.version`"),
        ("hello", "`.version`"),
        (".version nine", "number such as"),
        (".version 9.0 .entry k() {}", "`.target`"),
        (".version 9.0 .target volta", "no architecture"),
        (".version 9.0 .target sm_x", "not an architecture"),
        (".version 9.0 .target sm_80 .address_size 48", "32 or 64"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn special_registers_without_component() {
    let f = kernel("mov.v4.u32 {%r1, %r2, %r3, %r4}, %tid;");
    let parts: Vec<_> =
        (0..3).map(|i| Operand::Special(Special::Tid(i))).chain([Operand::Integer(0)]).collect();
    assert_eq!(f.body[0].operands[1], Operand::Vector(parts));
}

#[test]
fn mistakes_say_where_and_what() {
    let in_kernel =
        |body: &str| mistake(&format!(".entry k() {{ .reg .b32 %r<3>; .reg .pred %p;\n{body}\n}}"));
    for (body, part) in [
        ("mov.b32 %r1, %r3;", "`%r3` is not declared"),
        ("mov.b32 %r1, %r01;", "`%r01` is not declared"),
        ("bra nowhere;", "`nowhere` is no register, label"),
        ("ld.global.u32 %r1, [nothing];", "`nothing` is no register"),
        ("mov.b32 %r1 %r2;", "expected `;`, found `%r2`"),
        ("mov.b32 %r1, ;", "expected an operand, found `;`"),
        ("mov.b32 %r1, {%r2, %r1;", "expected `,`"),
        ("@%r1 ret;", "no predicate register"),
        ("@%q ret;", "no predicate register"),
        ("selp.b32 %r1, %r2, %r1, !%p1;", "no predicate register"),
        ("mov.b32 %r1, %r2.b0;", "no part `.b0`"),
        ("ld.u32 %r1, [%r2+%r1];", "immediate offset"),
        ("a: ret; a: ret;", "twice"),
        (".reg .b32 %r<5>;", "declared twice"),
        (".reg .c32 x;", "expected a type, found `.c32`"),
        (".local .pred x;", "no type of a variable in memory"),
        (".local .align 3 .b8 x;", "power of two"),
        (".local .b8 x[-1];", "negative"),
        (".local .b64 x[0x7fffffffffffffff][4];", "larger than any memory"),
        (".shared .b32 x = 5;", "initial values"),
        ("mov.b32 %r1, 1 / 0;", "divided by zero"),
        ("mov.b32 %r1, 1 << 64;", "cannot be shifted"),
        ("mov.b32 %r1, 99999999999999999999;", "not a 64-bit integer"),
        ("mov.b32 %r1, 0x;", "not a 64-bit integer"),
        ("call %r1, %r2, %r2;", "`call` takes"),
        ("ts: .branchtargets q;", "no label"),
        ("ld.u32 %r1, [l]; l: ret;", "`l` is a label, which cannot stand here"),
        ("mov.v2.u32 {%r1, l}, %r2; l: ret;", "`l` is a label, which cannot stand here"),
        (".nonsense 5;", "directive of a function's body"),
        ("tex.2d.v4.f32.f32 {%r1}, [map, {%r2}];", "`map` is no register"),
    ] {
        let (line, message) = in_kernel(body);
        assert!(line == 2 && message.contains(part), "{body}: line {line}, {message}");
    }
    for (text, part) in [
        (".global .b8 x[2] = {1,2,3};", "more initial values"),
        (".global .b8 x[2][2] = {{1,2,3}};", "more initial values than this dimension"),
        (".global .b8 x[2] = {{1}};", "more braces"),
        (".global .b8 x[2] = {unknown};", "`unknown` is no"),
        (".global .b8 x[2] = {0xff0(x)};", "one byte"),
        (".global .b16 x = 0.5;", "no floating-point number"),
        (".global .b8 x[9][1000000000] = {{1},{2}};", "gaps"),
        (".global .b32 x; .global .b32 x;", "defined twice"),
        (".entry k() {} .entry k() {}", "defined twice"),
        (".entry k(.param .b32 a, .param .b32 a) {}", "two parameters"),
        (".entry k() .maxntid {}", "expected an extent"),
        (".entry k() { ret;", "never closed"),
        (".section .debug_info { .b8 1", "never closed"),
        (".texref t;", "not supported"),
        (".entry k(.global .b32 x) {}", "a parameter"),
        (".alias a, b;", "`b` is no"),
        (".func f() {} .alias a, f; .alias b, a;", "`a` is itself an alias"),
    ] {
        let message = mistake(text).1;
        assert!(message.contains(part), "{text}: {message}");
    }
}

#[test]
fn several_mistakes_at_once_but_not_too_many() {
    let text =
        format!(".entry k() {{\n{}}}\n.entry l() {{ mov.b32 %x, 0; }}\n", "mov.b32 %a, 0;\n".repeat(3));
    let lines: Vec<_> = errors(&text).errors.iter().map(|e| e.line - 3).collect();
    assert_eq!(lines, [2, 3, 4, 6]);
    let many = format!(".entry k() {{\n{}}}", "mov.b32 %a, 0;\n".repeat(1000));
    assert_eq!(errors(&many).errors.len(), ParseErrors::LIMIT);
    let shown = errors(&text).to_string();
    assert!(shown.starts_with("PTX line 5, column 9: the register `%a`"), "{shown}");
    assert_eq!(shown.lines().count(), 4);
}

#[test]
fn deep_nesting_is_an_error_not_a_crash() {
    let deep = 100_000;
    for text in [
        format!(".entry k() {{ mov.b32 x, {}", "(".repeat(deep)),
        format!(".entry k() {{ mov.b32 x, {}", "-".repeat(deep)),
        format!(".entry k() {{ mov.b32 x, {}", "1 ? ".repeat(deep)),
        format!(".entry k() {{ mov.b32 x, {}", "{".repeat(deep)),
        format!(".entry k() {{ call {}", "(".repeat(deep)),
        format!(".entry k() {{ ld.b32 x, [0,{}", "[0,{".repeat(deep)),
        format!(".entry k() {{ {}", "{".repeat(deep)),
        format!(".global .b8 x[4] = {}", "{".repeat(deep)),
        format!(".global .b8 x{} = {}", "[1]".repeat(deep), "{".repeat(deep)),
        format!(".global .b8 x = {}", "(".repeat(deep)),
        format!(".global .b64 x = {}", "generic(".repeat(deep)),
    ] {
        errors(&text);
    }
}
