//! One cache for all layers of a candle model.

use crate::view::{dtype, hold};
use candle_core::{DType, Device, Error, Result, Tensor, WithDType, bail};
use half::{bf16, f16};
use qkv::{AttendParams, CacheConfig, DataMut, KvCache, TensorMut};
use std::sync::{Arc, Mutex, MutexGuard};

/// A quantized key/value cache shared by all layers of a model. Clones are handles on the same cache.
///
/// Tensors are `[batch, heads, tokens, dim]` on the CPU, f32, f16 or bf16, with any strides; the batch is the
/// configuration's `max_sequences`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use qkv::{AttendParams, Bits, CacheConfig};
/// use qkv_candle::Cache;
/// # fn main() -> candle_core::Result<()> {
/// let cache = Cache::new(CacheConfig::new(2, 2, 64).with_bits(Bits::B4))?; // layers, kv heads, head dim
/// let q = Tensor::randn(0f32, 1.0, (1, 8, 5, 64), &Device::Cpu)?;
/// let k = Tensor::randn(0f32, 1.0, (1, 2, 5, 64), &Device::Cpu)?;
/// for layer in cache.layers() {
///     let out = layer.attend(&q, &k, &k, &AttendParams::new())?;
///     assert_eq!(out.dims(), [1, 8, 5, 64]);
/// }
/// assert_eq!(cache.current_seq_len()?, 5);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Cache {
    inner: Arc<Mutex<KvCache>>,
    config: Arc<CacheConfig>,
}

/// The handle of one layer, in the shape of `candle_nn::kv_cache`. Clones are handles on the same cache.
#[derive(Debug, Clone)]
pub struct LayerCache {
    cache: Cache,
    layer: usize,
}

impl Cache {
    /// Allocates everything the configuration asks for.
    ///
    /// # Errors
    /// A wrapped [`qkv::Error`] for a configuration that is refused.
    pub fn new(config: CacheConfig) -> Result<Self> {
        let inner = KvCache::new(config.clone()).map_err(Error::wrap)?;
        Ok(Self { inner: Arc::new(Mutex::new(inner)), config: Arc::new(config) })
    }

    /// What it was made of.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The handle of a layer.
    ///
    /// # Errors
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<LayerCache> {
        let limit = self.config.layers.len();
        if layer >= limit {
            return Err(Error::wrap(qkv::Error::OutOfRange { what: "layer", got: layer as i64, limit }));
        }
        Ok(LayerCache { cache: self.clone(), layer })
    }

    /// The handles of all layers, in order.
    pub fn layers(&self) -> Vec<LayerCache> {
        (0..self.config.layers.len()).map(|layer| LayerCache { cache: self.clone(), layer }).collect()
    }

    /// Tokens held by the longest sequence.
    ///
    /// # Errors
    /// If a thread panicked while it used the cache.
    pub fn current_seq_len(&self) -> Result<usize> {
        let cache = self.lock()?;
        Ok((0..self.config.max_sequences).map(|s| cache.len(s)).max().unwrap_or(0))
    }

    /// Forgets all tokens of all sequences. The memory stays allocated. A step that is open is cancelled.
    ///
    /// # Errors
    /// If a thread panicked while it used the cache.
    pub fn reset(&self) -> Result<()> {
        let mut cache = self.lock()?;
        // Without an open step there is nothing to cancel.
        let _ = cache.cancel_step();
        cache.clear().map_err(Error::wrap)
    }

    /// Cuts every sequence to its first `len` tokens; shorter ones stay as they are.
    ///
    /// # Errors
    /// If a step is open: some layers have appended and others not.
    pub fn truncate(&self, len: usize) -> Result<()> {
        let mut cache = self.lock()?;
        for seq in 0..self.config.max_sequences {
            let len = len.min(cache.len(seq));
            cache.truncate(seq, len).map_err(Error::wrap)?;
        }
        Ok(())
    }

    /// Bytes that hold tokens now: codes, pairs, padding, window and sinks.
    ///
    /// # Errors
    /// If a thread panicked while it used the cache.
    pub fn bytes_used(&self) -> Result<usize> {
        Ok(self.lock()?.bytes_used())
    }

    /// Bytes allocated at construction.
    ///
    /// # Errors
    /// If a thread panicked while it used the cache.
    pub fn bytes_allocated(&self) -> Result<usize> {
        Ok(self.lock()?.bytes_allocated())
    }

    /// Bytes of working memory that attention has needed, beside the cache.
    ///
    /// # Errors
    /// If a thread panicked while it used the cache.
    pub fn scratch_bytes(&self) -> Result<usize> {
        Ok(self.lock()?.scratch_bytes())
    }

