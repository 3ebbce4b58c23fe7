//! Open, append, truncate, fork, prefix, reorder, clear, close and cancel in random order.

use crate::attention::{self, GROUP, Rows};
use crate::machine::{self, Machine, Query};
use crate::model::*;
use half::f16;
use qkv::cache::{Batch, Prefix, Seat};
use qkv::*;
use std::collections::HashSet;
use std::rc::Rc;

const SEQUENCES: usize = 4;
const MAX_TOKENS: usize = 704;

/// How a step is fed: exact attention first, attention over what was stored, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Prefill,
    Attend,
    Append,
}

struct History<'m, M: Machine> {
    machine: &'m M,
    rng: Rng,
    rules: Rules,
    cache: PagedKvCache<M::B>,
    live: Vec<(Seat, Model)>,
    prefixes: Vec<(Prefix<M::B>, Model)>,
    requantized: u64,
    most_closed: usize,
    attended: Attended,
}

/// Sequences of steps whose attention was compared.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attended {
    prefills: usize,
    /// Over pages; over exact rows only.
    packed: usize,
    exact: usize,
}

/// What a history saw.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// The most tiles that a sequence closed.
    most_closed: usize,
    attended: Attended,
}

impl<'m, M: Machine> History<'m, M> {
    fn new(machine: &'m M, seed: u64) -> Self {
        let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let residual = [None, Some(0), Some(32), Some(64), Some(128)][rng.below(5)];
        let sinks = if residual.is_some() { [0, 4][rng.below(2)] } else { 0 };
        let bits = [Bits::B2, Bits::B4, Bits::B8][rng.below(3)];
        let stored =
            |rng: &mut Rng| Stored { bits, group: 32, per_channel: residual.is_some() && rng.below(2) == 0 };
        let rules = Rules { residual, sinks, key: stored(&mut rng), value: stored(&mut rng) };
        let config = rules.config(SEQUENCES, MAX_TOKENS);
        let cache = machine.paged(config, SEQUENCES * 12 + 8).unwrap();
        Self {
            machine,
            rng,
            rules,
            cache,
            live: vec![],
            prefixes: vec![],
            requantized: 0,
            most_closed: 0,
            attended: Attended::default(),
        }
    }

    fn pick(&mut self) -> Option<usize> {
        if self.live.is_empty() { None } else { Some(self.rng.below(self.live.len())) }
    }

    /// New tokens for a few sequences in one step; sometimes cancelled halfway.
    fn step(&mut self) {
        let size = [1, 3, 17, 64, 150, 300, 400, 600][self.rng.below(8)];
        let mut seats = vec![];
        let mut starts = vec![0i32];
        let mut rows: Vec<Token> = vec![];
        let chosen: Vec<usize> = (0..self.live.len()).filter(|_| self.rng.below(3) > 0).collect();
        for &i in &chosen {
            let room = MAX_TOKENS - self.live[i].1.tokens.len();
            let n = (size / 2 + self.rng.below(size / 2 + 2)).min(room);
            seats.push(self.live[i].0);
            rows.extend((0..n).map(|_| Token::random(&mut self.rng)));
            starts.push(rows.len() as i32);
        }
        if seats.is_empty() {
            return;
        }
        for (i, s) in seats.iter().enumerate() {
            self.cache.reserve(*s, (starts[i + 1] - starts[i]) as usize).unwrap();
        }
        self.cache.begin_step(&Batch::new(&seats, &starts)).unwrap();
        let layers = if self.rng.below(2) == 0 { [0, 1] } else { [1, 0] };
        let longest = starts.windows(2).map(|s| (s[1] - s[0]) as usize).max().unwrap();
        let way = match self.rng.below(3) {
            0 => Way::Prefill,
            _ if longest <= TILE => Way::Attend,
            _ => Way::Append,
        };
        self.feed(layers[0], &chosen, &rows, &starts, way);
        if self.rng.below(12) == 0 {
            self.cancel(&chosen, &rows, &starts, layers[0]);
            return;
        }
        self.feed(layers[1], &chosen, &rows, &starts, way);
        for (i, &m) in chosen.iter().enumerate() {
            let model = &mut self.live[m].1;
            model.append(&self.rules, &rows[starts[i] as usize..starts[i + 1] as usize]);
            self.most_closed = self.most_closed.max(model.closed);
        }
    }

