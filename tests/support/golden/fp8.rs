//! Class d: FP8 bytes, scaled tensors and decode tables.

use crate::functions::Functions;
use crate::golden::{Case, Elements, Golden, Tensor};
use crate::report::Report;
use half::{bf16, f16};
use qkv::quant::fp8::{self, Fp8Tensor};
use qkv::{Dtype, Fp8, Fp8Kind, Granularity};

pub(crate) fn run(on: &dyn Functions, golden: &Golden, report: &mut Report) {
    let mut not_applicable = Vec::new();
    for case in golden.of("fp8") {
        report.count('d', case);
        if case.lists_tensor("bytes") {
            scaled(on, golden, case, report);
        } else {
            patterns(on, golden, case, report, &mut not_applicable);
        }
    }
    for name in golden.names("fp8") {
        let Some(kind) = name.strip_prefix("decode.") else { continue };
        let table = golden.find("fp8", &name).unwrap().f32();
        match kind_of(kind) {
            Some(kind) => {
                let all = Fp8Tensor::from_bytes([1, 1, 256], unit(kind), (0..=255).collect(), vec![1.0]);
                let decoded = on.decode(&all.unwrap(), Dtype::F32).f32();
                assert_eq!(table.len(), decoded.len(), "{name}");
                for (byte, want) in table.iter().enumerate() {
                    for got in [fp8::value(kind, byte as u8), decoded[byte]] {
                        let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                        if !same {
                            report.fail(format!("{name}: byte {byte:#x} is {got}, not {want}"));
                        }
                    }
                }
            }
            None => not_applicable.push(name),
        }
    }
    report.note(format!("d: read, not applicable here: {}", not_applicable.join(", ")));
}

fn kind_of(name: &str) -> Option<Fp8Kind> {
    match name {
        "e4m3fn" => Some(Fp8Kind::E4M3),
        "e5m2" => Some(Fp8Kind::E5M2),
        _ => None,
    }
}

fn unit(kind: Fp8Kind) -> Fp8 {
    match kind {
        Fp8Kind::E4M3 => Fp8::e4m3(Granularity::Tensor),
        Fp8Kind::E5M2 => Fp8::e5m2(Granularity::Tensor),
    }
}

/// NaN is compared as a class: which of its bytes, and which sign, differs between the peers.
fn nan_byte(kind: Fp8Kind, byte: u8) -> bool {
    fp8::value(kind, byte).is_nan()
}

fn patterns(
    on: &dyn Functions,
    golden: &Golden,
    case: &Case,
    report: &mut Report,
    not_applicable: &mut Vec<String>,
) {
    let kind = kind_of(case.id.rsplit('.').next().unwrap());
    for name in case.tensors() {
        let stored = golden.tensor(case, &name);
        if name != "satfinite" || kind.is_none() {
            not_applicable.push(format!("{}.{name} ({} bytes)", case.id, stored.len()));
        }
    }
    let Some(kind) = kind else { return };
    let n = case.int("n").unwrap() as usize;
    let stored = golden.find("fp8", &format!("{}.input", case.id.split('.').next().unwrap()));
    let input = match stored {
        Some(x) => x.clone(),
        // All patterns of a 16-bit type, in order.
        None if case.id.starts_with("bf16") => Tensor {
            shape: vec![n],
            elements: Elements::Bf16((0..n).map(|i| bf16::from_bits(i as u16)).collect()),
        },
        None => Tensor {
            shape: vec![n],
            elements: Elements::F16((0..n).map(|i| f16::from_bits(i as u16)).collect()),
        },
    };
    let nans = input.f64().iter().filter(|x| x.is_nan()).count();
    report.check(nans as i64 == case.int("nan_in").unwrap(), case, || format!("{nans} NaN in the input"));
    let ours = on.encode(&input, [1, 1, n], unit(kind), Some(&[1.0]));
    let want = golden.tensor(case, "satfinite").u8();
    let bad = ours
        .bytes()
        .iter()
        .zip(want)
        .filter(|(a, b)| a != b && !(nan_byte(kind, **a) && nan_byte(kind, **b)))
        .count();
    report.check(bad == 0 && want.len() == n, case, || format!("{bad} of {n} bytes differ"));
}

/// One scale a tensor, from its absolute maximum.
fn scaled(on: &dyn Functions, golden: &Golden, case: &Case, report: &mut Report) {
    let (input, want) = (golden.input(case), golden.tensor(case, "dequant"));
    let scale = golden.tensor(case, "scale").f32();
    let format = unit(Fp8Kind::E4M3);
    let dims = [1, 1, input.len()];
    let ours = on.encode(input, dims, format, None);
    report.check(ours.scales() == scale, case, || format!("scale {:?}, not {scale:?}", ours.scales()));
    let bytes = golden.tensor(case, "bytes").u8();
    let bad = ours.bytes().iter().zip(bytes).filter(|(a, b)| a != b).count();
    report.check(bad == 0, case, || format!("{bad} bytes differ"));
    let theirs = Fp8Tensor::from_bytes(dims, format, bytes.to_vec(), scale).unwrap();
    let dtype: Dtype = case.dtype("dtype");
    let decoded = on.decode(&theirs, dtype).f64();
    let bad = decoded.iter().zip(want.f64()).filter(|(a, b)| **a != *b).count();
    report.check(bad == 0, case, || format!("{bad} elements decode differently"));
}
