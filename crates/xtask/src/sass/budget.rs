//! What the kernels may cost, and what peers' kernels do.
//!
//! Cost is counted in lane-instructions per element of keys and values: 32 times the instructions that a warp executes for a page
//! of 64 tokens of one kv head, all of the loop included, divided by the page's elements. It is asserted for heads of
//! 128 channels on the newest architecture that the budget was made for, and with [`OLDER_MAY`] more on sm_80.

/// What an architecture allows beyond the goal: sm_80 has no instruction for some conversions.
pub const OLDER_MAY: f64 = 0.04;
/// Asserted exactly, and with [`OLDER_MAY`].
pub const ASSERTED: (u32, u32) = (90, 80);

/// Kernels of an architecture at most: they are what the build's time and the images' size consist of.
pub const MOST_DECODE: usize = 48;
/// The same of prefill.
pub const MOST_PREFILL: usize = 16;

/// Warps that must be resident on a multiprocessor.
pub const LEAST_WARPS: u32 = 8;
/// Compute capabilities that this is asked of.
pub const CAPABILITIES: [u32; 5] = [80, 86, 89, 90, 120];

/// Registers of a thread at most: of kernels for up to four rows with one pair a token, and of others.
pub const FEW_REGISTERS: u32 = 128;
/// See [`FEW_REGISTERS`].
pub const MOST_REGISTERS: u32 = 168;
/// Of kernels for 9 to 16 rows: what two blocks of 128 threads leave for each, eight warps a multiprocessor. Sums and scores alone are
/// 96 at 128 channels.
pub const WIDE_REGISTERS: u32 = 255;

/// A pair of formats and the kernels that read it, for heads of 128 channels.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The formats.
    pub title: &'static str,
    /// Names of kernels: `qkv_attend_FAMILY_integer_128` and `.._half_128`. `None`: not made.
    pub family: Option<&'static str>,
    /// At most this on the integer path (up to 4 rows).
    pub integer: Option<f64>,
    /// At most this on the f16 path (up to 8 rows).
    pub half: Option<f64>,
    /// The latter before sm_89, if another.
    pub half_before_89: Option<f64>,
    /// Whether it is the cost of the way with a scale for each token and head (`Decode::scaled`), through the same kernel. Before sm_89 that
    /// has no goal (docs/decisions.md, "E4M3 before sm_89").
    pub scaled: bool,
    /// What peers' loops cost for one query head.
    pub peers: &'static str,
}

const ROW: Row = Row {
    title: "",
    family: None,
    integer: None,
    half: None,
    half_before_89: None,
    scaled: false,
    peers: "",
};

/// The rows.
pub const ROWS: [Row; 10] = [
    Row {
        title: "int8, one pair a token",
        family: Some("int8"),
        integer: Some(0.65),
        half: Some(1.18),
        peers: "llama.cpp q8_0 6.97",
        ..ROW
    },
    Row {
        title: "int4, one pair a token",
        family: Some("token4"),
        integer: Some(0.80),
        half: Some(1.25),
        peers: "llama.cpp q4_0 8.54",
        ..ROW
    },
    Row {
        title: "int2, one pair a token",
        family: Some("token2"),
        integer: Some(0.78),
        half: Some(1.15),
        ..ROW
    },
    Row {
        title: "int1, one pair a token",
        family: Some("token1"),
        integer: Some(0.78),
        half: Some(1.15),
        ..ROW
    },
    Row {
        title: "4-bit default: K int4-c64, V int4-t64",
        family: Some("default4"),
        integer: Some(1.15),
        half: Some(1.48),
        peers: "llama.cpp q4_0 8.54, BitDecoding's way 2.13",
        ..ROW
    },
    Row {
        title: "2-bit default: K int2-c32, V int2-t32",
        family: Some("default2"),
        integer: Some(1.50),
        half: Some(1.80),
        ..ROW
    },
    Row {
        title: "int8, groups of 32",
        family: Some("group8"),
        integer: Some(1.05),
        half: Some(1.70),
        peers: "llama.cpp q8_0 6.97",
        ..ROW
    },
    Row {
        title: "e4m3, a scale for a head or all",
        family: Some("e4m3"),
        half: Some(1.25),
        half_before_89: Some(2.5),
        peers: "FlashInfer e4m3 5.9, before sm_89 20.7",
        ..ROW
    },
    Row {
        title: "e4m3, a scale for a token and head",
        family: Some("e4m3"),
        half: Some(1.25),
        scaled: true,
        ..ROW
    },
    Row { title: "f16", family: Some("f16"), peers: "llama.cpp 2.86, FlashInfer 4.16", ..ROW },
];

