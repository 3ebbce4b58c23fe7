//! The result of a demo as Markdown and as one JSON object.

use crate::capacity::{self, CARDS};
use crate::chart::{self, Series};
use crate::memory::{LENGTHS, Memory, TIMED};
use crate::metrics::Score;
use crate::peers::Peer;
use crate::quality::Quality;
use crate::schemes::{FAMILIES, Scheme};
use crate::table::{Table, megabytes, nats, perplexity, thousands};
use crate::texts::Text;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::Path;

/// One scheme with everything measured about it.
#[derive(Debug, Clone)]
pub struct Row {
    /// The scheme.
    pub scheme: Scheme,
    /// Bits an element of whole blocks, window and sinks left out: how the peers count.
    pub bits: f64,
    /// Bits an element from `bytes_used` at 2,048 tokens, everything counted.
    pub bits_2k: f64,
    /// `bytes_used` at 2,048 tokens.
    pub bytes_2k: usize,
    /// Quality.
    pub quality: Quality,
    /// More bytes, and times; not measured for every row.
    pub memory: Option<Memory>,
}

/// Everything a demo found.
#[derive(Debug, Clone)]
pub struct Report {
    /// Model file.
    pub model: String,
    /// Its SHA-256.
    pub sha256: String,
    /// Bytes of a token in half precision.
    pub half_bytes: usize,
    /// Where the windows come from.
    pub source: String,
    /// Windows scored.
    pub windows: usize,
    /// The exact pass.
    pub exact: Score,
    /// What the harness checked about itself.
    pub checks: Vec<String>,
    /// The schemes.
    pub rows: Vec<Row>,
    /// Other projects on the same windows; empty for another model or text.
    pub peers: Vec<Peer>,
    /// The prompt.
    pub prompt: String,
    /// The exact text, texts with a window, texts in direct mode.
    pub texts: (Text, Vec<Text>, Vec<Text>),
    /// What other projects wrote for the same prompt.
    pub peer_texts: Vec<(String, String)>,
    /// Tokens beside the weights of two models.
    pub capacity: Vec<capacity::Row>,
    /// Cores used.
    pub cores: usize,
    /// Seconds of the whole run.
    pub seconds: f64,
}

impl Report {
    /// The big table.
    pub fn table(&self) -> String {
        let mut t = Table::new([
            "scheme",
            "bits",
            "bits at 2k",
            "MB at 2k",
            "at 8k",
            "at 32k",
            "saved at 8k",
            "step peak MB",
            "ppl",
            "KL (nats)",
            "top-1 %",
            "ms/token",
            "of it attention",
        ]);
        let dash = || "–".to_string();
        for r in &self.rows {
            let m = r.memory.as_ref();
            let mb = |i: usize| m.map_or_else(dash, |m| megabytes(m.bytes[i] as f64));
            let ms = |f: fn(&Memory) -> std::time::Duration| {
                m.map_or_else(dash, |m| format!("{:.1}", f(m).as_secs_f64() * 1e3))
            };
            let saved = m.map_or_else(dash, |m| {
                format!("{:.0} %", 100.0 * (1.0 - m.bytes[1] as f64 / (self.half_bytes * LENGTHS[1]) as f64))
            });
            let s = &r.quality.score;
            t.row([
                format!("qkv {}", r.scheme.name),
                format!("{:.2}", r.bits),
                format!("{:.2}", r.bits_2k),
                megabytes(r.bytes_2k as f64),
                mb(1),
                mb(2),
                saved,
                m.map_or_else(dash, |m| megabytes(m.peak_bytes as f64)),
                perplexity(s.perplexity()),
                nats(s.mean_kl()),
                format!("{:.2}", s.top1_percent()),
                ms(|m| m.token),
                ms(|m| m.attention),
            ]);
        }
        for p in &self.peers {
            let bits_2k = p.bytes_2k.map(|b| b * 8.0 / (self.half_bytes * LENGTHS[0]) as f64 * 2.0);
            let star = if p.windows == self.windows { "" } else { " \\*" };
            let mut row = vec![
                format!("{}{star}", p.name),
                p.bits.map_or_else(dash, |b| format!("{b:.2}")),
                bits_2k.map_or_else(dash, |b| format!("{b:.2}")),
                p.bytes_2k.map_or_else(dash, megabytes),
            ];
            row.extend((0..4).map(|_| dash()));
            row.extend([perplexity(p.perplexity), nats(p.kl), format!("{:.2}", p.top1), dash(), dash()]);
            t.row(row);
        }
        t.markdown()
    }

