//! Small loops whose instructions are counted by hand.

use super::super::listing::assemble;
use super::*;

/// The function of some lines of code and labels.
fn function(code: &str) -> Function {
    let lines: Vec<&str> = code.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    assemble("a", &lines)
}

/// The way of the outermost loop.
fn walk(code: &str, vote: bool) -> (Function, Way) {
    let f = function(code);
    let flow = Flow::of(&f);
    let turn = flow.loops().into_iter().max_by_key(|l| l.blocks.len()).unwrap();
    let way = way(&f, &flow, &turn, vote, |_| false).unwrap();
    (f, way)
}

fn count(code: &str, vote: bool) -> usize {
    walk(code, vote).1.code.len()
}

#[test]
fn a_guarded_instruction_counts_and_a_guarded_branch_is_left_out() {
    let code = "
        .L_0:
        HMMA.16816.F32 R4, R8, R12, R4
        @P1 FADD R3, R3, R3
        @!PT UIADD3 URZ, URZ, URZ, URZ
        FSETP.GT.AND P0, PT, R3, RZ, PT
        @!P0 BRA `(.L_1)
        FADD R3, R3, 1
        FADD R3, R3, 1
        .L_1:
        @P2 BRA `(.L_0)
        EXIT";
    assert_eq!(count(code, false), 6);
}

#[test]
fn a_way_has_all_products() {
    // A page that does not exist is shorter.
    let code = "
        .L_0:
        @P0 BRA `(.L_2)
        IMMA.16832.U8.S8 R4, R8, R12, R4
        HMMA.1688.F32 R4, R8, R12, R4
        NOP
        .L_2:
        @P2 BRA `(.L_0)
        EXIT";
    assert_eq!(count(code, false), 5);
}

#[test]
fn of_two_bodies_the_one_without_a_mask_counts() {
    let code = "
        .L_0:
        ISETP.GE.AND P0, PT, R5, c[0x0][0x10], PT
        @P0 BRA `(.L_1)
        HMMA.16816.F32 R4, R8, R12, R4
        FSEL R4, R4, -INF, P3
        BRA `(.L_2)
        .L_1:
        HMMA.16816.F32 R4, R8, R12, R4
        .L_2:
        @P2 BRA `(.L_0)
        EXIT";
    assert_eq!(count(code, false), 4);
}

#[test]
fn loops_inside_turn_as_often_as_they_do() {
    let code = "
        .L_0:
        IMAD.MOV.U32 R3, RZ, RZ, RZ
        .L_1:
        HMMA.16816.F32 R4, R8, R12, R4
        VIADD R3, R3, 0x1
        ISETP.NE.AND P0, PT, R3, 0x8, PT
        @P0 BRA `(.L_1)
        @P2 BRA `(.L_0)
        EXIT";
    let (f, way) = walk(code, false);
    assert_eq!(way.code.len(), 1 + 8 * 4 + 1);
    assert_eq!(way.code.iter().filter(|i| f.code[**i].is_mma()).count(), 8);
    assert!(way.open.is_empty());
    // With the test in front of the body and registers in between.
    let code = "
        .L_0:
        UMOV UR4, URZ
        .L_1:
        UISETP.GE.U32.AND UP0, UPT, UR4, 0x3, UPT
        BRA.U UP0, `(.L_2)
        HMMA.16816.F32 R4, R8, R12, R4
        UIADD3 UR4, UR4, 0x1, URZ
        BRA `(.L_1)
        .L_2:
        @P2 BRA `(.L_0)
        EXIT";
    assert_eq!(count(code, false), 1 + 3 * 5 + 2 + 1);
}

#[test]
fn loops_inside_that_nothing_tells_of_count_once() {
    let code = "
        .L_0:
        LDC R3, c[0x0][0x10]
        .L_1:
        HMMA.16816.F32 R4, R8, R12, R4
        VIADD R3, R3, 0xffffffff
        ISETP.NE.AND P0, PT, R3, RZ, PT
        @P0 BRA `(.L_1)
        @P2 BRA `(.L_0)
        EXIT";
    let (_, way) = walk(code, false);
    assert_eq!((way.code.len(), way.open.len()), (6, 1));
}

#[test]
fn a_first_turn_is_not_skipped() {
    // for (pass = 0; pass < 2; pass++) { work; if (pass == 1 || !any(..)) break; more work }
    let code = "
        .L_0:
        HMMA.16816.F32 R4, R8, R12, R4
        MOV R3, RZ
        .L_1:
        FFMA R5, R5, R5, R5
        ISETP.NE.AND P0, PT, R3, 0x1, PT
        @!P0 BRA `(.L_2)
        VOTE.ANY P1, P1
        @!P1 BRA `(.L_2)
        FADD R5, R5, R5
        IADD3 R3, R3, 0x1, RZ
        BRA `(.L_1)
        .L_2:
        HMMA.16816.F32 R4, R8, R12, R4
        @P2 BRA `(.L_0)
        EXIT";
    assert_eq!(count(code, false), 2 + 5 + 2);
    assert_eq!(count(code, true), 2 + 8 + 3 + 2);
}

