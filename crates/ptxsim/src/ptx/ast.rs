//! A parsed PTX module.

use std::fmt;
use std::sync::Arc;

/// A module: one `.ptx` file, or one PTX entry of a fatbin.
#[derive(Debug, Clone, Default)]
pub struct Module {
    /// `.version`, for example `(9, 0)`.
    pub version: (u32, u32),
    /// `.target`.
    pub target: Target,
    /// `.address_size`: 64, or 32 (refused when loaded).
    pub address_size: u32,
    /// Paths of `.file` directives: index and path.
    pub files: Vec<(u32, String)>,
    /// Module-scope variables in order.
    pub variables: Vec<Variable>,
    /// Functions with their bodies, kernels among them, in order.
    pub functions: Vec<Function>,
}

/// `.target sm_90a` is `{ arch: 90, variant: Variant::Arch }`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Target {
    /// 80, 86, 89, 90, 120 …
    pub arch: u32,
    /// Suffix of the architecture.
    pub variant: Variant,
}

/// Suffix of a target architecture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Variant {
    /// Runs on this and every later architecture.
    #[default]
    Plain,
    /// `a`: this architecture only.
    Arch,
    /// `f`: this family (same major, same or later minor).
    Family,
}

impl Target {
    /// Whether a card of compute capability `cc` (90 for 9.0) runs code of this target.
    pub fn runs_on(self, cc: u32) -> bool {
        match self.variant {
            Variant::Plain => self.arch <= cc,
            Variant::Arch => self.arch == cc,
            Variant::Family => self.arch <= cc && self.arch / 10 == cc / 10,
        }
    }
}

/// State spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// `.reg`
    Reg,
    /// `.const`
    Const,
    /// `.global`
    Global,
    /// `.local`
    Local,
    /// `.param`, of a kernel, a function or a call
    Param,
    /// `.shared`
    Shared,
}

/// Fundamental and packed types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are PTX's")]
pub enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    BF16,
    BF16x2,
    TF32,
    E4M3,
    E5M2,
    E4M3x2,
    E5M2x2,
    F32,
    F64,
    /// 4-bit integers of `mma`
    S4,
    /// 4-bit integers of `mma`
    U4,
    /// single bits of `mma`
    B1,
    /// packed 16-bit integers of ISA 8.0 SIMD (`add.u16x2`)
    U16x2,
    S16x2,
    /// two packed f32 (`fma.rn.f32x2`, sm_100)
    F32x2,
}

impl Type {
    /// A type by its name without the dot.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b1" => Self::B1,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "b128" => Self::B128,
            "u4" => Self::U4,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s4" => Self::S4,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::BF16,
            "bf16x2" => Self::BF16x2,
            "tf32" => Self::TF32,
            "e4m3" => Self::E4M3,
            "e5m2" => Self::E5M2,
            "e4m3x2" => Self::E4M3x2,
            "e5m2x2" => Self::E5M2x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "u16x2" => Self::U16x2,
            "s16x2" => Self::S16x2,
            "f32x2" => Self::F32x2,
            _ => return None,
        })
    }

    /// Bits of a value. A predicate has 1.
    pub const fn bits(self) -> u32 {
        match self {
            Self::Pred | Self::B1 => 1,
            Self::S4 | Self::U4 => 4,
            Self::B8 | Self::U8 | Self::S8 | Self::E4M3 | Self::E5M2 => 8,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::BF16 | Self::E4M3x2 | Self::E5M2x2 => 16,
            Self::B32
            | Self::U32
            | Self::S32
            | Self::F32
            | Self::F16x2
            | Self::BF16x2
            | Self::TF32
            | Self::U16x2
            | Self::S16x2 => 32,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 | Self::F32x2 => 64,
            Self::B128 => 128,
        }
    }

    /// Bytes in memory, at least 1.
    pub const fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// Whether integers of this type are signed.
    pub const fn is_signed(self) -> bool {
        matches!(self, Self::S4 | Self::S8 | Self::S16 | Self::S32 | Self::S64 | Self::S16x2)
    }
}

