//! Instructions across the lanes of a warp.

use super::lanes::{Body, Lane, Outcome, set_predicate, set_row, simple, source};
use super::parse::{Parse, flag};
use crate::exec::regs::{File, Form, LANES, Mask, Op, Regs, Sync, Taint, Trouble};
use crate::fault::FaultKind;
use crate::ptx::ast::{Operand, Type};
use crate::stats::Class;
use std::marker::PhantomData;

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    if p.opcode() == "activemask" {
        if p.ty()? != Type::B32 {
            return Err(p.unknown());
        }
        let form = simple(p.once.op(ActiveMask), vec![File::Narrow], Vec::new());
        return Ok(Form { class: Class::Shuffle, ..form });
    }
    if !p.take("sync") {
        return Err(format!(
            "{} without .sync does not exist on compute capability 7.0 and later",
            p.opcode()
        ));
    }
    let form = match p.opcode() {
        "shfl" => shfl(p),
        "vote" => vote(p),
        "match" => matching(p),
        "redux" => redux(p),
        "elect" => elect(p),
        _ => Err(p.unknown()),
    }?;
    Ok(Form { class: Class::Shuffle, ..form })
}

/// Bit of `imm`: lanes that do not take part are reported.
const CHECKED: u64 = 1 << 8;

fn checked(p: &Parse<'_>) -> u64 {
    flag(p.options.shuffle, CHECKED)
}

/// The member masks of the active lanes: each has to name its own lane. (Whether the others are here is known to who
/// waited for them.)
#[inline(always)]
fn check_members(op: &Op, members: &[u32; LANES], mask: Mask) -> Outcome {
    if op.imm & CHECKED == 0 {
        return Ok(());
    }
    let mut named = 0;
    for lane in 0..LANES {
        named |= members[lane] & 1 << lane;
    }
    if mask & !named == 0 { Ok(()) } else { not_named(members, mask & !named) }
}

#[cold]
fn not_named(members: &[u32; LANES], lanes: Mask) -> Outcome {
    let lane = lanes.trailing_zeros();
    let message = format!(
        "member mask {:#010x} does not name lane {lane}, which runs the instruction",
        members[lane as usize & 31]
    );
    Err(Box::new(Trouble { kind: FaultKind::Shuffle, lane, message }))
}

#[derive(Clone, Copy)]
struct ActiveMask;

impl Body for ActiveMask {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        set_row(&mut regs.narrow[op.d[0] as usize], &[mask; LANES], mask);
        Ok(())
    }
}

/// How the source lane is found, in `imm`.
const SHUFFLES: [(&str, u64); 4] = [("up", 0), ("down", 1), ("bfly", 2), ("idx", 3)];

/// The lane to read from and whether it is in range; the lane itself if not.
#[inline(always)]
fn source_lane(mode: u64, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (b, clamp, segment) = (b & 31, c & 31, c >> 8 & 31);
    let first = lane & segment;
    let last = first | clamp & !segment;
    let (from, inside) = match mode {
        // `up` compares as signed numbers with the bound that c gives.
        0 => (lane.wrapping_sub(b), lane as i32 - b as i32 >= last as i32),
        1 => (lane + b, lane + b <= last),
        2 => (lane ^ b, lane ^ b <= last),
        _ => {
            let from = first | b & !segment;
            (from, from <= last)
        }
    };
    if inside { (from, true) } else { (lane, false) }
}

#[derive(Clone, Copy)]
struct Shfl<const P: bool>;

impl<const P: bool> Body for Shfl<P> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let [a, b, c, members] = op.s.map(|i| &regs.narrow[i as usize]);
        let mode = op.imm & 3;
        check_members(op, members, mask)?;
        let mut out = [0; LANES];
        let mut inside = 0;
        let mut absent = 0;
        for lane in 0..LANES {
            let (from, ok) = source_lane(mode, lane as u32, b[lane], c[lane]);
            out[lane] = a[from as usize & 31];
            inside |= u32::from(ok) << lane;
            absent |= (!mask >> (from & 31) & 1) << lane;
        }
        let absent = absent & mask;
        if absent != 0 && op.imm & CHECKED != 0 {
            let lane = absent.trailing_zeros();
            let (from, _) = source_lane(mode, lane, b[lane as usize], c[lane as usize]);
            return inactive(lane, from);
        }
        set_row(&mut regs.narrow[op.d[0] as usize], &out, mask);
        if P {
            set_predicate(regs, op.d[1], inside, mask);
        }
        Ok(())
    }
}

