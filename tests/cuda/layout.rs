//! Where bits lie: the device's functions against the host's, for every bit.

use crate::gpu::Gpu;
use qkv::cuda::PageFormat;
use qkv::cuda::launch::check_layout;
use qkv::layout::{Operand, Order, TILE, code_bit, pair_bytes};
use qkv::{Affine, Bits, Format, Fp8, Granularity};

/// Formats that differ in where things lie.
pub(crate) fn formats(dim: usize) -> Vec<Format> {
    let mut all = vec![Format::F16, Format::Bf16];
    for g in [Granularity::Tensor, Granularity::TokenHead] {
        all.extend([Format::Fp8(Fp8::e4m3(g)), Format::Fp8(Fp8::e5m2(g))]);
    }
    for bits in Bits::ALL {
        let per_token = [32, 64, dim].map(|g| Affine::per_token(bits, g));
        let per_channel = [32, 64].map(|g| Affine::per_channel(bits, g));
        all.extend(per_token.into_iter().chain(per_channel).map(Format::from));
    }
    all
}

#[test]
fn every_bit_lies_where_the_host_says() {
    let gpu = Gpu::new();
    let most = TILE * 256 * 16;
    let (mut bits, mut pairs) = (gpu.zeros::<u32>(most), gpu.zeros::<u32>(most));
    for dim in [64, 80, 96, 112, 128, 256] {
        // Codes of one width and family lie alike; every pair layout is looked at with narrow codes only.
        for format in formats(dim) {
            let page = PageFormat::new(format, format, dim, dim).unwrap();
            for (operand, at) in [(Operand::Key, page.layout().key), (Operand::Value, page.layout().value)] {
                for order in [Order::Row, Order::Fragment] {
                    let width = format.code_bits();
                    let (n, m) = (TILE * dim * width, TILE * dim * 2);
                    let mut b = bits.slice_mut(..n);
                    let mut p = pairs.slice_mut(..m);
                    check_layout(
                        &gpu.device,
                        gpu.raw(),
                        &page,
                        operand,
                        order,
                        (&mut b).into(),
                        (&mut p).into(),
                    )
                    .unwrap();
                    let got: Vec<u32> = gpu.stream.clone_dtoh(&bits.slice(..n)).unwrap();
                    let got_pairs: Vec<u32> = gpu.stream.clone_dtoh(&pairs.slice(..m)).unwrap();
                    for i in 0..TILE * dim {
                        let (token, channel) = (i / dim, i % dim);
                        for bit in 0..width {
                            let (byte, at_bit) = code_bit(&format, operand, &at, order, token, channel, bit);
                            let want = (8 * byte + at_bit) as u32;
                            assert_eq!(
                                got[i * width + bit],
                                want,
                                "{format:?} {operand:?} {order:?} {dim} {token} {channel} {bit}"
                            );
                        }
                        let want = pair_bytes(&format, operand, &at, order, token, channel)
                            .map_or([u32::MAX; 2], |p| p.map(|x| x as u32));
                        assert_eq!(
                            got_pairs[2 * i..2 * i + 2],
                            want,
                            "{format:?} {operand:?} {order:?} {dim} {token} {channel}"
                        );
                    }
                }
            }
        }
    }
}
