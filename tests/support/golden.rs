//! Reads a directory of reference data: `manifest.json` and the safetensors files beside it.
//!
//! `QKV_GOLDEN_DIR` names another directory of the same form. Nothing is known of a case but what its manifest
//! entry says.

use half::{bf16, f16};
use qkv::{Dtype, Shape, TensorMut, TensorRef};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype as Stored;
use serde_json::Value;
use std::collections::HashMap;
use std::path::PathBuf;

/// A stored tensor, in its own type.
#[derive(Debug, Clone)]
pub(crate) enum Elements {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    U8(Vec<u8>),
    I8(Vec<i8>),
    I32(Vec<i32>),
}

/// A stored tensor and its shape.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) elements: Elements,
}

impl Tensor {
    /// A tensor of a dtype, from f32 (rounded).
    pub(crate) fn from_f32(dtype: Dtype, shape: &[usize], x: &[f32]) -> Self {
        let elements = match dtype {
            Dtype::F16 => Elements::F16(x.iter().map(|x| f16::from_f32(*x)).collect()),
            Dtype::Bf16 => Elements::Bf16(x.iter().map(|x| bf16::from_f32(*x)).collect()),
            Dtype::F32 => Elements::F32(x.to_vec()),
        };
        Self { shape: shape.to_vec(), elements }
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The float dtype, if it is one of the library's.
    pub(crate) fn dtype(&self) -> Dtype {
        match self.elements {
            Elements::F16(_) => Dtype::F16,
            Elements::Bf16(_) => Dtype::Bf16,
            Elements::F32(_) => Dtype::F32,
            _ => panic!("not a float tensor of the library"),
        }
    }

    /// All elements as f64, exact.
    pub(crate) fn f64(&self) -> Vec<f64> {
        match &self.elements {
            Elements::F16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Elements::Bf16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Elements::F32(x) => x.iter().map(|x| *x as f64).collect(),
            Elements::F64(x) => x.clone(),
            Elements::U8(x) => x.iter().map(|x| *x as f64).collect(),
            Elements::I8(x) => x.iter().map(|x| *x as f64).collect(),
            Elements::I32(x) => x.iter().map(|x| *x as f64).collect(),
        }
    }

    /// All elements as f32 (f64 rounded, everything else exact).
    pub(crate) fn f32(&self) -> Vec<f32> {
        self.f64().into_iter().map(|x| x as f32).collect()
    }

    /// Bytes.
    pub(crate) fn u8(&self) -> &[u8] {
        match &self.elements {
            Elements::U8(x) => x,
            _ => panic!("not a byte tensor"),
        }
    }

    /// The library's view of a float tensor.
    pub(crate) fn view(&self, shape: Shape) -> TensorRef<'_> {
        match &self.elements {
            Elements::F16(x) => TensorRef::new(x, shape),
            Elements::Bf16(x) => TensorRef::new(x, shape),
            Elements::F32(x) => TensorRef::new(x, shape),
            _ => panic!("not a float tensor of the library"),
        }
        .unwrap()
    }

    /// A contiguous view.
    pub(crate) fn thd(&self, dims: [usize; 3]) -> TensorRef<'_> {
        self.view(thd(dims))
    }
}

/// The shape of contiguous `[tokens, heads, dim]` data.
pub(crate) fn thd(dims: [usize; 3]) -> Shape {
    Shape { dims, batch_tokens: dims[0], strides: [0, dims[1] * dims[2], dims[2], 1] }
}

/// Runs a call that fills an output of this dtype; returns it as f64.
pub(crate) fn filled(dtype: Dtype, dims: [usize; 3], fill: impl FnOnce(&mut TensorMut<'_>)) -> Tensor {
    let n: usize = dims.iter().product();
    let shape = dims.to_vec();
    match dtype {
        Dtype::F16 => {
            let mut x = vec![f16::ZERO; n];
            fill(&mut TensorMut::thd(&mut x, dims).unwrap());
            Tensor { shape, elements: Elements::F16(x) }
        }
        Dtype::Bf16 => {
            let mut x = vec![bf16::ZERO; n];
            fill(&mut TensorMut::thd(&mut x, dims).unwrap());
            Tensor { shape, elements: Elements::Bf16(x) }
        }
        Dtype::F32 => {
            let mut x = vec![0f32; n];
            fill(&mut TensorMut::thd(&mut x, dims).unwrap());
            Tensor { shape, elements: Elements::F32(x) }
        }
    }
}

/// Rounds an f64 that holds an f32 result to a dtype.
pub(crate) fn round_to(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        Dtype::F32 => x,
    }
}