#[cold]
fn inactive(lane: u32, from: u32) -> Outcome {
    let message = format!("lane {lane} reads from lane {from}, which does not take part");
    Err(Box::new(Trouble { kind: FaultKind::Shuffle, lane, message }))
}

fn shfl(p: &mut Parse<'_>) -> Result<Form, String> {
    let mode = p.pick(&SHUFFLES).ok_or_else(|| p.unknown())?;
    if p.ty()? != Type::B32 {
        return Err(p.unknown());
    }
    let pair = matches!(p.operand(0), Some(Operand::Pair(..)));
    let n = source::<u32>();
    let form = if pair {
        simple(p.isa.op(Shfl::<true>), vec![File::Narrow, File::Pred], vec![n; 4])
    } else {
        simple(p.isa.op(Shfl::<false>), vec![File::Narrow], vec![n; 4])
    };
    Ok(Form { imm: mode | checked(p), taint: Taint::Shuffle, sync: Sync::Members(3), ..form })
}

/// Calls `f` once for each group of active lanes with the same member mask.
#[inline(always)]
fn groups(members: &[u32; LANES], mask: Mask, mut f: impl FnMut(Mask)) {
    let mut left = mask;
    while left != 0 {
        let m = members[left.trailing_zeros() as usize & 31];
        let mut group = 0;
        for lane in 0..LANES {
            group |= u32::from(members[lane] == m) << lane;
        }
        let group = group & left;
        f(group);
        left &= !group;
    }
}

const VOTES: [(&str, u64); 4] = [("all", 0), ("any", 1), ("uni", 2), ("ballot", 3)];

#[derive(Clone, Copy)]
struct Vote<const BALLOT: bool>;

impl<const BALLOT: bool> Body for Vote<BALLOT> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let a = super::lanes::predicate(regs, op, 0);
        let members = &regs.narrow[op.s[1] as usize];
        check_members(op, members, mask)?;
        let mut ballots = [0; LANES];
        let mut result = 0;
        groups(members, mask, |group| {
            let votes = a & group;
            let yes = match op.imm & 3 {
                0 => votes == group,
                1 => votes != 0,
                _ => votes == 0 || votes == group,
            };
            result |= if yes { group } else { 0 };
            for lane in 0..LANES {
                ballots[lane] = if group >> lane & 1 != 0 { votes } else { ballots[lane] };
            }
        });
        if BALLOT {
            set_row(&mut regs.narrow[op.d[0] as usize], &ballots, mask);
        } else {
            set_predicate(regs, op.d[0], result, mask);
        }
        Ok(())
    }
}

fn vote(p: &mut Parse<'_>) -> Result<Form, String> {
    let mode = p.pick(&VOTES).ok_or_else(|| p.unknown())?;
    let sources = vec![source::<bool>(), source::<u32>()];
    let form = match (p.ty()?, mode) {
        (Type::B32, 3) => simple(p.once.op(Vote::<true>), vec![File::Narrow], sources),
        (Type::Pred, 0..3) => simple(p.once.op(Vote::<false>), vec![File::Pred], sources),
        _ => return Err(p.unknown()),
    };
    Ok(Form { imm: mode | checked(p), taint: Taint::All, sync: Sync::Members(1), ..form })
}

struct Match<T, const ALL: bool, const P: bool>(PhantomData<fn() -> T>);
impl<T, const ALL: bool, const P: bool> Clone for Match<T, ALL, P> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, const ALL: bool, const P: bool> Copy for Match<T, ALL, P> {}

impl<T: Lane + PartialEq, const ALL: bool, const P: bool> Body for Match<T, ALL, P> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let a = T::view(regs, op, 0);
        let members = &regs.narrow[op.s[1] as usize];
        check_members(op, members, mask)?;
        let mut out = [0; LANES];
        let mut same = 0;
        for lane in 0..LANES {
            let mut equal = 0;
            for other in 0..LANES {
                let hit = T::at(a, lane) == T::at(a, other) && members[lane] == members[other];
                equal |= u32::from(hit) << other;
            }
            let equal = equal & mask;
            if ALL {
                let whole = members[lane] & mask == equal;
                out[lane] = if whole { equal } else { 0 };
                same |= u32::from(whole) << lane;
            } else {
                out[lane] = equal;
            }
        }
        set_row(&mut regs.narrow[op.d[0] as usize], &out, mask);
        if P {
            set_predicate(regs, op.d[1], same, mask);
        }
        Ok(())
    }
}

