//! FP8 of whole tensors, without a cache.

use crate::error::{Error, Result};
use crate::format::{Fp8, Fp8Kind, Granularity};
use crate::quant::fp8;
use crate::quant::rows::RowsMut;
use crate::quant::tensor::MAX_ELEMENTS;
use crate::simd::Isa;
use crate::tensor::{TensorMut, TensorRef};
use rayon::prelude::*;

/// A tensor `[tokens, heads, dim]` as FP8 bytes with f32 scales: `x = scale * float(byte)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Tensor {
    dims: [usize; 3],
    format: Fp8,
    bytes: Vec<u8>,
    scales: Vec<f32>,
    saturated: usize,
}

/// Scales of a tensor: one, one a head, or one a token and head (`[token][head]`).
fn scale_count(dims: [usize; 3], format: Fp8) -> usize {
    match format.granularity {
        Granularity::Tensor => 1,
        Granularity::Head => dims[1],
        Granularity::TokenHead => dims[0] * dims[1],
    }
}

fn check_dims(dims: [usize; 3]) -> Result<()> {
    if dims.contains(&0) {
        return Err(Error::Shape {
            what: "tensor",
            expected: "at least one token, head and channel".into(),
            got: format!("{dims:?}"),
        });
    }
    let elements = dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    if elements.is_none_or(|n| n > MAX_ELEMENTS) {
        return Err(Error::Shape {
            what: "tensor",
            expected: format!("at most {MAX_ELEMENTS} elements"),
            got: format!("{dims:?}"),
        });
    }
    Ok(())
}

fn check(dims: [usize; 3], format: Fp8, scales: &[f32]) -> Result<()> {
    check_dims(dims)?;
    let expected = scale_count(dims, format);
    if scales.len() != expected {
        return Err(Error::Length { what: "scales", expected, got: scales.len() });
    }
    match scales.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
        Some(s) => Err(Error::Unsupported {
            what: "scale",
            got: s.to_string(),
            why: "an FP8 scale is finite and positive".into(),
        }),
        None => Ok(()),
    }
}

impl Fp8Tensor {
    /// A tensor from its bytes `[token][head][channel]` and scales (one; one a head; one a token and head).
    ///
    /// # Errors
    /// [`Error::Length`] for the wrong number of bytes or scales, [`Error::Unsupported`] for a scale that is
    /// not finite and positive, [`Error::Shape`] for an empty shape.
    pub fn from_bytes(dims: [usize; 3], format: Fp8, bytes: Vec<u8>, scales: Vec<f32>) -> Result<Self> {
        check(dims, format, &scales)?;
        let expected = dims.iter().product();
        if bytes.len() != expected {
            return Err(Error::Length { what: "bytes", expected, got: bytes.len() });
        }
        Ok(Self { dims, format, bytes, scales, saturated: 0 })
    }

    /// `[tokens, heads, dim]`.
    pub fn dims(&self) -> [usize; 3] {
        self.dims
    }

    /// Kind and granularity.
    pub fn format(&self) -> Fp8 {
        self.format
    }

    /// The bytes, `[token][head][channel]`.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The scales.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Finite elements that were too large for their scale and became the largest finite byte.
    pub fn saturated(&self) -> usize {
        self.saturated
    }

    fn scale(&self, token: usize, head: usize) -> f32 {
        scale_of(self.format, &self.scales, token, head, self.dims[1])
    }
}

fn scale_of(format: Fp8, scales: &[f32], token: usize, head: usize, heads: usize) -> f32 {
    match format.granularity {
        Granularity::Tensor => scales[0],
        Granularity::Head => scales[head],
        Granularity::TokenHead => scales[token * heads + head],
    }
}

/// The scales that map the largest finite magnitude to the largest finite byte: one, one a head, or one a token
/// and head (`[token][head]`), as `format` says. NaN and infinity are ignored; a scale is at least
/// `f32::MIN_POSITIVE`, and 1 where everything is zero.
///
/// # Errors
/// [`Error::Shape`] for an empty tensor.
pub fn scales(x: &TensorRef<'_>, format: Fp8) -> Result<Vec<f32>> {
    let dims @ [t, h, d] = x.dims();
    check_dims(dims)?;
    let mut rows = vec![0f32; t * h];
    rows.par_iter_mut().enumerate().for_each_init(
        || vec![0f32; d],
        |row, (i, amax)| {
            x.read_row(i / h, i % h, row);
            *amax = fp8::finite_amax(row);
        },
    );
    let scale = |amax: f32| fp8::scale_for(format.kind, amax);
    Ok(match format.granularity {
        Granularity::TokenHead => rows.into_iter().map(scale).collect(),
        Granularity::Head => {
            (0..h).map(|head| scale(rows.iter().skip(head).step_by(h).fold(0.0, |a, b| a.max(*b)))).collect()
        }
        Granularity::Tensor => vec![scale(rows.into_iter().fold(0.0, f32::max))],
    })
}

/// Encodes a tensor of any dtype and strides: `byte = satfinite(x / scale)` with IEEE division, round half to
/// even. Infinity saturates, NaN stays NaN. Without `scales` they are computed by [`scales`].
///
/// # Errors
/// [`Error::Length`] for the wrong number of scales, [`Error::Unsupported`] for a scale that is not finite and
/// positive, [`Error::Shape`] for an empty tensor.
pub fn encode(x: &TensorRef<'_>, format: Fp8, scales: Option<&[f32]>) -> Result<Fp8Tensor> {
    let dims @ [t, h, d] = x.dims();
    let scales = match scales {
        Some(s) => s.to_vec(),
        None => self::scales(x, format)?,
    };
    check(dims, format, &scales)?;
    let isa = Isa::detect();
    let mut bytes = vec![0u8; t * h * d];
    let saturated = bytes
        .par_chunks_exact_mut(d)
        .enumerate()
        .map_init(
            || vec![0f32; d],
            |row, (i, out)| {
                let (token, head) = (i / h, i % h);
                x.read_row(token, head, row);
                let scale = scale_of(format, &scales, token, head, h);
                fp8::encode_row(isa, format.kind, scale, row, out);
                fp8::saturated(format.kind, scale, row)
            },
        )
        .sum();
    Ok(Fp8Tensor { dims, format, bytes, scales, saturated })
}

/// Decodes to a tensor of the same shape, any dtype and strides: `scale * float(byte)` in f32, rounded once to
/// the dtype of `out`.
///
/// # Errors
/// [`Error::Shape`] if `out` has another shape.
pub fn decode(x: &Fp8Tensor, out: &mut TensorMut<'_>) -> Result<()> {
    let [_, h, d] = x.dims;
    if out.dims() != x.dims {
        return Err(Error::Shape {
            what: "out",
            expected: format!("{:?}", x.dims),
            got: format!("{:?}", out.dims()),
        });
    }
    let isa = Isa::detect();
    let rows = RowsMut::new(out);
    x.bytes.par_chunks_exact(d).enumerate().for_each_init(
        || vec![0f32; d],
        |row, (i, bytes)| {
            let (token, head) = (i / h, i % h);
            fp8::decode_row(isa, x.format.kind, x.scale(token, head), bytes, row);
            rows.write(token, head, row);
        },
    );
    Ok(())
}

/// The value of one byte: exact, with infinity and NaN where the type has them.
pub fn value(kind: Fp8Kind, byte: u8) -> f32 {
    let mut out = [0f32];
    fp8::decode_row(Isa::Plain, kind, 1.0, &[byte], &mut out);
    out[0]
}
