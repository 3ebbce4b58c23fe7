//! Exact rows: windows and sinks of all layers, seats and heads in one allocation of the window dtype.

use crate::quant::affine::LIMIT;
use crate::quant::page::clamp_finite;
use crate::tensor::{Data, Dtype};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// `[layer][seat][head][row][dim]`.
#[derive(Debug)]
pub(super) struct RowStore {
    data: RowData,
    shape: RowShape,
}

#[derive(Debug, Clone, Copy)]
struct RowShape {
    seats: usize,
    heads: usize,
    rows: usize,
    dim: usize,
}

#[derive(Debug)]
enum RowData {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
}

impl RowShape {
    /// First element of the rows of (layer, seat, head).
    fn at(&self, layer: usize, seat: usize, head: usize) -> usize {
        ((layer * self.seats + seat) * self.heads + head) * self.rows * self.dim
    }

    fn head_len(&self) -> usize {
        self.rows * self.dim
    }
}

impl RowStore {
    pub(super) fn new(
        dtype: Dtype,
        layers: usize,
        seats: usize,
        heads: usize,
        rows: usize,
        dim: usize,
    ) -> Self {
        let n = layers * seats * heads * rows * dim;
        let data = match dtype {
            Dtype::F16 => RowData::F16(vec![f16::ZERO; n]),
            Dtype::Bf16 => RowData::Bf16(vec![bf16::ZERO; n]),
            Dtype::F32 => RowData::F32(vec![0.0; n]),
        };
        Self { data, shape: RowShape { seats, heads, rows, dim } }
    }

    pub(super) fn rows(&self) -> usize {
        self.shape.rows
    }

    /// All rows of (layer, seat, head), `[rows][dim]`.
    pub(super) fn head(&self, layer: usize, seat: usize, head: usize) -> Data<'_> {
        let (at, n) = (self.shape.at(layer, seat, head), self.shape.head_len());
        match &self.data {
            RowData::F16(x) => Data::F16(&x[at..at + n]),
            RowData::Bf16(x) => Data::Bf16(&x[at..at + n]),
            RowData::F32(x) => Data::F32(&x[at..at + n]),
        }
    }

    /// Row `row` of (layer, seat, head) as f32.
    pub(super) fn read(&self, layer: usize, seat: usize, head: usize, row: usize, out: &mut [f32]) {
        read_row(self.head(layer, seat, head), row, out);
    }

    /// Writes row `row`, rounded to the dtype. Finite values that an f16 does not hold become the largest it does;
    /// returns how many.
    pub(super) fn write(&mut self, layer: usize, seat: usize, head: usize, row: usize, x: &[f32]) -> usize {
        let at = self.shape.at(layer, seat, head) + row * self.shape.dim;
        match &mut self.data {
            RowData::F16(d) => {
                let d = &mut d[at..at + x.len()];
                d.convert_from_f32_slice(x);
                if x.iter().any(|x| x.abs() > LIMIT) {
                    return saturate(d, x);
                }
            }
            RowData::Bf16(d) => d[at..at + x.len()].convert_from_f32_slice(x),
            RowData::F32(d) => d[at..at + x.len()].copy_from_slice(x),
        }
        0
    }

    /// Copies all rows of a seat to another, in all layers.
    pub(super) fn copy_seat(&mut self, layers: usize, from: usize, to: usize) {
        let n = self.shape.heads * self.shape.head_len();
        for layer in 0..layers {
            let (f, t) = (self.shape.at(layer, from, 0), self.shape.at(layer, to, 0));
            match &mut self.data {
                RowData::F16(d) => d.copy_within(f..f + n, t),
                RowData::Bf16(d) => d.copy_within(f..f + n, t),
                RowData::F32(d) => d.copy_within(f..f + n, t),
            }
        }
    }

    /// Rounds values to the dtype of the rows, in place: what "exact" means for this cache. Returns how many finite
    /// ones were clamped, as in `write`.
    pub(super) fn round(dtype: Dtype, x: &mut [f32]) -> usize {
        match dtype {
            Dtype::F32 => 0,
            Dtype::F16 => {
                let clamped = clamp_finite(x);
                round_through::<f16>(x, f16::ZERO);
                clamped
            }
            Dtype::Bf16 => {
                round_through::<bf16>(x, bf16::ZERO);
                0
            }
        }
    }
}

/// Puts the largest f16 where a finite value is beyond it; returns how many there are.
#[cold]
fn saturate(half: &mut [f16], x: &[f32]) -> usize {
    let beyond = |x: f32| x.is_finite() && x.abs() > LIMIT;
    half.iter_mut().zip(x).filter(|(_, x)| beyond(**x)).for_each(|(h, x)| {
        *h = f16::from_f32(LIMIT.copysign(*x));
    });
    x.iter().filter(|x| beyond(**x)).count()
}

fn round_through<T: Copy>(x: &mut [f32], zero: T)
where
    [T]: HalfFloatSliceExt,
{
    let mut half = [zero; 128];
    for x in x.chunks_mut(128) {
        let half = &mut half[..x.len()];
        half.convert_from_f32_slice(x);
        half.convert_to_f32_slice(x);
    }
}

/// Row `row` of `[rows][dim]` data as f32.
pub(super) fn read_row(data: Data<'_>, row: usize, out: &mut [f32]) {
    let (at, d) = (row * out.len(), out.len());
    match data {
        Data::F16(x) => x[at..at + d].convert_to_f32_slice(out),
        Data::Bf16(x) => x[at..at + d].convert_to_f32_slice(out),
        Data::F32(x) => out.copy_from_slice(&x[at..at + d]),
    }
}