/// The distance of neighbouring numbers of a dtype at this magnitude.
pub(crate) fn ulp(dtype: Dtype, x: f64) -> f64 {
    let (mantissa, lowest) = match dtype {
        Dtype::F16 => (10, -14),
        Dtype::Bf16 => (7, -126),
        Dtype::F32 => (23, -126),
    };
    if !x.is_finite() {
        return f64::INFINITY;
    }
    let exponent = if x == 0.0 { lowest } else { (x.abs().log2().floor() as i32).max(lowest) };
    2f64.powi(exponent - mantissa)
}

/// One case of the manifest.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// Name of the file it stands in, without the extension.
    pub(crate) file: String,
    pub(crate) id: String,
    pub(crate) fields: Value,
}

impl Case {
    pub(crate) fn str(&self, field: &str) -> Option<&str> {
        self.fields.get(field)?.as_str()
    }

    pub(crate) fn int(&self, field: &str) -> Option<i64> {
        self.fields.get(field)?.as_i64()
    }

    pub(crate) fn flag(&self, field: &str) -> bool {
        self.fields.get(field).and_then(Value::as_bool).unwrap_or(false)
    }

    pub(crate) fn has(&self, field: &str) -> bool {
        self.fields.get(field).is_some()
    }

    pub(crate) fn usizes(&self, field: &str) -> Vec<usize> {
        let list = self.fields.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
        list.iter().map(|x| x.as_u64().unwrap() as usize).collect()
    }

    /// A list of counts, or a number that stands for as many ones.
    pub(crate) fn counts(&self, field: &str) -> Vec<usize> {
        match self.int(field) {
            Some(n) => vec![1; n as usize],
            None => self.usizes(field),
        }
    }

    pub(crate) fn lists(&self, field: &str) -> Vec<Vec<usize>> {
        let list = self.fields.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
        list.iter()
            .map(|x| x.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect())
            .collect()
    }

    /// The dtype of a case.
    pub(crate) fn dtype(&self, field: &str) -> Dtype {
        match self.str(field) {
            Some("f16") => Dtype::F16,
            Some("bf16") => Dtype::Bf16,
            Some("f32") => Dtype::F32,
            other => panic!("{}: dtype {other:?}", self.id),
        }
    }

    pub(crate) fn tensors(&self) -> Vec<String> {
        let list = self.fields.get("tensors").and_then(Value::as_array).cloned().unwrap_or_default();
        list.iter().map(|x| x.as_str().unwrap().to_string()).collect()
    }

    pub(crate) fn lists_tensor(&self, name: &str) -> bool {
        self.tensors().iter().any(|t| t == name)
    }

    /// Whether the case is one of attention over plain tensors.
    pub(crate) fn is_attention(&self) -> bool {
        self.has("Tq") && self.has("Tk")
    }

    /// Whether the case is the history of a peer's cache.
    pub(crate) fn is_trace(&self) -> bool {
        self.has("log") && self.has("steps")
    }

    /// Whether the case's peer could not compute it.
    pub(crate) fn peer_failed(&self) -> bool {
        self.has("peer_error")
    }
}

/// A directory of reference data.
#[derive(Debug)]
pub(crate) struct Golden {
    pub(crate) dir: PathBuf,
    pub(crate) cases: Vec<Case>,
    tensors: HashMap<String, HashMap<String, Tensor>>,
}