/// Instructions of prefill's main loop for each product of the tensor cores, at most, and what peers' take: with exact rows of f16,
/// and with int4 pages, which are decoded in the same loop. In blocks of eight warps, which launches have that fill a device.
pub const PREFILL: [(f64, &str); 2] =
    [(5.5, "FlashInfer f16 5.1"), (6.5, "FlashInfer e4m3 19.7 on sm_80, 11.5 on sm_90")];

/// The prefill kernel that this is asserted of; others are printed.
pub const PREFILL_KERNEL: &str = "qkv_prefill_128_128";

impl Row {
    /// The goal of a path on an architecture.
    pub fn goal(&self, integer: bool, architecture: u32) -> Option<f64> {
        match (integer, self.half_before_89) {
            (true, _) => self.integer,
            (false, _) if self.scaled && architecture < 89 => None,
            (false, Some(older)) if architecture < 89 => Some(older),
            (false, _) => self.half,
        }
    }

    /// The name of its kernel.
    pub fn kernel(&self, integer: bool) -> Option<String> {
        let path = if integer { "integer" } else { "half" };
        Some(format!("qkv_attend_{}_{path}_128", self.family?))
    }
}

/// Whether the goals of an architecture are asserted, and how much more it may take.
pub fn slack(architecture: u32) -> Option<f64> {
    let (exact, older) = ASSERTED;
    if architecture == exact {
        Some(0.0)
    } else if architecture == older {
        Some(OLDER_MAY)
    } else {
        None
    }
}

/// Whether a kernel takes 9 to 16 rows, by its name.
pub fn is_wide(kernel: &str) -> bool {
    kernel.contains("_wide_")
}

/// Registers that a kernel may use, by its name.
pub fn registers(kernel: &str) -> u32 {
    let one_pair = ["int8", "token4", "token2", "token1"];
    let few =
        kernel.contains("_integer_") && one_pair.iter().any(|f| kernel.contains(&format!("attend_{f}_")));
    if few {
        FEW_REGISTERS
    } else if is_wide(kernel) {
        WIDE_REGISTERS
    } else {
        MOST_REGISTERS
    }
}

/// What a multiprocessor has.
struct Multiprocessor {
    shared: u32,
    warps: u32,
    blocks: u32,
}

fn multiprocessor(capability: u32) -> Option<Multiprocessor> {
    let of = |kilobytes: u32, warps, blocks| Some(Multiprocessor { shared: kilobytes << 10, warps, blocks });
    match capability {
        80 => of(164, 64, 32),
        86 => of(100, 48, 16),
        89 => of(100, 48, 24),
        90 | 100 => of(228, 64, 32),
        120 => of(100, 48, 24),
        _ => None,
    }
}

/// Blocks of 128 threads that fit a multiprocessor; `None` for one that is not known.
pub fn blocks(capability: u32, registers: u32, shared: u32) -> Option<u32> {
    const REGISTERS: u32 = 65_536;
    const WARPS: u32 = 4;
    // A block's shared memory beside its own.
    const RESERVED: u32 = 1024;
    let m = multiprocessor(capability)?;
    let of_registers = REGISTERS / (registers.max(1) * 32).next_multiple_of(256) / WARPS;
    Some((m.shared / (shared + RESERVED)).min(m.warps / WARPS).min(m.blocks).min(of_registers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_the_occupancy_calculator_says() {
        // By registers, by shared memory, by warps.
        assert_eq!(blocks(80, 246, 0), Some(2));
        assert_eq!(blocks(90, 168, 25_376), Some(3));
        assert_eq!(blocks(86, 128, 34_080), Some(2));
        assert_eq!(blocks(120, 32, 1024), Some(12));
        assert_eq!(blocks(75, 32, 0), None);
    }

    #[test]
    fn registers_follow_the_formats() {
        assert_eq!(registers("qkv_attend_token4_integer_128"), FEW_REGISTERS);
        assert_eq!(registers("qkv_attend_token4_half_128"), MOST_REGISTERS);
        assert_eq!(registers("qkv_attend_default4_integer_128"), MOST_REGISTERS);
        assert_eq!(registers("qkv_attend_int8_wide_128"), WIDE_REGISTERS);
    }

    #[test]
    fn goals_are_of_a_path_and_an_architecture() {
        let e4m3 = ROWS[7];
        assert_eq!(
            (e4m3.goal(true, 90), e4m3.goal(false, 90), e4m3.goal(false, 80)),
            (None, Some(1.25), Some(2.5))
        );
        assert_eq!(ROWS[0].kernel(true).unwrap(), "qkv_attend_int8_integer_128");
        assert_eq!((slack(90), slack(80), slack(89)), (Some(0.0), Some(OLDER_MAY), None));
    }
}
