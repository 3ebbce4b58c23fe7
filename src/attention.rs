//! Attention over plain tensors, and merging of partial results.

use crate::config::{AttendParams, query_group};
use crate::cpu::attend::{Batch, Head, Needs, Rows, Workspace, attend};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::layout::PageLayout;
use crate::simd::Isa;
use crate::tensor::{TensorMut, TensorRef};

/// Attention of queries over exact keys and values, on the CPU: `softmax(mask(softcap(scale * q·k))) · v` in f32.
///
/// `q` is `[queries, query heads, key_dim]`, `k` `[tokens, kv heads, key_dim]`, `v` `[tokens, kv heads, value_dim]`,
/// `out` `[queries, query heads, value_dim]`; dtypes are free. They belong to one sequence. Query head h reads kv head
/// `h / (query heads / kv heads)`. Query i sits at position `tokens - queries + i` and sees keys up to itself, with
/// `sliding_window` only that many; a query in one of `params.bidirectional` also sees all keys of the range. There may
/// be more queries than tokens: those in front see nothing.
///
/// `lse` gets `ln(sum of exp(logits))`, `[query][query head]`. A row that sees no key has output 0 and LSE -inf (its sink
/// logit where there is one). A logit of -inf counts as masked; a NaN logit makes its row NaN.
///
/// A cache computes the same over packed codes. This function allocates its workspace; caches keep theirs.
///
/// ```
/// use qkv::{AttendParams, TensorMut, TensorRef, attention};
/// let (q, k, v) = (vec![0.5f32; 4 * 16], vec![0.25f32; 3 * 2 * 16], vec![1.0f32; 3 * 2 * 16]);
/// let mut out = vec![0f32; 4 * 16];
/// attention(
///     &TensorRef::thd(&q, [1, 4, 16])?, // one query, four heads
///     &TensorRef::thd(&k, [3, 2, 16])?, // three tokens, two kv heads
///     &TensorRef::thd(&v, [3, 2, 16])?,
///     &AttendParams::new(),
///     None,
///     &mut TensorMut::thd(&mut out, [1, 4, 16])?,
///     None,
/// )?;
/// assert!(out.iter().all(|x| (x - 1.0).abs() < 1e-6));
/// # Ok::<(), qkv::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] for shapes that do not fit each other or are empty; [`Error::Length`] for an `lse` or `sink_logits`
/// of another length; [`Error::Unsupported`] for head dims that are no multiple of 16 up to 512, query heads that kv heads
/// do not divide, an empty sliding window, or parameters out of range. Then `out` and `lse` are as they were.
pub fn attention(
    q: &TensorRef<'_>,
    k: &TensorRef<'_>,
    v: &TensorRef<'_>,
    params: &AttendParams<'_>,
    sliding_window: Option<usize>,
    out: &mut TensorMut<'_>,
    lse: Option<&mut [f32]>,
) -> Result<()> {
    let [queries, query_heads, key_dim] = q.dims();
    let [tokens, kv_heads, value_dim] = v.dims();
    check(q, k, v, params, sliding_window, out, lse.as_deref())?;

    // The tensors are the new tokens of an empty cache.
    let format = Format::F16;
    let layout = PageLayout::new(&format, &format, key_dim, value_dim);
    let head_of = |_: usize, head: usize| Head {
        key: &format,
        value: &format,
        layout: &layout,
        pages: &[],
        blocks: &[],
        kv_heads,
        head,
        len: 0,
        packed: 0,
        sinks: 0,
        sink_rows: (Rows::NONE, Rows::NONE),
        window: (Rows::NONE, Rows::NONE),
        mean: None,
        scales: (1.0, 1.0),
        first: 0,
        fresh: Some((k, v, 0, tokens)),
    };
    let split = if queries == 1 { tokens } else { 0 };
    let mut workspace =
        Workspace::new(Needs { sequences: 1, tokens: split, query_heads, key_dim, value_dim });
    let batch = Batch { query_start: &[0, queries as i32], queries: None };
    attend(Isa::detect(), &head_of, &batch, kv_heads, q, params, sliding_window, out, lse, &mut workspace);
    Ok(())
}

