//! Formats and layouts as kernels take them.

use super::abi::{self, QkvFormat, QkvOperand};
use crate::format::{Axis, Fit, Format, Fp8Kind, Granularity};
use crate::layout::{Operand, OperandLayout, PageLayout};

/// A format. Its parameters were checked: groups and passes fit 32 bits.
pub(crate) fn format(f: &Format) -> QkvFormat {
    let mut out = QkvFormat { bits: f.code_bits() as u32, ..QkvFormat::default() };
    match f {
        Format::F16 => out.kind = abi::QKV_KIND_F16,
        Format::Bf16 => out.kind = abi::QKV_KIND_BF16,
        Format::Fp8(p) => {
            out.kind = match p.kind {
                Fp8Kind::E4M3 => abi::QKV_KIND_E4M3,
                Fp8Kind::E5M2 => abi::QKV_KIND_E5M2,
            };
            out.granularity = match p.granularity {
                Granularity::Tensor => abi::QKV_SCALE_TENSOR,
                Granularity::Head => abi::QKV_SCALE_HEAD,
                Granularity::TokenHead => abi::QKV_SCALE_TOKEN_HEAD,
            };
        }
        Format::Affine(a) => {
            out.kind = abi::QKV_KIND_AFFINE;
            out.group = a.group as u32;
            out.per_channel = (a.axis == Axis::PerChannel).into();
            out.rotate = a.rotate.unwrap_or(0) as u32;
            out.center = a.center.into();
            match a.fit {
                Fit::MinMax => out.fit = abi::QKV_FIT_MIN_MAX,
                Fit::ErrorOptimal => out.fit = abi::QKV_FIT_ERROR_OPTIMAL,
                Fit::Hqq { p, beta, iterations } => {
                    out.fit = abi::QKV_FIT_HQQ;
                    out.iterations = iterations;
                    out.exponent = p - 1.0;
                    out.weight = 1.0 / beta;
                }
            }
        }
    }
    out
}

/// Where an operand lies in a page. Head dims are at most 512.
pub(crate) fn operand(operand: Operand, at: &OperandLayout) -> QkvOperand {
    QkvOperand {
        dim: at.dim as u32,
        codes: at.codes as u32,
        code_bytes: at.code_bytes as u32,
        row_bytes: at.row_bytes as u32,
        pairs: at.pairs as u32,
        pair_bytes: at.pair_bytes as u32,
        pair_count: at.pair_count as u32,
        value: (operand == Operand::Value).into(),
    }
}

/// Sections of one operand on their own: both begin at 0.
pub(crate) fn sections(f: &Format, which: Operand, dim: usize) -> QkvOperand {
    let layout = PageLayout::new(f, f, dim, dim);
    let at = if which == Operand::Key { layout.key } else { layout.value };
    QkvOperand { codes: 0, pairs: 0, ..operand(which, &at) }
}

/// Bytes between rows of codes in shared memory, for rows of this many bytes: the least that is 16 more than a multiple of 128,
/// so that 8 neighbouring rows begin in different banks.
pub(crate) fn code_stride(bytes: usize) -> u32 {
    (bytes.saturating_sub(16).next_multiple_of(128) + 16) as u32
}

#[cfg(test)]
mod tests {
    use super::code_stride;

    #[test]
    fn rows_of_codes_begin_in_different_banks() {
        for bytes in 1..1100 {
            let stride = code_stride(bytes) as usize;
            assert!(stride >= bytes && stride < bytes + 128 && stride / 4 % 32 == 4, "{bytes} {stride}");
        }
    }
}
