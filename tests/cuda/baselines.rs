//! Kernels that others are held against do all of the work that they are credited with.

use crate::cost;
use crate::gpu::{Gpu, Random};
use qkv::Error;
use qkv::cuda::launch::{plain_append, stream_copy, stream_read};

#[test]
fn streams_read_and_copy_every_byte() {
    let gpu = Gpu::new();
    let mut random = Random::new(1);
    // Less than a pass of the grid, and several with a rest.
    for vectors in [1, 33, 700_001] {
        let bytes: Vec<u8> = (0..16 * vectors).map(|_| random.bits() as u8).collect();
        let from = gpu.up(&bytes);
        let mut sum = gpu.up(&[7u32]);
        stream_read(&gpu.device, gpu.raw(), (&from).into(), (&mut sum).into()).unwrap();
        let words = bytes.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w));
        assert_eq!(gpu.down(&sum), [7 ^ words.fold(0, |a, w| a ^ w)]);
        let few = vectors < 1000;
        if let Some(s) = gpu.simulator {
            // A word a warp is written.
            let least = bytes.len() + 4 * 8 * 8 * gpu.device.multiprocessors() as usize;
            if few { drop(s.take_stats()) } else { cost(s, least, "read") }
        }
        let mut to = gpu.zeros::<u8>(bytes.len());
        stream_copy(&gpu.device, gpu.raw(), (&from).into(), (&mut to).into()).unwrap();
        assert!(gpu.down(&to) == bytes, "{vectors} vectors");
        if let Some(s) = gpu.simulator {
            if few { drop(s.take_stats()) } else { cost(s, 2 * bytes.len(), "copy") }
        }
    }
}

#[test]
fn plain_rows_come_to_their_slots() {
    let gpu = Gpu::new();
    let mut random = Random::new(2);
    let (rows, slots, widths) = (5, 9, [24, 8]);
    let mut of = |n: usize| -> Vec<u16> { (0..n).map(|_| random.bits() as u16).collect() };
    let inputs = widths.map(|w| of(rows * w));
    let mapping = [3i64, -1, 8, 0, 9];
    let up = inputs.each_ref().map(|x| gpu.up(x));
    let mut caches = widths.map(|w| gpu.zeros::<u16>(slots * w));
    let [k, v] = &mut caches;
    let slot_mapping = gpu.up(&mapping);
    let from = [(&up[0]).into(), (&up[1]).into()];
    plain_append(&gpu.device, gpu.raw(), from, (&slot_mapping).into(), [k.into(), v.into()], slots).unwrap();
    for ((x, cache), w) in inputs.iter().zip(&caches).zip(widths) {
        let mut want = vec![0u16; slots * w];
        for (row, slot) in mapping.iter().enumerate().filter(|(_, s)| (0..slots as i64).contains(s)) {
            want[*slot as usize * w..][..w].copy_from_slice(&x[row * w..][..w]);
        }
        assert_eq!(gpu.down(cache), want);
    }
}

#[test]
fn baselines_refuse_what_does_not_fit() {
    let gpu = Gpu::new();
    let (x, mut sum, mut short) = (gpu.zeros::<u8>(24), gpu.zeros::<u32>(1), gpu.zeros::<u8>(16));
    let got = stream_read(&gpu.device, gpu.raw(), (&x).into(), (&mut sum).into());
    assert!(matches!(got, Err(Error::Shape { what: "from", .. })), "{got:?}");
    let got = stream_copy(&gpu.device, gpu.raw(), (&x).into(), (&mut short).into());
    assert!(matches!(got, Err(Error::Length { what: "to", expected: 24, got: 16 })), "{got:?}");
}
