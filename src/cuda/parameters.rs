//! Formats and page geometry as kernels take them.

use super::abi::*;
use crate::format::{Axis, Fit, Format, Fp8Kind, Granularity};
use crate::layout::{Operand, OperandLayout, PageLayout};

/// A format's parameters. Those of its fit are computed here as the CPU computes them.
pub(crate) fn format(f: &Format) -> QkvFormat {
    let empty = QkvFormat::default();
    match f {
        Format::F16 => QkvFormat { kind: QKV_KIND_F16, bits: 16, ..empty },
        Format::Bf16 => QkvFormat { kind: QKV_KIND_BF16, bits: 16, ..empty },
        Format::Fp8(f) => QkvFormat {
            kind: match f.kind {
                Fp8Kind::E4M3 => QKV_KIND_E4M3,
                Fp8Kind::E5M2 => QKV_KIND_E5M2,
            },
            bits: 8,
            granularity: match f.granularity {
                Granularity::Tensor => QKV_SCALE_TENSOR,
                Granularity::Head => QKV_SCALE_HEAD,
                Granularity::TokenHead => QKV_SCALE_TOKEN_HEAD,
            },
            ..empty
        },
        Format::Affine(a) => {
            let (fit, exponent, weight, iterations) = match a.fit {
                Fit::MinMax => (QKV_FIT_MIN_MAX, 0.0, 0.0, 0),
                Fit::ErrorOptimal => (QKV_FIT_ERROR_OPTIMAL, 0.0, 0.0, 0),
                Fit::Hqq { p, beta, iterations } => (QKV_FIT_HQQ, p - 1.0, 1.0 / beta, iterations),
            };
            QkvFormat {
                kind: QKV_KIND_AFFINE,
                bits: a.bits.get() as u32,
                group: a.group as u32,
                per_channel: u32::from(a.axis == Axis::PerChannel),
                fit,
                iterations,
                exponent,
                weight,
                rotate: a.rotate.unwrap_or(0) as u32,
                center: u32::from(a.center),
                ..empty
            }
        }
    }
}

/// An operand's place in a page; `value` tells keys from values. Sections are far below 4 GiB: heads have 512 channels at most.
pub(crate) fn operand(at: &OperandLayout, value: bool) -> QkvOperand {
    QkvOperand {
        dim: at.dim as u32,
        codes: at.codes as u32,
        code_bytes: at.code_bytes as u32,
        row_bytes: at.row_bytes as u32,
        pairs: at.pairs as u32,
        pair_bytes: at.pair_bytes as u32,
        pair_count: at.pair_count as u32,
        value: u32::from(value),
    }
}

/// Sections of one operand on their own: both begin at 0.
pub(crate) fn sections(f: &Format, which: Operand, dim: usize) -> QkvOperand {
    let layout = PageLayout::new(f, f, dim, dim);
    let (at, value) = if which == Operand::Key { (layout.key, false) } else { (layout.value, true) };
    QkvOperand { codes: 0, pairs: 0, ..operand(&at, value) }
}

/// Bytes between the rows of a code buffer in shared memory: `code_stride_for` of `kernels/encode.cuh`.
pub(crate) const fn code_stride(bytes: usize) -> usize {
    least_with(bytes, 128, 16)
}

/// f32 words between the rows of a tile in shared memory: `unit_stride` of `kernels/encode.cuh`.
pub(crate) fn unit_stride(f: &Format, channels: usize) -> usize {
    match f.as_affine() {
        Some(a) if a.axis == Axis::PerChannel => channel_stride(channels, a.group),
        _ => row_stride(channels),
    }
}

/// The same per token.
pub(crate) const fn row_stride(channels: usize) -> usize {
    least_with(channels, 32, 16)
}

/// The same per channel, where the lanes of a warp are tokens of one or several groups.
pub(crate) const fn channel_stride(channels: usize, group: usize) -> usize {
    let rest = match group {
        0..=32 => 8,
        33..=64 => 4,
        65..=128 => 2,
        _ => 1,
    };
    least_with(channels, 32, rest)
}

/// The least number that is at least `n` and is `rest` modulo `step`.
const fn least_with(n: usize, step: usize, rest: usize) -> usize {
    if n <= rest { rest } else { (n - rest).div_ceil(step) * step + rest }
}
