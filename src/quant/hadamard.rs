//! Block Hadamard rotation: a row's blocks of 32, 64 or 128 channels are multiplied with the orthonormal
//! Hadamard matrix. It is symmetric and so its own inverse; it spreads outlier channels over their block.
//!
//! The additions run as butterflies with strides `block/2`, `block/4`, … 1, then one product with
//! `1/sqrt(block)` rounded to f32. That order is part of the format: every backend follows it.

use crate::error::{Error, Result};
use crate::simd::dispatch;

/// Checks that a row of `dim` channels consists of whole blocks.
pub(crate) fn check_block(block: usize, dim: usize) -> Result<()> {
    let no = |why: String| Err(Error::Unsupported { what: "rotate", got: block.to_string(), why });
    if ![32, 64, 128].contains(&block) {
        return no("rotation blocks are 32, 64 or 128 channels".into());
    }
    if dim == 0 || !dim.is_multiple_of(block) {
        return no(format!("{dim} channels are no multiple of the block; use a smaller block, or none"));
    }
    Ok(())
}

/// One stage with a fixed stride: the inner loop then has a constant length.
#[inline(always)]
fn stage<const S: usize>(row: &mut [f32]) {
    for pair in row.chunks_exact_mut(2 * S) {
        let (a, b) = pair.split_at_mut(S);
        for i in 0..S {
            let (x, y) = (a[i], b[i]);
            a[i] = x + y;
            b[i] = x - y;
        }
    }
}

#[inline(always)]
fn rotate_body<const FMA: bool>(row: &mut [f32], block: usize) {
    if block >= 128 {
        stage::<64>(row);
    }
    if block >= 64 {
        stage::<32>(row);
    }
    stage::<16>(row);
    stage::<8>(row);
    stage::<4>(row);
    stage::<2>(row);
    stage::<1>(row);
    let factor = 1.0 / (block as f32).sqrt();
    for x in row {
        *x *= factor;
    }
}

dispatch! {
    /// Rotates every block of a row in place. `row` consists of whole blocks of 32, 64 or 128 channels.
    pub(crate) fn rotate(row: &mut [f32], block: usize) = rotate_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;

    #[test]
    fn equals_the_matrix_and_is_its_own_inverse_on_every_level() {
        for block in [32usize, 64, 128] {
            let x: Vec<f32> = (0..2 * block).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
            let mut first: Option<Vec<f32>> = None;
            for &isa in Isa::available() {
                let mut y = x.clone();
                rotate(isa, &mut y, block);
                for b in 0..2 {
                    for i in 0..block {
                        let want: f64 = (0..block)
                            .map(|j| {
                                let sign = if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                                sign * x[b * block + j] as f64
                            })
                            .sum::<f64>()
                            / (block as f64).sqrt();
                        assert!((y[b * block + i] as f64 - want).abs() < 1e-5, "{block} {i}");
                    }
                }
                assert_eq!(first.get_or_insert_with(|| y.clone()), &y, "{isa:?}");
                rotate(isa, &mut y, block);
                assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-5));
            }
        }
    }

    #[test]
    fn odd_blocks_are_refused() {
        assert!(check_block(32, 96).is_ok());
        assert!(check_block(64, 96).is_err());
        assert!(check_block(16, 64).is_err());
        assert!(check_block(64, 0).is_err());
    }
}