    /// One layer of an open step for all its sequences, and what attention gives.
    fn feed(&mut self, layer: usize, chosen: &[usize], rows: &[Token], starts: &[i32], way: Way) {
        let (m, heads) = (self.machine, GROUP * HEADS);
        let (k, v) = layer_rows(rows, layer);
        // Numbers that f16 holds, like the tokens.
        let q: Vec<f32> =
            (0..rows.len() * heads * DIM).map(|_| f16::from_f32(self.rng.f32()).to_f32()).collect();
        let query = Query::new::<M>(&q, heads);
        let answer = match way {
            Way::Prefill => query.prefill(m, &mut self.cache, layer, &k, &v).unwrap(),
            _ => {
                machine::append(m, &mut self.cache, layer, &k, &v).unwrap();
                if way == Way::Append {
                    return;
                }
                query.attend(m, &mut self.cache, layer).unwrap()
            }
        };
        for (i, &at) in chosen.iter().enumerate() {
            let (first, end) = (starts[i] as usize, starts[i + 1] as usize);
            if first == end {
                continue;
            }
            let mut seen = self.live[at].1.clone();
            if way == Way::Prefill {
                seen.tokens.extend_from_slice(&rows[first..end]);
                self.attended.prefills += 1;
            } else {
                seen.append(&self.rules, &rows[first..end]);
                let packed = seen.packed > 0;
                *(if packed { &mut self.attended.packed } else { &mut self.attended.exact }) += 1;
            }
            let rows = Rows { q: &q, first, count: end - first, tokens: &seen.tokens, layer };
            let (out, lse) = attention::distance(&mut self.rng, &rows, &answer);
            assert!(
                out <= M::ERROR && lse <= 2.0 * M::ERROR,
                "{way:?}, layer {layer}, {} + {} tokens, {:?}: {out:e} from f64, LSE {lse:e}",
                seen.tokens.len() - rows.count,
                rows.count,
                self.rules
            );
        }
    }

    /// The layer that has appended is cut back; the other one closes what both can agree on.
    fn cancel(&mut self, chosen: &[usize], rows: &[Token], starts: &[i32], done: usize) {
        self.cache.cancel_step().unwrap();
        for (i, &m) in chosen.iter().enumerate() {
            let (seat, model) = &mut self.live[m];
            let old = model.tokens.len();
            let new = &rows[starts[i] as usize..starts[i + 1] as usize];
            let mut grown = model.clone();
            grown.append(&self.rules, new);
            let mut cut = grown.clone();
            cut.truncate(&self.rules, old);
            // The layer without an append holds what an append of nothing that closes the same tiles would.
            let mut other = model.clone();
            if self.rules.residual.is_some() {
                let tiles = cut.packed / TILE;
                while other.packed / TILE < tiles {
                    let rules =
                        Rules { residual: Some(other.tokens.len() - other.packed - TILE), ..self.rules };
                    other.append(&rules, &[]);
                }
            }
            let part = |layer: usize| layer * HEADS * DIM..(layer + 1) * HEADS * DIM;
            for (t, o) in cut.tokens.iter_mut().zip(&other.tokens) {
                let p = part(1 - done);
                t.k[p.clone()].copy_from_slice(&o.k[p.clone()]);
                t.v[p.clone()].copy_from_slice(&o.v[p]);
            }
            cut.requantized = other.requantized;
            *model = cut;
            // A cut to the length it has gives reserved blocks back.
            self.cache.truncate(*seat, old).unwrap();
        }
    }

