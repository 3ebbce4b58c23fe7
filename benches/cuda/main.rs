//! `cargo bench --features cuda --bench cuda`: what the CUDA kernels reach on a GPU, beside streams over the same memory and the
//! goals. `-- bytes` counts on the simulated driver instead what attention moves; `cargo xtask bytes` makes a table of that.

#[path = "../../tests/support/gpu.rs"]
#[allow(dead_code)]
mod gpu;
#[path = "../../tests/support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../../tests/support/layer.rs"]
#[allow(dead_code)]
mod layer;
#[path = "../../tests/support/still.rs"]
#[allow(dead_code)]
mod still;

mod bytes;
mod cases;
mod time;

use std::process::ExitCode;

const HELP: &str = "\
Times the CUDA kernels on a GPU.

  --smoke       tiny sizes, to see that everything runs: times mean nothing
  --quick       one shape of attention, fewer repetitions
  --json        one JSON object instead of a table
  --device      only says what the driver and the device are
  bytes         counts what attention moves, on the simulated driver: a line of JSON a row
    --tokens N  tokens of a sequence in pages at least (4096), a multiple of 64
    --quick     heads of 128 channels, groups 4 and 8
";

/// What the command line asks for.
#[derive(Debug, Default)]
pub(crate) struct Options {
    bytes: bool,
    smoke: bool,
    quick: bool,
    json: bool,
    device: bool,
    tokens: Option<usize>,
}

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        let mut arguments = arguments;
        while let Some(a) = arguments.next() {
            match a.as_str() {
                "bytes" => options.bytes = true,
                "--smoke" => options.smoke = true,
                "--quick" => options.quick = true,
                "--json" => options.json = true,
                "--device" => options.device = true,
                "--tokens" => {
                    let n = arguments.next().unwrap_or_default();
                    let whole = n.parse().ok().filter(|n: &usize| *n > 0 && n.is_multiple_of(64));
                    options.tokens =
                        Some(whole.ok_or(format!("--tokens {n}: a multiple of 64 is needed, such as 4096"))?);
                }
                // What cargo adds.
                "--bench" => {}
                other => return Err(format!("unknown argument {other}\n\n{HELP}")),
            }
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    let done = Options::parse(std::env::args().skip(1)).and_then(|options| {
        if options.bytes {
            bytes::run(&options);
            return Ok(());
        }
        time::run(&options)
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
