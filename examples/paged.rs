//! A small serving loop: requests come and go in one paged cache, and those with the same system prompt share its blocks.
//! `cargo run --release --example paged`
//!
//! An engine with a GPU writes the same loop: `PagePool::on_device`, `PagedKvCache::on_device`, tensors in device memory.

use half::f16;
use qkv::{
    AttendParams, Batch, Bits, CacheConfig, PagePool, PagedKvCache, Prefix, Seat, TensorMut, TensorRef,
};
use std::collections::VecDeque;

const LAYERS: usize = 2;
const KV_HEADS: usize = 2;
const HEADS: usize = 4;
const DIM: usize = 64;
/// Tokens of the system prompt, of which whole tiles of 64 that have left the window can be shared.
const SYSTEM: usize = 300;

/// What a model's projections would give of tokens [from, from + rows) of a text: `[rows, heads, DIM]`.
fn projected(text: usize, from: usize, rows: usize, heads: usize) -> Vec<f16> {
    let at = |i: usize| (from * heads * DIM + i) as f32 * 0.37 + text as f32;
    (0..rows * heads * DIM).map(|i| f16::from_f32(at(i).sin())).collect()
}

struct Request {
    number: usize,
    seat: Seat,
    /// Tokens that the prompt still has, and tokens to be made.
    prompt: usize,
    answer: usize,
}

/// One forward pass over a batch: each request brings as many new tokens as it says.
fn step(cache: &mut PagedKvCache, requests: &[Request], tokens: &[usize]) -> qkv::Result<()> {
    let seats: Vec<Seat> = requests.iter().map(|r| r.seat).collect();
    let mut query_start = vec![0i32];
    for n in tokens {
        query_start.push(query_start[query_start.len() - 1] + *n as i32);
    }
    let rows: usize = tokens.iter().sum();
    let lens = seats.iter().map(|s| cache.len(*s)).collect::<qkv::Result<Vec<_>>>()?;
    for (seat, n) in seats.iter().zip(tokens) {
        // Block ids for tiles that close in this step.
        cache.reserve(*seat, *n)?;
    }
    cache.begin_step(&Batch::new(&seats, &query_start))?;
    let batch = |heads: usize, operand: usize| -> Vec<f16> {
        let of = requests.iter().zip(&lens).zip(tokens);
        of.flat_map(|((r, len), n)| projected(10 * r.number + operand, *len, *n, heads)).collect()
    };
    let (q, k, v) = (batch(HEADS, 0), batch(KV_HEADS, 1), batch(KV_HEADS, 2));
    let mut out = vec![0f32; rows * HEADS * DIM];
    for layer in 0..LAYERS {
        let q = TensorRef::thd(&q, [rows, HEADS, DIM])?;
        let (k, v) = (TensorRef::thd(&k, [rows, KV_HEADS, DIM])?, TensorRef::thd(&v, [rows, KV_HEADS, DIM])?);
        let mut o = TensorMut::thd(&mut out, [rows, HEADS, DIM])?;
        if tokens.iter().any(|n| *n > 64) {
            cache.prefill(layer, &q, &k, &v, &AttendParams::new(), &mut o, None)?;
        } else {
            cache.append(layer, &k, &v)?;
            cache.attend(layer, &q, &AttendParams::new(), &mut o, None)?;
        }
    }
    Ok(())
}

fn main() -> qkv::Result<()> {
    let config = CacheConfig::new(LAYERS, KV_HEADS, DIM).with_bits(Bits::B4).with_capacity(4, 1024);
    let pool = PagePool::new(&config, 24)?;
    let mut cache = PagedKvCache::new(config, pool)?;

    // The system prompt once; its closed tiles start every request.
    let system = [Request { number: 0, seat: cache.open()?, prompt: 0, answer: 0 }];
    step(&mut cache, &system, &[SYSTEM])?;
    let prefix: Prefix = cache.prefix(system[0].seat, SYSTEM)?;
    cache.close(system[0].seat)?;
    println!(
        "{} of {SYSTEM} tokens of the system prompt are shared, in {} blocks",
        prefix.tokens(),
        prefix.blocks().len()
    );

    let mut waiting: VecDeque<(usize, usize, usize)> =
        (1..=7).map(|i| (i, SYSTEM - prefix.tokens() + 30 * i, 40 + 10 * i)).collect();
    let (mut running, mut steps): (Vec<Request>, usize) = (Vec::new(), 0);
    while !running.is_empty() || !waiting.is_empty() {
        // Room for the whole request, so that none runs out of blocks half way.
        while let Some((number, prompt, answer)) = waiting.front().copied() {
            let promised: usize = running.iter().map(|r| (r.prompt + r.answer).div_ceil(64)).sum();
            let blocks = (prompt + answer).div_ceil(64);
            if running.len() == 4 || promised + blocks > cache.pool().free_blocks() {
                break;
            }
            waiting.pop_front();
            running.push(Request { number, seat: cache.open_with(&prefix)?, prompt, answer });
        }
        // Prompts in chunks of 128, answers a token at a time, all in one batch.
        let tokens: Vec<usize> =
            running.iter().map(|r| if r.prompt > 0 { r.prompt.min(128) } else { 1 }).collect();
        step(&mut cache, &running, &tokens)?;
        steps += 1;
        for (request, n) in running.iter_mut().zip(&tokens) {
            if request.prompt > 0 {
                request.prompt -= n;
            } else {
                request.answer -= 1;
            }
        }
        for done in running.iter().filter(|r| r.prompt + r.answer == 0) {
            println!(
                "step {steps}: request {} ends with {} tokens, {} blocks free",
                done.number,
                cache.len(done.seat)?,
                cache.pool().free_blocks()
            );
            cache.close(done.seat)?;
        }
        running.retain(|r| r.prompt + r.answer > 0);
    }
    println!("{steps} steps, {} bytes allocated", cache.bytes_allocated());
    Ok(())
}
