//! What the kernels rely on of the tensor cores, exactly: codes as subnormal f16, and products of bytes. The first tests to run
//! on a card that is new.

use crate::gpu::{Gpu, Random};
use half::f16;
use qkv::cuda::launch::{Product, check_mma};

/// `a` `[tiles][16][k]` by `b` `[tiles][k][8]`, both as bytes.
fn run(gpu: &Gpu, product: Product, a: &[u8], b: &[u8]) -> Vec<u32> {
    let (a_device, b_device) = (gpu.up(a), gpu.up(b));
    let mut d = gpu.zeros::<u32>(a.len() / 512 * 128);
    check_mma(&gpu.device, gpu.raw(), product, (&a_device).into(), (&b_device).into(), (&mut d).into())
        .unwrap();
    gpu.down(&d)
}

fn bytes(x: &[f16]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
}

/// Values of Q: small, large, negative, subnormal, and of full precision.
fn queries() -> Vec<f16> {
    let mut all: Vec<f16> = [1.0, -1.0, 0.5, 3.0, 65504.0, -65504.0, 0.1, 2047.0].map(f16::from_f32).into();
    all.extend([0x0001, 0x8001, 0x03ff, 0x0400, 0x3555, 0xb555, 0x7bff, 0x0000].map(f16::from_bits));
    all
}

#[test]
fn every_subnormal_f16_takes_part_exactly() {
    let gpu = Gpu::new();
    let q = queries();
    // One product a sum: codes on the diagonal, two tiles for 16 queries.
    let tiles = 1024 / 16 * (q.len() / 8);
    let (mut a, mut b) = (vec![f16::ZERO; tiles * 256], vec![f16::ZERO; tiles * 128]);
    let code = |tile: usize, row: usize| (tile / 2 * 16 + row) as u16;
    for tile in 0..tiles {
        for row in 0..16 {
            a[tile * 256 + row * 17] = f16::from_bits(code(tile, row));
            b[tile * 128 + row * 8..][..8].copy_from_slice(&q[tile % 2 * 8..][..8]);
        }
    }
    let d = run(&gpu, Product::F16, &bytes(&a), &bytes(&b));
    for (i, got) in d.iter().enumerate() {
        let (tile, row, column) = (i / 128, i / 8 % 16, i % 8);
        let q = q[tile % 2 * 8 + column];
        // 10 bits by 11 bits: exact in f32.
        let want = f32::from(code(tile, row)) * 2f32.powi(-24) * q.to_f32();
        let got = f32::from_bits(*got);
        assert!(got == want, "code {} by {q}: {got:e}, not {want:e}", code(tile, row));
    }
}

#[test]
fn sums_of_subnormals_are_exact_where_f32_holds_them() {
    let gpu = Gpu::new();
    let mut random = Random::new(3);
    // Codes of 10 bits by whole numbers of 8: sixteen products stay below 2^24 units.
    let tiles = 64;
    let codes: Vec<u16> = (0..tiles * 256).map(|_| random.below(1024) as u16).collect();
    let q: Vec<i32> = (0..tiles * 128).map(|_| random.below(511) as i32 - 255).collect();
    let a: Vec<f16> = codes.iter().map(|c| f16::from_bits(*c)).collect();
    let b: Vec<f16> = q.iter().map(|q| f16::from_f32(*q as f32)).collect();
    let d = run(&gpu, Product::F16, &bytes(&a), &bytes(&b));
    for (i, got) in d.iter().enumerate() {
        let (tile, row, column) = (i / 128, i / 8 % 16, i % 8);
        let sum: i32 = (0..16)
            .map(|k| i32::from(codes[tile * 256 + row * 16 + k]) * q[tile * 128 + k * 8 + column])
            .sum();
        assert_eq!(f32::from_bits(*got), sum as f32 * 2f32.powi(-24), "{tile} {row} {column}");
    }
}

#[test]
fn all_products_of_bytes_are_exact() {
    let gpu = Gpu::new();
    for product in [Product::U8S8, Product::U8U8] {
        let value = |b: u8| if product == Product::U8S8 { i32::from(b as i8) } else { i32::from(b) };
        // One product a sum: 16 of the first operand on the diagonal by 8 of the second.
        let tiles = 16 * 32;
        let (mut a, mut b) = (vec![0u8; tiles * 512], vec![0u8; tiles * 256]);
        let (first, second) =
            (|t: usize, r: usize| (t / 32 * 16 + r) as u8, |t: usize, c: usize| (t % 32 * 8 + c) as u8);
        for tile in 0..tiles {
            for row in 0..16 {
                // Every place of k once in two rows.
                let k = 2 * row + tile % 2;
                a[tile * 512 + row * 32 + k] = first(tile, row);
                for c in 0..8 {
                    b[tile * 256 + k * 8 + c] = second(tile, c);
                }
            }
        }
        for (i, got) in run(&gpu, product, &a, &b).iter().enumerate() {
            let (tile, row, column) = (i / 128, i / 8 % 16, i % 8);
            let (x, y) = (first(tile, row), second(tile, column));
            assert_eq!(*got as i32, i32::from(x) * value(y), "{product:?} {x} by {y}");
        }
        // Full sums, the largest among them.
        let mut random = Random::new(4);
        let tiles = 32;
        let mut draw = |n: usize, tile: usize| -> Vec<u8> {
            (0..n).map(|i| if i / tile == 0 { 255 } else { random.below(256) as u8 }).collect()
        };
        let (a, b) = (draw(tiles * 512, 512), draw(tiles * 256, 256));
        for (i, got) in run(&gpu, product, &a, &b).iter().enumerate() {
            let (tile, row, column) = (i / 128, i / 8 % 16, i % 8);
            let want: i32 = (0..32)
                .map(|k| i32::from(a[tile * 512 + row * 32 + k]) * value(b[tile * 256 + k * 8 + column]))
                .sum();
            assert_eq!(*got as i32, want, "{product:?} {tile} {row} {column}");
        }
    }
}