fn check(
    q: &TensorRef<'_>,
    k: &TensorRef<'_>,
    v: &TensorRef<'_>,
    params: &AttendParams<'_>,
    sliding_window: Option<usize>,
    out: &TensorMut<'_>,
    lse: Option<&[f32]>,
) -> Result<()> {
    let [queries, query_heads, key_dim] = q.dims();
    let [tokens, kv_heads, value_dim] = v.dims();
    for (what, dims) in [("q", q.dims()), ("k", k.dims()), ("v", v.dims())] {
        if dims.contains(&0) || dims[0] > i32::MAX as usize {
            let expected = "[tokens, heads, dim], each at least 1 and tokens below 2^31".into();
            return Err(Error::Shape { what, expected, got: format!("{dims:?}") });
        }
    }
    same("k", [tokens, kv_heads, key_dim], k.dims())?;
    same("out", [queries, query_heads, value_dim], out.dims())?;
    let no = |what, got: String, why: &str| Err(Error::Unsupported { what, got, why: why.into() });
    for (what, d) in [("key_dim", key_dim), ("value_dim", value_dim)] {
        if d % 16 != 0 || d > 512 {
            return no(what, d.to_string(), "head dims are multiples of 16 up to 512; pad the heads");
        }
    }
    query_group(query_heads, kv_heads)?;
    if sliding_window == Some(0) {
        return no("sliding_window", "0".into(), "a query sees at least itself; use None for no window");
    }
    if let Some(lse) = lse.filter(|l| l.len() != queries * query_heads) {
        return Err(Error::Length { what: "lse", expected: queries * query_heads, got: lse.len() });
    }
    params.check(query_heads)
}

fn same(what: &'static str, expected: [usize; 3], got: [usize; 3]) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(Error::Shape { what, expected: format!("{expected:?}"), got: format!("{got:?}") })
}

/// Merges a second partial result, over other keys, into a first one, in place.
///
/// Per row, with `m = max(lse, other_lse)`, `a = e^(lse - m)`, `b = e^(other_lse - m)`:
///
/// ```text
/// out = (a * out + b * other_out) / (a + b)        lse = m + ln(a + b)
/// ```
///
/// LSEs are natural logarithms, `[token][head]`. A state with LSE -inf has seen no key and changes nothing, whatever its
/// output holds; two such states make output 0 and LSE -inf. NaN in either LSE makes the row NaN. A sink logit must
/// be counted in one of the two only.
///
/// # Errors
/// [`Error::Shape`] or [`Error::Length`] if the two results do not fit each other; nothing is changed then.
pub fn merge_states(
    out: &mut TensorMut<'_>,
    lse: &mut [f32],
    other_out: &TensorRef<'_>,
    other_lse: &[f32],
) -> Result<()> {
    let [tokens, heads, dim] = out.dims();
    same("other_out", out.dims(), other_out.dims())?;
    for (what, got) in [("lse", lse.len()), ("other_lse", other_lse.len())] {
        if got != tokens * heads {
            return Err(Error::Length { what, expected: tokens * heads, got });
        }
    }
    let (mut x, mut y) = (vec![0f32; dim], vec![0f32; dim]);
    for (row, (lse, other)) in lse.iter_mut().zip(other_lse).enumerate() {
        let (token, head) = (row / heads, row % heads);
        let (empty, other_empty) = (*lse == f32::NEG_INFINITY, *other == f32::NEG_INFINITY);
        if other_empty && !empty && !lse.is_nan() {
            continue;
        }
        other_out.read_row(token, head, &mut y);
        if empty && other_empty {
            x.fill(0.0);
        } else if empty && !other.is_nan() {
            x.copy_from_slice(&y);
            *lse = *other;
        } else {
            out.as_ref().read_row(token, head, &mut x);
            // A NaN in either is kept by the sum below, whichever `max` picks.
            let max = lse.max(*other);
            let (a, b) = ((*lse - max).exp(), (*other - max).exp());
            let sum = a + b;
            x.iter_mut().zip(&y).for_each(|(x, y)| *x = (a * *x + b * y) / sum);
            *lse = max + sum.ln();
        }
        out.write_row(token, head, &x);
    }
    Ok(())
}
