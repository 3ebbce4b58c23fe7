//! A card without a driver: a module, its memory, and launches.

use ptxsim::card::Card;
use ptxsim::exec::launch::{Launch, launch};
use ptxsim::fault::{Fault, FaultKind};
use ptxsim::memory::GlobalMemory;
use ptxsim::options::Options;
use ptxsim::program::Image;
use ptxsim::stats::Stats;
use std::sync::Arc;

/// A loaded module.
pub(crate) struct Sim {
    pub memory: GlobalMemory,
    pub image: Image,
    pub card: &'static Card,
    pub options: Options,
}

/// An argument.
#[derive(Clone, Copy)]
pub(crate) enum Arg {
    Ptr(u64),
    I32(i32),
    I64(i64),
    /// A struct.
    Bytes([u8; 128]),
}

/// Numbers that can be copied to a device.
pub(crate) trait Plain: Copy {
    const BYTES: usize;
    fn bytes(self) -> Vec<u8>;
    fn of(bytes: &[u8]) -> Self;
}

macro_rules! plain {
    ($($t:ty)*) => {$(
        impl Plain for $t {
            const BYTES: usize = size_of::<$t>();
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn of(bytes: &[u8]) -> Self {
                <$t>::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}
plain!(u8 u16 u32 i32 u64 f32);

impl Sim {
    /// A file of `tests/kernels` on the card of a compute capability, with every check on.
    pub(crate) fn new(file: &str, cc: u32) -> Self {
        let path = format!("{}/tests/kernels/{file}.ptx", env!("CARGO_MANIFEST_DIR"));
        Self::of(&std::fs::read_to_string(path).unwrap(), cc)
    }

    /// PTX text.
    pub(crate) fn of(text: &str, cc: u32) -> Self {
        let card = Card::of(cc).unwrap();
        let memory = GlobalMemory::new(1 << 30);
        let image = Image::load(Arc::new(ptxsim::ptx::parse(text).unwrap()), &memory).unwrap();
        Self { memory, image, card, options: Options::default() }
    }

    /// Device memory that holds these numbers.
    pub(crate) fn put<T: Plain>(&self, data: &[T]) -> Arg {
        let address = self.memory.alloc((data.len() * T::BYTES) as u64).unwrap();
        self.memory.write(address, &data.iter().flat_map(|x| x.bytes()).collect::<Vec<_>>()).unwrap();
        Arg::Ptr(address)
    }

    /// Device memory that was never written.
    pub(crate) fn space(&self, bytes: usize) -> Arg {
        Arg::Ptr(self.memory.alloc(bytes as u64).unwrap())
    }

    /// What device memory holds.
    pub(crate) fn get<T: Plain>(&self, at: Arg, n: usize) -> Vec<T> {
        let Arg::Ptr(address) = at else { panic!("no pointer") };
        let mut bytes = vec![0; n * T::BYTES];
        self.memory.read(address, &mut bytes).unwrap();
        bytes.chunks_exact(T::BYTES).map(T::of).collect()
    }

    /// Launches in one dimension.
    pub(crate) fn run(&self, kernel: &str, grid: u32, block: u32, args: &[Arg]) -> Result<Stats, Box<Fault>> {
        self.launch(kernel, [grid, 1, 1], [block, 1, 1], 0, args)
    }

    /// Launches.
    pub(crate) fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic_shared: u32,
        args: &[Arg],
    ) -> Result<Stats, Box<Fault>> {
        self.launch_as(kernel, grid, block, dynamic_shared, args, false)
    }

    /// Launches, cooperatively or not.
    pub(crate) fn launch_as(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic_shared: u32,
        args: &[Arg],
        cooperative: bool,
    ) -> Result<Stats, Box<Fault>> {
        let kernel = self.image.kernel(kernel, self.card, &self.options).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(kernel.params.len(), args.len(), "arguments of {}", kernel.name);
        let mut params = vec![0; kernel.param_bytes as usize];
        for ((offset, bytes), arg) in kernel.params.iter().zip(args) {
            let value = match arg {
                Arg::Ptr(p) => p.to_le_bytes().to_vec(),
                Arg::I32(i) => i64::from(*i).to_le_bytes().to_vec(),
                Arg::I64(i) => i.to_le_bytes().to_vec(),
                Arg::Bytes(b) => b.to_vec(),
            };
            params[*offset as usize..][..*bytes as usize].copy_from_slice(&value[..*bytes as usize]);
        }
        let cluster = kernel.limits.cluster.unwrap_or([1; 3]);
        let shape = Launch { grid, block, cluster, dynamic_shared, cooperative, params, registers: 32 };
        launch(&kernel, &shape, &self.memory.view(), self.card, &self.options)
    }
}

/// The class of a fault that must come.
pub(crate) fn kind(result: Result<Stats, Box<Fault>>) -> FaultKind {
    match result {
        Ok(_) => panic!("the launch went well"),
        Err(f) => f.kind,
    }
}

/// A small generator of test data.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as u32
    }

    /// In -1 ... 1.
    pub(crate) fn float(&mut self) -> f32 {
        self.next() as f32 / (1u32 << 30) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// Every way in which results must not depend: no SIMD, one thread, shuffled order.
pub(crate) fn variants() -> Vec<Options> {
    let all = Options::default();
    vec![
        all,
        Options { simd: false, threads: 1, ..all },
        Options { shuffle_seed: Some(1), ..all },
        Options { shuffle_seed: Some(0x1234_5678_9abc), ..all },
        Options::unchecked(),
    ]
}
