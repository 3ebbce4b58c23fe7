//! What a suite needs of a backend, so that one source runs on all of them.

use crate::host::{Host, each};
use qkv::backend::Backend;
use qkv::{
    AttendParams, CacheConfig, Cpu, Dtype, KvCache, PagePool, PagedKvCache, Result, TensorMut, TensorRef,
};

/// Tests that are a suite's functions for one machine.
#[allow(unused_macros)]
macro_rules! on {
    ($machine:expr, $suite:ident: $($name:ident),+) => {
        $(
            #[test]
            fn $name() {
                $suite::$name(&$machine);
            }
        )+
    };
}
#[allow(unused_imports)]
pub(crate) use on;

/// Parameters of attention, on the host.
#[derive(Debug, Clone, Default)]
pub(crate) struct Params {
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) sink_logits: Option<Vec<f32>>,
    pub(crate) bidirectional: Vec<(usize, usize)>,
}

/// A backend with its memory for inputs and outputs.
pub(crate) trait Machine {
    type B: Backend;
    /// Elements that a cache reads.
    type Input;
    /// Elements that a cache writes.
    type Output;
    /// Parameters with their arrays where the backend reads them.
    type Held;
    /// Dtypes of a window.
    const WINDOWS: &'static [Dtype];
    /// Dtypes of queries, and of keys and values of `prefill`.
    const QUERIES: &'static [Dtype];
    /// Distance in the 2-norm, relative, that attention with f32 outputs may have from f64.
    const ERROR: f64;

    /// Most elements of a group.
    const LARGEST_GROUP: usize;

    fn paged(&self, config: CacheConfig, blocks: usize) -> Result<PagedKvCache<Self::B>>;
    fn contiguous(&self, config: CacheConfig) -> Result<KvCache<Self::B>>;
    /// Whether `attend` takes heads of so many channels of keys and values.
    fn attends(dims: (usize, usize)) -> bool;
    /// Numbers rounded to a dtype.
    fn input(&self, dtype: Dtype, x: &[f32]) -> Self::Input;
    fn view(input: &Self::Input, dims: [usize; 3]) -> <Self::B as Backend>::Tensor<'_>;
    /// Elements that are NaN until they are written.
    fn output(&self, dtype: Dtype, n: usize) -> Self::Output;
    fn view_mut(output: &mut Self::Output, dims: [usize; 3]) -> <Self::B as Backend>::Output<'_>;
    /// f32 elements as what takes the LSE.
    fn lse(output: &mut Self::Output) -> <Self::B as Backend>::Lse<'_>;
    fn read(&self, output: Self::Output) -> Vec<f32>;
    fn hold(&self, params: &Params) -> Self::Held;
    fn params(held: &Self::Held) -> <Self::B as Backend>::Params<'_>;
}

/// What attention gives, `[rows][query heads]` of `[value_dim]` and of one LSE.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) out: Vec<f32>,
    pub(crate) lse: Vec<f32>,
}

/// Queries of a step in a dtype, the output's dtype, and parameters.
#[derive(Debug, Clone)]
pub(crate) struct Query<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) heads: usize,
    pub(crate) dtype: Dtype,
    pub(crate) out: Dtype,
    pub(crate) params: Params,
}

impl<'a> Query<'a> {
    /// In the first dtype that the machine takes, with an f32 output.
    pub(crate) fn new<M: Machine>(q: &'a [f32], heads: usize) -> Self {
        Self { q, heads, dtype: M::QUERIES[0], out: Dtype::F32, params: Params::default() }
    }

    fn ask<M: Machine>(
        &self,
        m: &M,
        c: &CacheConfig,
        run: impl FnOnce(
            <M::B as Backend>::Tensor<'_>,
            <M::B as Backend>::Params<'_>,
            &mut <M::B as Backend>::Output<'_>,
            <M::B as Backend>::Lse<'_>,
        ) -> Result<()>,
    ) -> Result<Answer> {
        let rows = self.q.len() / (self.heads * c.key_dim);
        let q = m.input(self.dtype, self.q);
        let mut out = m.output(self.out, rows * self.heads * c.value_dim);
        let mut lse = m.output(Dtype::F32, rows * self.heads);
        let held = m.hold(&self.params);
        let dims = |d| [rows, self.heads, d];
        let mut view = M::view_mut(&mut out, dims(c.value_dim));
        run(M::view(&q, dims(c.key_dim)), M::params(&held), &mut view, M::lse(&mut lse))?;
        drop(view);
        Ok(Answer { out: m.read(out), lse: m.read(lse) })
    }