    /// The cache itself, for what has no candle form (fork, reorder, statistics). Held until the guard is dropped.
    ///
    /// # Errors
    /// If a thread panicked while it used the cache.
    pub fn lock(&self) -> Result<MutexGuard<'_, KvCache>> {
        self.inner.lock().map_err(|_| {
            Error::msg("a thread panicked while it used this cache, so its state is unknown; make a new one")
        })
    }

    fn n_is_prefill(&self, n: usize) -> bool {
        n > self.config.residual.unwrap_or(0).max(qkv::layout::TILE)
    }
}

impl LayerCache {
    /// The layer.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The cache it belongs to.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Appends `k` and `v` (`[b, kv_heads, n, dim]`), then attends with `q` (`[b, query_heads, n, dim]`) over all
    /// tokens: `[b, query_heads, n, value_dim]` in the dtype of `q`.
    ///
    /// Up to `max(R, 64)` tokens are appended first and then read from the cache like all others. More of them
    /// attend to each other exactly, before they are stored. After an error the cache is what it was before.
    ///
    /// # Errors
    /// A wrapped [`qkv::Error`] that names what was expected and what came; a device other than the CPU.
    pub fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, params: &AttendParams) -> Result<Tensor> {
        let heads = self.check(q, k, v, params)?;
        match dtype("q", q.dtype())? {
            qkv::Dtype::F32 => self.attend_as::<f32>(q, k, v, params, heads),
            qkv::Dtype::F16 => self.attend_as::<f16>(q, k, v, params, heads),
            qkv::Dtype::Bf16 => self.attend_as::<bf16>(q, k, v, params, heads),
        }
    }

    fn attend_as<T: WithDType + Zero>(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        params: &AttendParams,
        heads: usize,
    ) -> Result<Tensor>
    where
        for<'a> DataMut<'a>: From<&'a mut [T]>,
    {
        let (b, _, n, _) = q.dims4()?;
        let dims = [b, heads, n, self.cache.config.value_dim];
        let mut out = vec![T::ZERO; dims.iter().product()];
        {
            let (q, k, v) = (hold("q", q)?, hold("k", k)?, hold("v", v)?);
            let (q, k, v) = (q.view()?, k.view()?, v.view()?);
            let mut view = TensorMut::bhtd(&mut out[..], dims).map_err(Error::wrap)?;
            let mut cache = self.cache.lock()?;
            if self.cache.n_is_prefill(n) {
                cache.prefill(self.layer, &q, &k, &v, params, &mut view, None)
            } else {
                let done = cache.append(self.layer, &k, &v);
                done.and_then(|()| cache.attend(self.layer, &q, params, &mut view, None))
            }
            .map_err(Error::wrap)?;
        }
        Tensor::from_vec(out, &dims, &Device::Cpu)
    }

    /// Everything about `q` and the parameters that attention would refuse after the append: the append must not
    /// have happened then. Returns the query heads.
    fn check(&self, q: &Tensor, k: &Tensor, v: &Tensor, params: &AttendParams) -> Result<usize> {
        let c = self.cache.config();
        let (b, heads, n, d) =
            q.dims4().map_err(|_| wrong_shape("q", "[batch, heads, tokens, dim]".into(), q))?;
        for (what, x, dim) in [("k", k, c.key_dim), ("v", v, c.value_dim)] {
            if x.dims() != [b, c.kv_heads, n, dim] {
                return Err(wrong_shape(what, format!("{:?}", [b, c.kv_heads, n, dim]), x));
            }
        }
        if b != c.max_sequences || d != c.key_dim || n == 0 || heads == 0 || heads % c.kv_heads != 0 {
            let expected = format!(
                "[{}, a multiple of {} heads, at least one token, {}]",
                c.max_sequences, c.kv_heads, c.key_dim
            );
            return Err(wrong_shape("q", expected, q));
        }
        if let Some(s) = params.sink_logits.filter(|s| s.len() != heads) {
            return Err(Error::wrap(qkv::Error::Length {
                what: "sink_logits",
                expected: heads,
                got: s.len(),
            }));
        }
        let refused = |what, got: f32, why: &str| {
            Err(Error::wrap(qkv::Error::Unsupported { what, got: got.to_string(), why: why.into() }))
        };
        match (params.scale, params.softcap) {
            (Some(s), _) if !s.is_finite() => return refused("scale", s, "it must be finite"),
            (_, Some(c)) if !(c.is_finite() && c > 0.0) => {
                return refused("softcap", c, "it must be finite and positive");
            }
            _ => {}
        }
        if !params.bidirectional.is_empty() && !self.cache.n_is_prefill(n) {
            let why = "ranges need prefill, which takes more than max(R, 64) tokens";
            let got = format!("{n} tokens");
            return Err(Error::wrap(qkv::Error::Unsupported { what: "bidirectional", got, why: why.into() }));
        }
        Ok(heads)
    }

    /// Appends `k` and `v` without attending: any number of tokens, for loading a prefix.
    ///
    /// # Errors
    /// A wrapped [`qkv::Error`]; the cache is then what it was before.
    pub fn append(&self, k: &Tensor, v: &Tensor) -> Result<()> {
        let (k, v) = (hold("k", k)?, hold("v", v)?);
        let (k, v) = (k.view()?, v.view()?);
        self.cache.lock()?.append(self.layer, &k, &v).map_err(Error::wrap)
    }

    /// Appends `k` and `v` and returns *all* keys and values, decoded, in their dtypes: the signature of
    /// `candle_nn::kv_cache`, to try the cache in a model before its attention is changed to
    /// [`attend`](Self::attend).
    ///
    /// Every call decodes the whole cache: O(tokens held) time and memory a step. All sequences must be equally
    /// long.
    ///
    /// # Errors
    /// A wrapped [`qkv::Error`]; sequences of different lengths.
    pub fn append_dense(&self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (kh, vh) = (hold("k", k)?, hold("v", v)?);
        let (k_view, v_view) = (kh.view()?, vh.view()?);
        let (_, _, n, _) = k.dims4()?;
        let c = self.cache.config();
        let b = c.max_sequences;
        let mut cache = self.cache.lock()?;
        // Before the append these are the old lengths, whether a step is open or not.
        let lengths: Vec<usize> = (0..b).map(|s| cache.len(s)).collect();
        if lengths.iter().any(|l| *l != lengths[0]) {
            bail!("append_dense needs sequences of one length, these hold {lengths:?}")
        }
        cache.append(self.layer, &k_view, &v_view).map_err(Error::wrap)?;
        let len = lengths[0] + n;
        let (hk, dk, dv) = (c.kv_heads, c.key_dim, c.value_dim);
        let mut keys = vec![0f32; b * len * hk * dk];
        let mut values = vec![0f32; b * len * hk * dv];
        for seq in 0..b {
            let (kn, vn) = (len * hk * dk, len * hk * dv);
            let mut ko =
                TensorMut::thd(&mut keys[seq * kn..(seq + 1) * kn], [len, hk, dk]).map_err(Error::wrap)?;
            let mut vo =
                TensorMut::thd(&mut values[seq * vn..(seq + 1) * vn], [len, hk, dv]).map_err(Error::wrap)?;
            cache.dequantize(self.layer, seq, &mut ko, &mut vo).map_err(Error::wrap)?;
        }
        drop(cache);
        let dense = |data: Vec<f32>, dim: usize, dtype: DType| {
            Tensor::from_vec(data, (b, len, hk, dim), &Device::Cpu)?
                .transpose(1, 2)?
                .to_dtype(dtype)?
                .contiguous()
        };
        Ok((dense(keys, dk, k.dtype())?, dense(values, dv, v.dtype())?))
    }

    /// Tokens held by the longest sequence.
    ///
    /// # Errors
    /// If a thread panicked while it used the cache.
    pub fn current_seq_len(&self) -> Result<usize> {
        self.cache.current_seq_len()
    }

    /// Forgets all tokens, of **all layers**: they share one cache.
    ///
    /// # Errors
    /// If a thread panicked while it used the cache.
    pub fn reset(&self) -> Result<()> {
        self.cache.reset()
    }

    /// Cuts every sequence to its first `len` tokens, in **all layers**.
    ///
    /// # Errors
    /// If a step is open.
    pub fn truncate(&self, len: usize) -> Result<()> {
        self.cache.truncate(len)
    }
}

fn wrong_shape(what: &'static str, expected: String, x: &Tensor) -> Error {
    Error::wrap(qkv::Error::Shape { what, expected, got: format!("{:?}", x.dims()) })
}

/// The zero that an output starts with.
trait Zero: Copy {
    const ZERO: Self;
}

impl Zero for f32 {
    const ZERO: Self = 0.0;
}

impl Zero for f16 {
    const ZERO: Self = f16::ZERO;
}

impl Zero for bf16 {
    const ZERO: Self = bf16::ZERO;
}