    /// The whole report.
    pub fn markdown(&self) -> String {
        let s = &self.exact;
        let mut out = format!(
            "{} windows of {}: 512 tokens exact, then 512 through the cache; exact perplexity {:.2}. `bits`: codes and \
             pairs of an element, as the other projects count; `bits at 2k`: from `bytes_used` at 2,048 tokens, window \
             and sinks included. `saved`: against plain f16 tensors. Peak: cache and scratch of a step at {} tokens; \
             times there, on {} cores, weights in f32.\n\n{}",
            self.windows,
            self.source,
            s.perplexity(),
            thousands(TIMED),
            self.cores,
            self.table()
        );
        if self.peers.iter().any(|p| p.windows != self.windows) {
            out += "\n\\* on other windows than the rest: compare KL, not perplexity.\n";
        }
        if !self.peers.is_empty() {
            out += "\nThe other projects keep the newest 128 tokens exact (R=128) where the name says so; their bytes at 2k are \
                    counted right after a prefill, with an empty window. llama.cpp is compared with its own f16 cache.\n";
        }
        out += &format!("\nFormats: {}.\n", self.formats());
        out += &format!("\nThe harness checked itself: {}.\n", self.checks.join("; "));
        out += &self.texts_markdown();
        out + &self.capacity_markdown()
    }

    fn formats(&self) -> String {
        let details: Vec<String> =
            self.rows.iter().map(|r| format!("{}: {}", r.scheme.name, r.scheme.detail())).collect();
        details.join("; ")
    }

    fn texts_markdown(&self) -> String {
        let (exact, windowed, direct) = &self.texts;
        let mut out = format!("\nWhat the model writes after `{}`, greedy:\n\n", self.prompt);
        let mut t = Table::new(["cache", "as exact for", "read from codes", "tokens/s", "text"]);
        let mut add = |name: String, x: &Text| {
            t.row([
                name,
                format!("{} of {}", x.same, x.tokens),
                thousands(x.quantized),
                format!("{:.1}", x.tokens_per_second),
                format!("{:?}", x.text),
            ]);
        };
        add(exact.scheme.clone(), exact);
        windowed.iter().for_each(|x| add(x.scheme.clone(), x));
        direct.iter().for_each(|x| add(format!("{}, every token quantized", x.scheme), x));
        out += &t.markdown();
        out += "\nA text that fits into the exact window is that of f16; the lower half shows the widths alone: per-token \
                groups (rotated up to 4 bits), and no exact token.\n";
        if !self.peer_texts.is_empty() {
            out += "\nThe caches of transformers with the same prompt:\n\n";
            let mut t = Table::new(["cache", "text"]);
            self.peer_texts.iter().for_each(|(name, text)| t.row([name.clone(), format!("{text:?}")]));
            out += &t.markdown();
        }
        out
    }

    fn capacity_markdown(&self) -> String {
        let mut out =
            "\nTokens of one sequence that fit beside the f16 weights (GB = 10⁹ bytes, no activations):\n\n"
                .to_string();
        let head = ["model", "cache"].into_iter().map(String::from).chain(CARDS.map(|c| format!("{c} GB")));
        let mut t = Table::new(head);
        for r in &self.capacity {
            let cells = [r.model.to_string(), r.scheme.clone()];
            t.row(cells.into_iter().chain(r.tokens.map(thousands)));
        }
        out += &t.markdown();
        out + &format!("\n{}.\n", capacity::PUBLISHED)
    }

    /// Bytes at 2,048 tokens against KL.
    pub fn chart(&self) -> Option<String> {
        let ours = |family: &str| {
            let rows = self.rows.iter().filter(|r| r.scheme.family == family);
            let point = |r: &Row| (r.bytes_2k as f64 / 1e6, r.quality.score.mean_kl(), short(&r.scheme.name));
            Series { name: family.to_string(), line: true, points: rows.map(point).collect() }
        };
        let mut series: Vec<Series> = FAMILIES.iter().map(|f| ours(f)).collect();
        for project in ["optimum-quanto", "HQQ", "transformers fp8", "llama.cpp"] {
            let rows = self.peers.iter().filter(|p| p.project == project);
            let point = |p: &Peer| p.bytes_2k.map(|b| (b / 1e6, p.kl, p.name.clone()));
            series.push(Series {
                name: project.into(),
                line: false,
                points: rows.filter_map(point).collect(),
            });
        }
        series.retain(|s| !s.points.is_empty());
        let title = format!("Cache of {} at 2,048 tokens", self.model.trim_end_matches(".gguf"));
        chart::svg(
            &title,
            "MB at 2,048 tokens (qkv: everything counted; others: right after a prefill, window empty)",
            "KL to the exact model, nats",
            &series,
        )
    }

