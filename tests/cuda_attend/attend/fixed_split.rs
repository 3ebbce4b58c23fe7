//! Fixed splits: the bits of a sequence's results do not depend on the rest of the batch.

use super::{Case, Findings, config, own};
use crate::gpu::{Gpu, Random};
use crate::still::{Still, small_bytes};
use qkv::cuda::launch::attend_workspace_fixed;
use qkv::{Affine, Bits, CacheConfig, Error};

const LENS: [usize; 4] = [700, 1990, 40, 333];
const WIDTH: usize = 2048 / 64;

/// The results of some sequences of `LENS`, which have the same pages, rows and queries in every batch.
fn batch(
    gpu: &Gpu,
    c: &CacheConfig,
    members: &[usize],
    group: usize,
    split: Option<usize>,
    max_query_len: usize,
) -> Vec<Vec<u32>> {
    let c = c.clone().with_capacity(LENS.len(), 2048);
    let lens: Vec<usize> = members.iter().map(|m| LENS[*m]).collect();
    let mut still = Still::with_blocks(gpu, c.clone(), &lens, LENS.len() * WIDTH).filled(gpu);
    // Blocks and rows follow the sequence, not its place in the batch.
    let mut lengths = vec![0i32; 2 * LENS.len()];
    let of = gpu.down(&still.lengths);
    for (i, m) in members.iter().enumerate() {
        lengths[2 * m..2 * m + 2].copy_from_slice(&of[2 * i..2 * i + 2]);
    }
    still.lengths = gpu.up(&lengths);
    still.seats = gpu.up(&members.iter().map(|m| *m as i32).collect::<Vec<_>>());
    let blocks =
        |m: &usize| (0..WIDTH).map(|i| ((m * WIDTH + i) * 5 % (LENS.len() * WIDTH)) as i32).collect();
    still.tables = gpu.up(&members.iter().flat_map::<Vec<i32>, _>(blocks).collect::<Vec<_>>());
    for (i, window) in still.layer.window.iter_mut().enumerate() {
        let mut random = Random::new(70 + i as u64);
        // f16 below 1
        let rows: Vec<u16> = (0..window.len()).map(|_| random.bits() as u16 & 0xbbff).collect();
        *window = gpu.up(&rows);
    }
    let row = c.kv_heads * group * c.key_dim;
    let q: Vec<f32> = members.iter().flat_map(|m| Random::new(90 + *m as u64).normals(row)).collect();
    (still.split, still.max_query_len) = (split, max_query_len);
    if let Some(pages) = split {
        let heads = c.kv_heads * group;
        let n = attend_workspace_fixed(&c, pages, heads, members.len(), max_query_len).unwrap();
        // Exactly as much as is asked for: the simulator sees what lies behind.
        still.workspace = gpu.up(&vec![f32::NAN; n.max(1)]);
    }
    let out = still.attend(gpu, group, &q);
    assert!(out.iter().all(|x| x.is_finite() && *x != 0.0));
    out.chunks(c.kv_heads * group * c.value_dim).map(|r| r.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn a_sequence_has_the_same_bits_in_every_batch() {
    let gpu = Gpu::new();
    let mut formats = own(128);
    // One without a kernel of its own.
    formats.push((Affine::per_channel(Bits::B3, 32).into(), Affine::per_token(Bits::B4, 32).into()));
    let mut differs = false;
    for (i, (key, value)) in formats.into_iter().enumerate() {
        let group = [1, 4, 8, 12][i % 4];
        // 64: each sequence is one split.
        let pages = [1, 4, 7, 64][i / 2 % 4];
        let mut c = config(key, value, 2, 128);
        if i % 3 == 1 {
            c = c.with_sliding_window(Some(500));
        }
        let all = batch(&gpu, &c, &[0, 1, 2, 3], group, Some(pages), 1);
        let few = batch(&gpu, &c, &[3, 1], group, Some(pages), 3);
        let one = batch(&gpu, &c, &[1], group, Some(pages), 1);
        let what = format!("{key:?} {value:?} group {group}, {pages} pages");
        assert_eq!(few, [all[3].clone(), all[1].clone()], "{what}");
        assert_eq!(one, [all[1].clone()], "{what}");
        // Sums in another order are others.
        differs |= batch(&gpu, &c, &[1], group, Some(pages + 1), 1) != one;
    }
    assert!(differs, "the comparison sees no difference where there must be some");
}

/// A block lists 256 pages at a time: results of splits that are longer are those of short ones. The last page is seen most.
#[test]
fn splits_longer_than_the_list_of_pages() {
    let gpu = Gpu::new();
    for (i, (key, value)) in own(64).into_iter().enumerate() {
        // Up to the end of a list; one, three and four pages behind it (four warps); all of another list, and one more.
        let pages = [256, 257, 259, 260, 512, 513][i % 6];
        let group = if i % 2 == 0 { 3 } else { 8 };
        let c = config(key, value, 1, 64).with_residual(Some(32)).with_sinks(0).with_capacity(1, 64 * 520);
        let q: Vec<f32> = Random::new(5).normals(group * 64).iter().map(|x| x.abs()).collect();
        let attend = |split, loud: bool| {
            let mut still = Still::new(&gpu, c.clone(), &[64 * pages + 40]);
            let (table, block) = (gpu.down(&still.tables), c.block_bytes().unwrap());
            // Codes and pairs that are small in every format, and larger ones.
            let mut bytes: Vec<u8> = small_bytes(520 * block).iter().map(|b| b & 0x0b).collect();
            bytes[table[pages - 1] as usize * block..][..block].fill(if loud { 0x3b } else { 0x0b });
            still.layer.pages = gpu.up(&bytes);
            still.split = Some(split);
            still.workspace = gpu.zeros(attend_workspace_fixed(&c, split, group, 1, 1).unwrap().max(1));
            still.attend(&gpu, group, &q)
        };
        let [short, long, quiet] = [attend(16, true), attend(600, true), attend(600, false)];
        // Rotated values are large in few channels, so rows are compared.
        for row in (0..group).map(|r| 64 * r..64 * (r + 1)) {
            let norm = |f: &dyn Fn(usize) -> f32| row.clone().map(|i| f(i).powi(2)).sum::<f32>().sqrt();
            let (apart, loud) = (norm(&|i| long[i] - short[i]), norm(&|i| short[i]));
            let what = format!("{key:?} {value:?}, {pages} pages: {apart} of {loud}");
            assert!(apart <= 2e-3 * loud && loud > 1.2 * norm(&|i| quiet[i]), "{what}");
        }
    }
}

/// The same against f64.
#[test]
fn a_split_longer_than_the_list_of_pages_is_right() {
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    for (i, (key, value)) in own(64).into_iter().enumerate().filter(|(i, _)| [0, 3, 4].contains(i)) {
        for group in [3, 8] {
            let c = config(key, value, 1, 64).with_capacity(1, 64 * 270);
            let mut case = Case::new(c, group, &[64 * 258 + 70], &[1]);
            case.split = Some(600);
            findings.check(&gpu, &case, &mut Random::new(20 + i as u64));
        }
    }
}

#[test]
fn too_little_workspace_and_empty_splits_are_refused() {
    let (key, value) = CacheConfig::default_formats(Bits::B4, 64);
    let c = config(key, value, 2, 64).with_capacity(2, 8192);
    let refused = attend_workspace_fixed(&c, 0, 4, 2, 1).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported { what: "fixed_split", .. }), "{refused}");
    let refused = attend_workspace_fixed(&c, 16, 3, 2, 1).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported { what: "query heads", .. }), "{refused}");
    let refused = attend_workspace_fixed(&c, 1, 4, usize::MAX, 1).unwrap_err();
    assert!(matches!(&refused, Error::Capacity { .. }), "{refused}");
    // 128 pages, 8 items of rows and the sinks in splits of 64: three places for each kv head of each sequence.
    let n = attend_workspace_fixed(&c, 64, 4, 2, 1).unwrap();
    assert_eq!(n, 3 * 2 * 2 * 8 * (64 + 2), "the f16 path has 8 columns");
}
