//! FP8 against what ml_dtypes and PyTorch make of the same numbers. NaNs are one class.

use super::*;

const DATA: &[u8] = include_bytes!("../../../tests/data/fp8.bin");

fn f32_at(at: usize) -> f32 {
    f32::from_le_bytes(DATA[at..at + 4].try_into().unwrap())
}

/// Offsets of each format's parts: see the data's README.
const FORMATS: [(&str, usize, usize, usize, u8); 2] =
    [("e4m3x2", 0, 2048, 173_120, 0x7e), ("e5m2x2", 1024, 67_584, 183_120, 0x7c)];

#[test]
fn fp8_as_others_convert_it() {
    for (name, decoded, of_f16, of_f32, last) in FORMATS {
        let same = |got: u64, want: u64| {
            let nan = |b: u64| (b & 0x7f) as u8 > last;
            got == want || nan(got) && nan(want)
        };
        let both = |_, got: u64, want: u64| same(got & 0xff, want & 0xff) && same(got >> 8, want >> 8);
        let halves: Vec<Vec<u64>> = (0..0x1_0000u64).map(|x| vec![x << 16 | (0xffff - x)]).collect();
        check_with(
            &format!("cvt.rn.satfinite.{name}.f16x2 h, r"),
            &halves,
            |x| {
                let byte = |h: u64| u64::from(DATA[of_f16 + (h & 0xffff) as usize]);
                vec![byte(x[0] >> 16) << 8 | byte(x[0])]
            },
            both,
        );
        let n = 10_000;
        let floats: Vec<Vec<u64>> = (0..n)
            .map(|i| [i, (i + 1) % n].map(|i| u64::from(f32_at(133_120 + 4 * i).to_bits())).to_vec())
            .collect();
        let place: std::collections::HashMap<u64, usize> = (0..n).map(|i| (floats[i][0], i)).collect();
        check_with(
            &format!("cvt.rn.satfinite.{name}.f32 h, r, r"),
            &floats,
            |x| {
                let byte = |bits: u64| u64::from(DATA[of_f32 + place[&bits]]);
                vec![byte(x[0]) << 8 | byte(x[1])]
            },
            both,
        );
        let bytes: Vec<Vec<u64>> = (0..256).map(|b| vec![b << 8 | (255 - b)]).collect();
        check_with(
            &format!("cvt.rn.f16x2.{name} r, h"),
            &bytes,
            |x| {
                let value = |b: u64| u64::from(f32_at(decoded + 4 * (b & 0xff) as usize).to_bits());
                vec![value(x[0] >> 8) << 32 | value(x[0])]
            },
            |_, got, want| {
                [0, 1].into_iter().all(|i| {
                    let half = super::model::F16.value(got >> (16 * i) & 0xffff);
                    let want = f64::from(f32::from_bits((want >> (32 * i)) as u32));
                    half.to_bits() == want.to_bits() || half.is_nan() && want.is_nan()
                })
            },
        );
    }
}