    /// Everything as one object.
    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(row_json).collect();
        let peers: Vec<Value> = self
            .peers
            .iter()
            .map(|p| {
                json!({"name": p.name, "project": p.project, "windows": p.windows, "perplexity": p.perplexity,
                       "exact_perplexity": p.exact_perplexity, "kl": p.kl, "top1_percent": p.top1, "bits": p.bits,
                       "bytes_2048": p.bytes_2k})
            })
            .collect();
        let text = |t: &Text| {
            json!({"scheme": t.scheme, "text": t.text, "tokens": t.tokens, "same_as_exact": t.same,
                   "read_from_codes": t.quantized, "tokens_per_second": t.tokens_per_second})
        };
        let capacity: Vec<Value> = self
            .capacity
            .iter()
            .map(|r| {
                let tokens = CARDS.iter().zip(r.tokens).map(|(c, t)| (format!("{c}_gb"), json!(t)));
                json!({"model": r.model, "scheme": r.scheme, "tokens": tokens.collect::<serde_json::Map<_, _>>()})
            })
            .collect();
        json!({
            "model": self.model, "sha256": self.sha256, "text": self.source, "windows": self.windows,
            "scored_tokens": self.exact.tokens, "exact_perplexity": self.exact.perplexity(), "checks": self.checks,
            "half_precision_bytes_a_token": self.half_bytes, "cores": self.cores, "seconds": self.seconds,
            "schemes": rows, "peers": peers, "prompt": self.prompt, "exact_text": text(&self.texts.0),
            "texts": self.texts.1.iter().map(text).collect::<Vec<_>>(),
            "texts_direct": self.texts.2.iter().map(text).collect::<Vec<_>>(),
            "peer_texts": self.peer_texts.iter().map(|(n, t)| json!({"name": n, "text": t})).collect::<Vec<_>>(),
            "capacity": capacity, "published": capacity::PUBLISHED,
        })
    }
}

/// A name that fits beside a point.
fn short(name: &str) -> String {
    name.split(',').next().unwrap_or(name).to_string()
}

fn row_json(r: &Row) -> Value {
    let q = &r.quality;
    let mut row = json!({
        "name": r.scheme.name, "family": r.scheme.family, "formats": r.scheme.detail(), "residual": r.scheme.residual,
        "sinks": r.scheme.sinks, "bits": r.bits, "bits_at_2048": r.bits_2k, "bytes_2048": r.bytes_2k,
        "perplexity": q.score.perplexity(), "kl": q.score.mean_kl(), "top1_percent": q.score.top1_percent(),
        "kl_by_window": q.windows.iter().map(Score::mean_kl).collect::<Vec<_>>(), "seconds": q.seconds,
    });
    if let (Some(m), Some(row)) = (&r.memory, row.as_object_mut()) {
        let ms = |d: std::time::Duration| json!(d.as_secs_f64() * 1e3);
        for (n, b) in LENGTHS.iter().zip(m.bytes) {
            row.insert(format!("bytes_{n}"), json!(b));
        }
        row.insert(format!("step_peak_bytes_{TIMED}"), json!(m.peak_bytes));
        row.insert(format!("ms_per_token_{TIMED}"), ms(m.token));
        row.insert(format!("attention_ms_per_token_{TIMED}"), ms(m.attention));
        row.insert(format!("load_ms_{TIMED}"), ms(m.load));
    }
    row
}

/// What stands before and behind the generated part of a document.
pub const MARKERS: [&str; 2] = ["<!-- demo:begin -->", "<!-- demo:end -->"];

/// Puts `text` between the markers of a file.
///
/// # Errors
/// If the markers are not there, in order.
pub fn between_markers(path: &Path, text: &str) -> Result<()> {
    let old = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let new = replace_between(&old, text).with_context(|| path.display().to_string())?;
    std::fs::write(path, new).with_context(|| path.display().to_string())
}