#[test]
fn votes_go_one_way() {
    let code = "
        .L_0:
        HMMA.16816.F32 R4, R8, R12, R4
        VOTE.ANY R3, PT, P1
        ISETP.NE.AND P0, PT, R3, RZ, PT
        @P0 BRA `(.L_5)
        .L_4:
        HMMA.16816.F32 R4, R8, R12, R4
        @P2 BRA `(.L_0)
        EXIT
        .L_5:
        FMUL R4, R4, R5
        VOTE.ANY P3, P3
        @!P3 BRA `(.L_4)
        FMUL R4, R4, R6
        BRA `(.L_4)";
    assert_eq!(count(code, false), 6);
    assert_eq!(count(code, true), 11);
    // Before the products a vote asks something else: the way that skips them is none.
    let code = "
        .L_0:
        VOTE.ANY P1, P1
        @P1 BRA `(.L_1)
        HMMA.16816.F32 R4, R8, R12, R4
        VOTE.ANY P3, P3
        @!P3 BRA `(.L_1)
        FMUL R4, R4, R6
        .L_1:
        @P2 BRA `(.L_0)
        EXIT";
    assert_eq!(count(code, false), 6);
    assert_eq!(count(code, true), 7);
}

#[test]
fn a_call_is_longer_than_it_looks() {
    let code = "
        .L_0:
        HMMA.16816.F32 R4, R8, R12, R4
        @P0 BRA `(.L_1)
        CALL.REL.NOINC `($__internal_0_$__cuda_sm20_rcp_rn_f32_slowpath)
        BRA `(.L_2)
        .L_1:
        MUFU.RCP R3, R4
        FFMA R5, R4, R3, -1
        FFMA R3, R3, R5, R3
        .L_2:
        @P2 BRA `(.L_0)
        EXIT";
    assert_eq!(count(code, false), 6);
}

#[test]
fn a_predicate_stays_what_it_was() {
    // Twice the same predicate: the short sides do not go together.
    let code = "
        .L_0:
        ISETP.GT.AND P0, PT, R5, 0x3f, PT
        @P0 BRA `(.L_1)
        NOP
        NOP
        .L_1:
        HMMA.16816.F32 R4, R8, R12, R4
        @!P0 BRA `(.L_2)
        NOP
        .L_2:
        @P2 BRA `(.L_0)
        EXIT";
    assert_eq!(count(code, false), 6);
}

#[test]
fn a_comparison_made_again_comes_out_the_same() {
    let again = |between: &str| {
        format!(
            "
        .L_0:
        ISETP.GT.AND P0, PT, R5, 0x3f, PT
        @P0 BRA `(.L_1)
        NOP
        NOP
        NOP
        .L_1:
        HMMA.16816.F32 R8, R8, R12, R8
        {between}
        ISETP.LE.AND P1, PT, R5, 0x3f, PT
        @P1 BRA `(.L_2)
        NOP
        NOP
        .L_2:
        @P2 BRA `(.L_0)
        EXIT"
        )
    };
    // Left 3 longer or right 2 longer, never neither.
    assert_eq!(count(&again("NOP"), false), 7 + 2);
    assert_eq!(count(&again("LDC R5, c[0x0][0x4]"), false), 7);
    // A wide load writes it too.
    assert_eq!(count(&again("LDG.E.128 R4, [R2.64]"), false), 7);
}

#[test]
fn what_is_wanted_is_looked_for_first() {
    let code = "
        .L_0:
        @P0 BRA `(.L_1)
        LOP3.LUT R4, R4, 0xf000f, RZ, 0xc0, !PT
        NOP
        .L_1:
        HMMA.16816.F32 R8, R8, R12, R8
        @P2 BRA `(.L_0)
        EXIT";
    let f = function(code);
    let flow = Flow::of(&f);
    let turn = flow.loops().remove(0);
    let len =
        |wanted: &dyn Fn(&Instruction) -> bool| way(&f, &flow, &turn, false, wanted).unwrap().code.len();
    assert_eq!((len(&|_| false), len(&|i| i.operands.iter().any(|o| o == "0xf000f"))), (3, 5));
}

#[test]
fn a_loop_without_a_way_back_is_an_error() {
    let f = function(".L_0:\nNOP\nBRA `(.L_0)");
    let flow = Flow::of(&f);
    let turn = Loop { head: 0, blocks: [0].into() };
    assert!(way(&f, &flow, &turn, false, |_| false).is_ok());
    let nowhere = function("NOP\n@P0 EXIT\nNOP");
    let flow = Flow::of(&nowhere);
    let turn = Loop { head: 0, blocks: (0..flow.blocks.len()).collect() };
    assert!(way(&nowhere, &flow, &turn, false, |_| false).unwrap_err().to_string().contains("no way"));
}