/// A variable in memory: module scope, a parameter, or local to a function.
#[derive(Debug, Clone)]
pub struct Variable {
    /// Its name; unique in its scope (the parser renames those of nested scopes that would clash).
    pub name: String,
    /// Where it lives.
    pub space: Space,
    /// Element type.
    pub ty: Type,
    /// Alignment in bytes, natural if none was given.
    pub align: u32,
    /// Bytes. 0 for `.extern .shared x[]`.
    pub bytes: u64,
    /// Whether it is an array (`.b8 x[16]`).
    pub array: bool,
    /// `.extern`: defined elsewhere, or dynamic shared memory.
    pub external: bool,
    /// Initial contents; bytes beyond them are zero. `None` = none given.
    pub init: Option<Init>,
}

/// Initial contents of a variable.
#[derive(Debug, Clone, Default)]
pub struct Init {
    /// Little-endian bytes from offset 0.
    pub bytes: Vec<u8>,
    /// Addresses to put over `bytes`: offset, size in bytes, symbol, addend, and whether it is a generic address.
    pub relocations: Vec<Relocation>,
}

/// An address in an initialiser.
#[derive(Debug, Clone)]
pub struct Relocation {
    /// Byte offset in the variable.
    pub offset: u64,
    /// Bytes written: 8, or 4 or 1 with `mask()` forms.
    pub bytes: u32,
    /// Whose address.
    pub symbol: String,
    /// Added to it.
    pub addend: i64,
    /// Shift of `mask(0xff00) symbol`: right-shift applied before the low `bytes` are stored.
    pub shift: u32,
}

/// A register of a function. Its index in [`Function::registers`] is how instructions name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Register {
    /// `%r12`, for messages.
    pub name: String,
    /// Its declared type.
    pub ty: Type,
}

/// Index into [`Function::registers`].
pub type RegisterId = u32;

/// `.entry` or `.func`.
#[derive(Debug, Clone, Default)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// `.entry`.
    pub kernel: bool,
    /// `.extern`, or a declaration without body: `body` is empty.
    pub declaration: bool,
    /// Return parameters of a `.func`.
    pub returns: Vec<Variable>,
    /// Parameters in order.
    pub params: Vec<Variable>,
    /// All registers, those of nested scopes too; parameters declared as `.reg` first.
    pub registers: Vec<Register>,
    /// `.shared`, `.local`, `.param`, `.const` and `.global` variables declared inside, in order.
    pub locals: Vec<Variable>,
    /// Instructions in order.
    pub body: Vec<Instruction>,
    /// Labels: name and the index of the instruction they stand before (may be `body.len()`).
    pub labels: Vec<(String, usize)>,
    /// `.branchtargets` lists: name and label names.
    pub branch_targets: Vec<(String, Vec<String>)>,
    /// `.callprototype` declarations: name, sizes in bytes of return values and parameters.
    pub prototypes: Vec<Prototype>,
    /// `.maxntid`, `.reqntid`, `.minnctapersm`, `.maxnreg`, cluster dims.
    pub limits: Limits,
    /// Line of its name in the PTX text, from 1.
    pub line: u32,
}

/// A `.callprototype`.
#[derive(Debug, Clone)]
pub struct Prototype {
    /// Its label.
    pub name: String,
    /// Return parameters.
    pub returns: Vec<Variable>,
    /// Parameters.
    pub params: Vec<Variable>,
}

/// Performance directives of a kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// `.maxntid x, y, z`
    pub max_threads: Option<[u32; 3]>,
    /// `.reqntid x, y, z`
    pub required_threads: Option<[u32; 3]>,
    /// `.minnctapersm`
    pub min_blocks: Option<u32>,
    /// `.maxnreg`
    pub max_registers: Option<u32>,
    /// `.explicitcluster` or `.reqnctapercluster` given
    pub explicit_cluster: bool,
    /// `.reqnctapercluster x, y, z`
    pub cluster: Option<[u32; 3]>,
}

/// Where an instruction comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Location {
    /// Line in the PTX text, from 1.
    pub ptx_line: u32,
    /// Index of a `.file` directive, 0 = unknown.
    pub file: u32,
    /// Line in that file (from `.loc`; the outermost file of an inlined function is not followed).
    pub line: u32,
}

/// `@p` or `@!p`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guard {
    /// A predicate register.
    pub register: RegisterId,
    /// `@!p`.
    pub negated: bool,
}