fn replace_between(old: &str, text: &str) -> Result<String> {
    match (old.find(MARKERS[0]), old.find(MARKERS[1])) {
        (Some(a), Some(b)) if a < b => {
            Ok(format!("{}\n{}\n{}", &old[..a + MARKERS[0].len()], text.trim(), &old[b..]))
        }
        _ => bail!("expected a line {} and below it {}", MARKERS[0], MARKERS[1]),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use qkv::Bits;
    use std::time::Duration;

    pub(crate) fn example() -> Report {
        let score = Score { tokens: 512, nll: 512.0 * 3.8, kl: 512.0 * 0.002, agree: 500 };
        let quality = Quality { score, windows: vec![score], seconds: 9.0 };
        let memory = Memory {
            bytes: [13_000_000, 52_000_000, 210_000_000],
            peak_bytes: 53_000_000,
            token: Duration::from_millis(80),
            attention: Duration::from_millis(20),
            load: Duration::from_secs(1),
        };
        let row = |scheme: Scheme, memory| Row {
            scheme,
            bits: 4.5,
            bits_2k: 5.0,
            bytes_2k: 13_000_000,
            quality: quality.clone(),
            memory,
        };
        let text = |scheme: &str| Text {
            scheme: scheme.into(),
            text: "a | b\nc".into(),
            tokens: 8,
            same: 5,
            quantized: 0,
            tokens_per_second: 12.0,
        };
        Report {
            model: "m.gguf".into(),
            sha256: "00".into(),
            half_bytes: 23_040,
            source: "text".into(),
            windows: 2,
            exact: score,
            checks: vec!["holds".into()],
            rows: vec![
                row(Scheme::width(Bits::B4, 64), Some(memory)),
                row(Scheme::width(Bits::B4, 64).bare(), None),
            ],
            peers: crate::peers::peers(2).unwrap(),
            prompt: "hello,".into(),
            texts: (text("exact f32"), vec![text("4 bit")], vec![text("4 bit, direct")]),
            peer_texts: crate::peers::peer_texts().unwrap(),
            capacity: capacity::rows(Scheme::demo).unwrap(),
            cores: 2,
            seconds: 100.0,
        }
    }

    #[test]
    fn every_row_is_in_the_table_the_chart_and_the_json() {
        let r = example();
        let markdown = r.markdown();
        for name in [
            "qkv 4 bit ",
            "qkv 4 bit, R=0, no sinks",
            "quanto int4 axis 0/0",
            "hqq int8 axis 1/1",
            "Llama-3.1-8B",
            "40k",
        ] {
            assert!(markdown.contains(name), "{name}");
        }
        // All lines of a table have the same number of bars.
        for block in markdown.split("\n\n").filter(|b| b.starts_with('|')) {
            let bars = |l: &str| l.replace("\\|", "").matches('|').count();
            let n = bars(block.lines().next().unwrap());
            assert!(block.lines().filter(|l| l.starts_with('|')).all(|l| bars(l) == n), "{block}");
        }
        let chart = r.chart().unwrap();
        for name in ["optimum-quanto", "HQQ", "llama.cpp", "qkv, no exact tokens"] {
            assert!(chart.contains(name), "{name}");
        }
        let json = r.json();
        assert_eq!(json["schemes"].as_array().unwrap().len(), 2);
        assert_eq!(json["schemes"][0]["bytes_32768"], 210_000_000);
        assert!(json["schemes"][1].get("bytes_32768").is_none());
        assert_eq!(json["peers"].as_array().unwrap().len(), r.peers.len());
        assert_eq!(json["capacity"].as_array().unwrap().len(), r.capacity.len());
        assert!((json["schemes"][0]["kl"].as_f64().unwrap() - 0.002).abs() < 1e-9);
        let again: Value = serde_json::from_str(&json.to_string()).unwrap();
        assert_eq!(again, json);
    }

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let old = format!("a\n{}\nold\n{}\nz\n", MARKERS[0], MARKERS[1]);
        assert_eq!(
            replace_between(&old, "new\n").unwrap(),
            format!("a\n{}\nnew\n{}\nz\n", MARKERS[0], MARKERS[1])
        );
        assert!(replace_between("no markers", "x").is_err());
        assert!(replace_between(&format!("{} {}", MARKERS[1], MARKERS[0]), "x").is_err());
    }
}