    /// `attend` of the step that the cache is in.
    pub(crate) fn attend<M: Machine>(
        &self,
        m: &M,
        cache: &mut PagedKvCache<M::B>,
        layer: usize,
    ) -> Result<Answer> {
        let c = cache.config().clone();
        self.ask(m, &c, |q, params, out, lse| cache.attend(layer, &q, &params, out, Some(lse)))
    }

    /// `prefill` of the step that the cache is in, keys and values in the queries' dtype.
    pub(crate) fn prefill<M: Machine>(
        &self,
        m: &M,
        cache: &mut PagedKvCache<M::B>,
        layer: usize,
        k: &[f32],
        v: &[f32],
    ) -> Result<Answer> {
        let c = cache.config().clone();
        let (kt, vt) = (m.input(self.dtype, k), m.input(self.dtype, v));
        let rows = k.len() / (c.kv_heads * c.key_dim);
        let (kt, vt) =
            (M::view(&kt, [rows, c.kv_heads, c.key_dim]), M::view(&vt, [rows, c.kv_heads, c.value_dim]));
        self.ask(m, &c, |q, params, out, lse| cache.prefill(layer, &q, &kt, &vt, &params, out, Some(lse)))
    }
}

/// `append` of f32 keys and values to a step's layer.
pub(crate) fn append<M: Machine>(
    m: &M,
    cache: &mut PagedKvCache<M::B>,
    layer: usize,
    k: &[f32],
    v: &[f32],
) -> Result<()> {
    let c = cache.config().clone();
    let rows = k.len() / (c.kv_heads * c.key_dim);
    let (kt, vt) = (m.input(Dtype::F32, k), m.input(Dtype::F32, v));
    let dims = |d| [rows, c.kv_heads, d];
    cache.append(layer, &M::view(&kt, dims(c.key_dim)), &M::view(&vt, dims(c.value_dim)))
}

/// What a cache holds of a sequence in a layer, decoded: `[tokens][kv heads][dim]` of keys and of values.
pub(crate) fn held<M: Machine>(
    m: &M,
    cache: &PagedKvCache<M::B>,
    layer: usize,
    seat: qkv::Seat,
) -> [Vec<f32>; 2] {
    let (c, n) = (cache.config(), cache.len(seat).unwrap());
    let dims = [c.key_dim, c.value_dim].map(|d| [n, c.kv_heads, d]);
    let mut out = dims.map(|d| m.output(Dtype::F32, d.iter().product()));
    let [k, v] = &mut out;
    let (mut k, mut v) = (M::view_mut(k, dims[0]), M::view_mut(v, dims[1]));
    cache.dequantize(layer, seat, &mut k, &mut v).unwrap();
    drop((k, v));
    out.map(|x| m.read(x))
}

/// The CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OnCpu;

impl Machine for OnCpu {
    type B = Cpu;
    type Input = Host;
    type Output = Host;
    type Held = Params;
    const WINDOWS: &'static [Dtype] = &[Dtype::F16, Dtype::Bf16, Dtype::F32];
    const QUERIES: &'static [Dtype] = &[Dtype::F32, Dtype::F16, Dtype::Bf16];
    const ERROR: f64 = 1e-5;
    const LARGEST_GROUP: usize = 512;

    fn paged(&self, config: CacheConfig, blocks: usize) -> Result<PagedKvCache> {
        let pool = PagePool::new(&config, blocks)?;
        PagedKvCache::new(config, pool)
    }

    fn contiguous(&self, config: CacheConfig) -> Result<KvCache> {
        KvCache::new(config)
    }

    fn attends(_: (usize, usize)) -> bool {
        true
    }

    fn input(&self, dtype: Dtype, x: &[f32]) -> Host {
        Host::new(dtype, x)
    }

    fn view(input: &Host, dims: [usize; 3]) -> TensorRef<'_> {
        each!(input, Host, x => TensorRef::thd(x, dims)).unwrap()
    }

    fn output(&self, dtype: Dtype, n: usize) -> Host {
        Host::nan(dtype, n)
    }

    fn view_mut(output: &mut Host, dims: [usize; 3]) -> TensorMut<'_> {
        each!(output, Host, x => TensorMut::thd(x, dims)).unwrap()
    }

    fn lse(output: &mut Host) -> &mut [f32] {
        match output {
            Host::F32(x) => x,
            _ => panic!("the LSE is f32"),
        }
    }

    fn read(&self, output: Host) -> Vec<f32> {
        output.f32()
    }

    fn hold(&self, params: &Params) -> Params {
        params.clone()
    }

    fn params(p: &Params) -> AttendParams<'_> {
        let mut params = AttendParams::new().with_bidirectional(&p.bidirectional);
        (params.scale, params.softcap) = (p.scale, p.softcap);
        params.sink_logits = p.sink_logits.as_deref();
        params
    }
}