fn matching(p: &mut Parse<'_>) -> Result<Form, String> {
    fn of<T: Lane + PartialEq>(p: &Parse<'_>, all: bool, pair: bool) -> Option<Form> {
        let run = match (all, pair) {
            (false, false) => p.once.op(Match::<T, false, false>(PhantomData)),
            (true, false) => p.once.op(Match::<T, true, false>(PhantomData)),
            (true, true) => p.once.op(Match::<T, true, true>(PhantomData)),
            (false, true) => return None,
        };
        let mut destinations = vec![File::Narrow];
        if pair {
            destinations.push(File::Pred);
        }
        Some(simple(run, destinations, vec![source::<T>(), source::<u32>()]))
    }
    let all = p.pick(&[("all", true), ("any", false)]).ok_or_else(|| p.unknown())?;
    let pair = matches!(p.operand(0), Some(Operand::Pair(..)));
    let form = match p.ty()? {
        Type::B32 => of::<u32>(p, all, pair),
        Type::B64 => of::<u64>(p, all, pair),
        _ => None,
    }
    .ok_or_else(|| p.unknown())?;
    Ok(Form { imm: checked(p), taint: Taint::All, sync: Sync::Members(1), ..form })
}

const REDUCTIONS: [(&str, u64); 6] = [("add", 0), ("min", 1), ("max", 2), ("and", 3), ("or", 4), ("xor", 5)];
/// `imm`: min and max of signed numbers.
const SIGNED: u64 = 8;

#[derive(Clone, Copy)]
struct Redux;

impl Body for Redux {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let (a, members) = (&regs.narrow[op.s[0] as usize], &regs.narrow[op.s[1] as usize]);
        check_members(op, members, mask)?;
        // Signed numbers order as unsigned ones with the top bit turned.
        let turn = if op.imm & SIGNED != 0 { 0x8000_0000 } else { 0 };
        let mut out = [0; LANES];
        groups(members, mask, |group| {
            let mut values = (0..LANES).filter(|&lane| group >> lane & 1 != 0).map(|lane| a[lane] ^ turn);
            let first = values.next().unwrap_or(0);
            let all = values.fold(first, |x, y| match op.imm & 7 {
                0 => x.wrapping_add(y),
                1 => x.min(y),
                2 => x.max(y),
                3 => x & y,
                4 => x | y,
                _ => x ^ y,
            });
            for lane in 0..LANES {
                out[lane] = if group >> lane & 1 != 0 { all ^ turn } else { out[lane] };
            }
        });
        set_row(&mut regs.narrow[op.d[0] as usize], &out, mask);
        Ok(())
    }
}

fn redux(p: &mut Parse<'_>) -> Result<Form, String> {
    p.need(80)?;
    let op = p.pick(&REDUCTIONS).ok_or_else(|| p.unknown())?;
    let signed = match (p.ty()?, op) {
        (Type::S32, 1 | 2) => SIGNED,
        (Type::U32 | Type::S32, 0..3) | (Type::B32, 3..) => 0,
        _ => return Err(p.unknown()),
    };
    let form = simple(p.once.op(Redux), vec![File::Narrow], vec![source::<u32>(); 2]);
    Ok(Form { imm: op | signed | checked(p), taint: Taint::All, sync: Sync::Members(1), ..form })
}

/// The lowest lane of each group is elected.
#[derive(Clone, Copy)]
struct Elect;

impl Body for Elect {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let members = &regs.narrow[op.s[0] as usize];
        check_members(op, members, mask)?;
        let mut out = [0; LANES];
        let mut leaders = 0;
        groups(members, mask, |group| {
            let leader = group.trailing_zeros();
            leaders |= 1 << leader;
            for lane in 0..LANES {
                out[lane] = if group >> lane & 1 != 0 { leader } else { out[lane] };
            }
        });
        set_row(&mut regs.narrow[op.d[0] as usize], &out, mask);
        set_predicate(regs, op.d[1], leaders, mask);
        Ok(())
    }
}

fn elect(p: &mut Parse<'_>) -> Result<Form, String> {
    p.need(90)?;
    let form = simple(p.once.op(Elect), vec![File::Narrow, File::Pred], vec![source::<u32>()]);
    Ok(Form { imm: checked(p), taint: Taint::All, sync: Sync::Members(0), ..form })
}