impl Golden {
    /// Reads everything the manifest lists.
    pub(crate) fn open() -> Self {
        let dir = std::env::var_os("QKV_GOLDEN_DIR")
            .map(PathBuf::from)
            .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden"));
        let path = dir.join("manifest.json");
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let manifest: Value = serde_json::from_str(&plain_json(&text)).unwrap();
        let (mut cases, mut tensors) = (Vec::new(), HashMap::new());
        for (file, entry) in manifest["files"].as_object().unwrap() {
            for fields in entry["cases"].as_array().unwrap() {
                let id = fields["id"].as_str().unwrap().to_string();
                cases.push(Case { file: file.clone(), id, fields: fields.clone() });
            }
            let path = dir.join(format!("{file}.safetensors"));
            let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let stored = SafeTensors::deserialize(&bytes).unwrap();
            let all = stored.tensors().into_iter().map(|(name, t)| (name, read(&t))).collect();
            tensors.insert(file.clone(), all);
        }
        Self { dir, cases, tensors }
    }

    /// Cases of one file.
    pub(crate) fn of<'a>(&'a self, file: &'a str) -> impl Iterator<Item = &'a Case> {
        self.cases.iter().filter(move |c| c.file == file)
    }

    /// Names of a file's tensors.
    pub(crate) fn names(&self, file: &str) -> Vec<String> {
        let mut names: Vec<String> = self.tensors[file].keys().cloned().collect();
        names.sort();
        names
    }

    pub(crate) fn find(&self, file: &str, name: &str) -> Option<&Tensor> {
        self.tensors[file].get(name)
    }

    /// A tensor of a case.
    pub(crate) fn tensor(&self, case: &Case, name: &str) -> &Tensor {
        let full = format!("{}.{name}", case.id);
        self.find(&case.file, &full).unwrap_or_else(|| panic!("{}: no tensor {full}", case.file))
    }

    /// The input of a case: its own, or the one shared under the first two parts of its id, or under the first.
    pub(crate) fn input(&self, case: &Case) -> &Tensor {
        let parts: Vec<&str> = case.id.split('.').collect();
        let names = [
            format!("{}.input", case.id),
            format!("{}.input", parts[..parts.len().min(2)].join(".")),
            format!("{}.input", parts[0]),
        ];
        names
            .iter()
            .find_map(|n| self.find(&case.file, n))
            .unwrap_or_else(|| panic!("{}: no input of {}", case.file, case.id))
    }
}

/// Python writes NaN and infinities as bare words, which JSON does not have: they become null.
fn plain_json(text: &str) -> String {
    let (mut out, mut rest, mut quoted) = (String::with_capacity(text.len()), text, false);
    while let Some(c) = rest.chars().next() {
        if !quoted && let Some(word) = ["NaN", "-Infinity", "Infinity"].iter().find(|w| rest.starts_with(**w))
        {
            out.push_str("null");
            rest = &rest[word.len()..];
            continue;
        }
        if c == '"' && !out.ends_with('\\') {
            quoted = !quoted;
        }
        out.push(c);
        rest = &rest[c.len_utf8()..];
    }
    out
}

fn read(t: &safetensors::tensor::TensorView<'_>) -> Tensor {
    fn all<const N: usize, T>(bytes: &[u8], one: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.chunks_exact(N).map(|b| one(b.try_into().unwrap())).collect()
    }
    let bytes = t.data();
    let elements = match t.dtype() {
        Stored::F16 => Elements::F16(all(bytes, f16::from_le_bytes)),
        Stored::BF16 => Elements::Bf16(all(bytes, bf16::from_le_bytes)),
        Stored::F32 => Elements::F32(all(bytes, f32::from_le_bytes)),
        Stored::F64 => Elements::F64(all(bytes, f64::from_le_bytes)),
        Stored::U8 => Elements::U8(bytes.to_vec()),
        Stored::I8 => Elements::I8(all(bytes, i8::from_le_bytes)),
        Stored::I32 => Elements::I32(all(bytes, i32::from_le_bytes)),
        other => panic!("dtype {other:?}"),
    };
    Tensor { shape: t.shape().to_vec(), elements }
}
