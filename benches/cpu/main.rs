//! `cargo bench --bench cpu`: quantization and decoding on the CPU in elements a second, decode attention in
//! milliseconds.

mod attend;
mod quant;

use criterion::{criterion_group, criterion_main};

criterion_group! {
    name = benches;
    config = criterion::Criterion::default().sample_size(20);
    targets = quant::copy, quant::quantize, quant::dequantize, quant::fp8, attend::decode
}
criterion_main!(benches);