    fn act(&mut self) {
        match self.rng.below(18) {
            0 | 1 if self.live.len() < SEQUENCES => {
                let seat = self.cache.open().unwrap();
                self.live.push((seat, Model::default()));
            }
            2 => {
                let Some(i) = self.pick() else { return };
                let (seat, model) = &mut self.live[i];
                // Mostly small rollbacks, sometimes anywhere.
                let len = model.tokens.len();
                let n = if self.rng.below(3) > 0 {
                    len - self.rng.below(len.min(40) + 1)
                } else {
                    self.rng.below(len + 1)
                };
                self.cache.truncate(*seat, n).unwrap();
                model.truncate(&self.rules, n);
            }
            3 if self.live.len() < SEQUENCES => {
                let Some(i) = self.pick() else { return };
                let seat = self.cache.fork(self.live[i].0).unwrap();
                let copy = self.live[i].1.fork(&self.rules);
                self.live.push((seat, copy));
            }
            4 if self.prefixes.len() < 2 => {
                let Some(i) = self.pick() else { return };
                let (seat, model) = &self.live[i];
                let n = self.rng.below(model.tokens.len() + 1);
                let prefix = self.cache.prefix(*seat, n).unwrap();
                let model = model.prefix(n);
                assert_eq!(prefix.tokens(), model.tokens.len());
                self.prefixes.push((prefix, model));
            }
            5 if self.live.len() < SEQUENCES && !self.prefixes.is_empty() => {
                let i = self.rng.below(self.prefixes.len());
                let seat = self.cache.open_with(&self.prefixes[i].0).unwrap();
                self.live.push((seat, self.prefixes[i].1.clone()));
            }
            6 if !self.prefixes.is_empty() => {
                let i = self.rng.below(self.prefixes.len());
                self.prefixes.swap_remove(i);
            }
            7 if self.live.len() > 1 => {
                let parents: Vec<usize> =
                    (0..self.live.len()).map(|_| self.rng.below(self.live.len())).collect();
                let mut seats: Vec<Seat> = self.live.iter().map(|l| l.0).collect();
                self.cache.reorder(&mut seats, &parents).unwrap();
                let old = std::mem::take(&mut self.live);
                let mut kept = HashSet::new();
                for (i, p) in parents.iter().enumerate() {
                    let model = if kept.insert(*p) { old[*p].1.clone() } else { old[*p].1.fork(&self.rules) };
                    self.live.push((seats[i], model));
                }
                self.requantized += old
                    .iter()
                    .enumerate()
                    .filter(|x| !kept.contains(&x.0))
                    .map(|x| x.1.1.requantized)
                    .sum::<u64>();
            }
            8 if self.rng.below(3) == 0 => {
                let Some(i) = self.pick() else { return };
                let (seat, model) = self.live.swap_remove(i);
                self.requantized += model.requantized;
                self.cache.close(seat).unwrap();
            }
            9 if self.rng.below(3) == 0 => {
                let Some(i) = self.pick() else { return };
                let (seat, model) = &mut self.live[i];
                self.cache.clear(*seat).unwrap();
                *model = Model { requantized: model.requantized, ..Model::default() };
            }
            _ => self.step(),
        }
    }

    fn check(&self, what: &str) {
        for (i, (seat, model)) in self.live.iter().enumerate() {
            check(
                self.machine,
                &self.cache,
                *seat,
                model,
                &format!("{what}, sequence {i}, {:?}", self.rules),
            );
        }
        let owners = self.live.iter().map(|l| &l.1).chain(self.prefixes.iter().map(|p| &p.1));
        let blocks: HashSet<*const ()> = owners.flat_map(|m| m.blocks.iter().map(Rc::as_ptr)).collect();
        let seats = self.live.len() * self.cache.config().seat_bytes();
        assert_eq!(
            self.cache.bytes_used(),
            blocks.len() * self.cache.pool().block_bytes() + seats,
            "{what}: bytes used, {:?}",
            self.rules
        );
        let requantized = self.requantized + self.live.iter().map(|l| l.1.requantized).sum::<u64>();
        assert_eq!(
            self.cache.stats().requantized_tokens,
            requantized,
            "{what}: requantized, {:?}",
            self.rules
        );
    }
}

/// One history.
pub(crate) fn run<M: Machine>(machine: &M, seed: u64) -> Seen {
    let mut h = History::new(machine, seed);
    let seat = h.cache.open().unwrap();
    h.live.push((seat, Model::default()));
    let acts = 14 + h.rng.below(14);
    for act in 0..acts {
        h.act();
        if act % 5 == 4 || act + 1 == acts {
            h.check(&format!("history {seed}, act {act}"));
        }
    }
    Seen { most_closed: h.most_closed, attended: h.attended }
}

/// Enough of the histories closed tiles and attended.
pub(crate) fn report(seen: &[Seen]) {
    let histories = seen.len();
    let closed = |n: usize| seen.iter().filter(|s| s.most_closed >= n).count();
    let (one, five) = (closed(1), closed(5));
    println!("{histories} histories: {one} closed a tile, {five} closed five");
    assert!(one * 10 >= histories * 9, "only {one} of {histories} histories closed a tile");
    assert!(five * 2 >= histories, "only {five} of {histories} histories closed five tiles");
    let sum = |of: fn(&Attended) -> usize| seen.iter().map(|s| of(&s.attended)).sum::<usize>();
    let all = [sum(|a| a.prefills), sum(|a| a.packed), sum(|a| a.exact)];
    println!(
        "compared: {} prefills, attention {} times over pages, {} times over exact rows",
        all[0], all[1], all[2]
    );
    assert!(all[0] > histories && all[1] > histories && all[2] > 0, "{all:?} of {histories}");
}