/// One instruction.
#[derive(Debug, Clone)]
pub struct Instruction {
    /// `@p`.
    pub guard: Option<Guard>,
    /// First part of the name: `mad` of `mad.lo.s32`.
    pub opcode: Arc<str>,
    /// The other parts without dots, in order: `["lo", "s32"]`; `"shared::cta"` is one part.
    pub modifiers: Vec<Arc<str>>,
    /// Operands in order. `d|p` is one operand.
    pub operands: Vec<Operand>,
    /// Where it is.
    pub location: Location,
}

impl Instruction {
    /// Whether it has this modifier, anywhere.
    pub fn has(&self, modifier: &str) -> bool {
        self.modifiers.iter().any(|m| &**m == modifier)
    }

    /// Its types in order.
    pub fn types(&self) -> impl Iterator<Item = Type> + '_ {
        self.modifiers.iter().filter_map(|m| Type::parse(m))
    }

    /// Its first type.
    pub fn ty(&self) -> Option<Type> {
        self.types().next()
    }

    /// `mad.lo.s32`
    pub fn name(&self) -> String {
        let mut name = self.opcode.to_string();
        for m in &self.modifiers {
            name.push('.');
            name.push_str(m);
        }
        name
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// An operand.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    /// A register.
    Register(RegisterId),
    /// `!p`
    Not(RegisterId),
    /// An integer literal (two's complement; `0x…U` and decimal alike).
    Integer(i128),
    /// `0f3F800000`: bits of an f32.
    F32(u32),
    /// `0d3FF0000000000000`, or a decimal literal such as `0.`: bits of an f64.
    F64(u64),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `d|p`
    Pair(Box<Operand>, Box<Operand>),
    /// `[base + offset]`
    Address(Address),
    /// `[map, {c0, c1}]` or `[map, {c0, c1}, {o0}]`: a tensor map's address and coordinates.
    Tensor(Address, Vec<Vec<Operand>>),
    /// `symbol` or `symbol + 4`: a variable or a function as value.
    Symbol(String, i64),
    /// `%tid.x`
    Special(Special),
    /// `_`
    Sink,
    /// A label: index into [`Function::labels`].
    Label(usize),
    /// `(a, b)` of a call.
    List(Vec<Operand>),
}

/// `[base + offset]`
#[derive(Debug, Clone, PartialEq)]
pub struct Address {
    /// What the offset is added to.
    pub base: Base,
    /// In bytes.
    pub offset: i64,
}

/// Base of an address.
#[derive(Debug, Clone, PartialEq)]
pub enum Base {
    /// A register.
    Register(RegisterId),
    /// A variable or parameter.
    Symbol(String),
    /// Nothing: the offset is the address.
    Absolute,
}

/// Special registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are PTX's")]
pub enum Special {
    /// 0 = x, 1 = y, 2 = z
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    ClusterId(u8),
    NClusterId(u8),
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    ClusterCtarank,
    ClusterNctarank,
    IsExplicitCluster,
    Laneid,
    Warpid,
    Nwarpid,
    Smid,
    Nsmid,
    Gridid,
    LanemaskEq,
    LanemaskLe,
    LanemaskLt,
    LanemaskGe,
    LanemaskGt,
    Clock,
    ClockHi,
    Clock64,
    Globaltimer,
    GlobaltimerLo,
    GlobaltimerHi,
    DynamicSmemSize,
    TotalSmemSize,
    AggrSmemSize,
    ReservedSmemOffset(u8),
    CurrentGraphExec,
    /// `%envreg0` …: set by the driver
    Envreg(u8),
    /// `%pm0` …: read as 0
    Other,
    /// `WARP_SZ`
    WarpSize,
}

impl Function {
    /// The name of a register, for messages.
    pub fn register_name(&self, id: RegisterId) -> &str {
        self.registers.get(id as usize).map_or("%?", |r| &r.name)
    }

    /// The kernel's total parameter bytes, laid out in order with their alignment.
    pub fn param_bytes(&self) -> u64 {
        self.param_offsets().last().map_or(0, |(offset, bytes)| offset + bytes)
    }

    /// Offset and size of each parameter.
    pub fn param_offsets(&self) -> Vec<(u64, u64)> {
        let mut at = 0u64;
        self.params
            .iter()
            .map(|p| {
                at = at.next_multiple_of(u64::from(p.align.max(1)));
                let offset = at;
                at += p.bytes;
                (offset, p.bytes)
            })
            .collect()
    }
}
