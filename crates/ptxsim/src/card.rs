//! The simulated cards.

/// What a card has and allows. Sources: CUDA programming guide, table "Technical Specifications per Compute Capability".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// Compute capability: 80 for 8.0.
    pub cc: u32,
    /// Name, says `ptxsim`.
    pub name: &'static str,
    /// Multiprocessors.
    pub sms: u32,
    /// Shared memory of a multiprocessor in bytes.
    pub shared_per_sm: u32,
    /// Largest shared memory of a block after opting in, in bytes.
    pub shared_per_block_optin: u32,
    /// Threads of a multiprocessor.
    pub threads_per_sm: u32,
    /// Blocks of a multiprocessor.
    pub blocks_per_sm: u32,
    /// L2 cache in bytes.
    pub l2_bytes: u32,
    /// Memory of the card in bytes.
    pub memory_bytes: u64,
    /// Core clock in kHz.
    pub clock_khz: u32,
    /// Memory clock in kHz.
    pub memory_clock_khz: u32,
    /// Width of the memory bus in bits.
    pub bus_bits: u32,
}

/// Shared memory of a block without opting in.
pub const SHARED_PER_BLOCK: u32 = 48 << 10;
/// Shared memory of a block that the driver takes for itself (cc 8.0 and later).
pub const SHARED_RESERVED: u32 = 1 << 10;
/// 32-bit registers of a multiprocessor and of a block.
pub const REGISTERS_PER_SM: u32 = 64 << 10;
/// Threads of a block.
pub const THREADS_PER_BLOCK: u32 = 1024;

/// The cards that can be chosen.
pub const CARDS: [Card; 5] = [
    Card {
        cc: 80,
        name: "ptxsim A100 (sm_80)",
        sms: 108,
        shared_per_sm: 164 << 10,
        shared_per_block_optin: 163 << 10,
        threads_per_sm: 2048,
        blocks_per_sm: 32,
        l2_bytes: 40 << 20,
        memory_bytes: 40 << 30,
        clock_khz: 1_410_000,
        memory_clock_khz: 1_215_000,
        bus_bits: 5120,
    },
    Card {
        cc: 86,
        name: "ptxsim RTX 3090 (sm_86)",
        sms: 82,
        shared_per_sm: 100 << 10,
        shared_per_block_optin: 99 << 10,
        threads_per_sm: 1536,
        blocks_per_sm: 16,
        l2_bytes: 6 << 20,
        memory_bytes: 24 << 30,
        clock_khz: 1_695_000,
        memory_clock_khz: 9_751_000,
        bus_bits: 384,
    },
    Card {
        cc: 89,
        name: "ptxsim RTX 4090 (sm_89)",
        sms: 128,
        shared_per_sm: 100 << 10,
        shared_per_block_optin: 99 << 10,
        threads_per_sm: 1536,
        blocks_per_sm: 24,
        l2_bytes: 72 << 20,
        memory_bytes: 24 << 30,
        clock_khz: 2_520_000,
        memory_clock_khz: 10_501_000,
        bus_bits: 384,
    },
    Card {
        cc: 90,
        name: "ptxsim H100 (sm_90)",
        sms: 132,
        shared_per_sm: 228 << 10,
        shared_per_block_optin: 227 << 10,
        threads_per_sm: 2048,
        blocks_per_sm: 32,
        l2_bytes: 50 << 20,
        memory_bytes: 80 << 30,
        clock_khz: 1_980_000,
        memory_clock_khz: 2_619_000,
        bus_bits: 5120,
    },
    Card {
        cc: 120,
        name: "ptxsim RTX 5090 (sm_120)",
        sms: 170,
        shared_per_sm: 100 << 10,
        shared_per_block_optin: 99 << 10,
        threads_per_sm: 1536,
        blocks_per_sm: 24,
        l2_bytes: 96 << 20,
        memory_bytes: 32 << 30,
        clock_khz: 2_407_000,
        memory_clock_khz: 14_001_000,
        bus_bits: 512,
    },
];

impl Card {
    /// The card of a compute capability (80, 86, 89, 90 or 120).
    pub fn of(cc: u32) -> Option<&'static Self> {
        CARDS.iter().find(|c| c.cc == cc)
    }

    /// The compute capability that a text names: `80`, `8.0` or `sm_80`.
    ///
    /// # Errors
    /// A sentence with the cards that there are.
    pub fn parse(text: &str) -> Result<&'static Self, String> {
        let digits = text.trim().trim_start_matches("sm_").replace('.', "");
        digits.parse().ok().and_then(Self::of).ok_or_else(|| {
            let known: Vec<String> = CARDS.iter().map(|c| c.cc.to_string()).collect();
            format!("there is no card of compute capability {text}: choose one of {}", known.join(", "))
        })
    }
}
