//! What the quantized caches of other projects gave, measured on the same windows: `data/peer_quality.json`.

use anyhow::{Context, Result};
use serde_json::Value;

/// One row of another project.
#[derive(Debug, Clone, PartialEq)]
pub struct Peer {
    /// Project and settings.
    pub name: String,
    /// The project, for the chart.
    pub project: &'static str,
    /// Windows it was measured on.
    pub windows: usize,
    /// Perplexity.
    pub perplexity: f64,
    /// Perplexity of its own exact run on the same windows.
    pub exact_perplexity: f64,
    /// Mean KL(exact ‖ quantized) in nats.
    pub kl: f64,
    /// Same most likely token, in percent.
    pub top1: f64,
    /// Bits an element without the exact window, as the project counts.
    pub bits: Option<f64>,
    /// Bytes at 2,048 tokens of SmolLM2-135M, right after a prefill (empty window).
    pub bytes_2k: Option<f64>,
}

/// The peers' rows on six windows if `windows` is 6, else on two. llama.cpp was measured on two only.
///
/// # Errors
/// If the data file is damaged.
pub fn peers(windows: usize) -> Result<Vec<Peer>> {
    let json: Value = serde_json::from_str(include_str!("../data/peer_quality.json"))?;
    let mut all = transformers(&json, windows == 6)?;
    all.extend(llama_cpp(&json)?);
    Ok(all)
}

fn transformers(json: &Value, six: bool) -> Result<Vec<Peer>> {
    let two = &json["transformers_peers"];
    let rows = if six { &json["transformers_peers_6_windows"] } else { two };
    let mut out = Vec::new();
    for (name, row) in rows.as_object().context("transformers_peers")? {
        let (Some(kl), Some(perplexity)) = (row["kl"].as_f64(), row["ppl"].as_f64()) else { continue };
        // Rows of one window are compared with nothing else here.
        if name == "f16" || row["windows"].as_u64() == Some(1) {
            continue;
        }
        let project = match name.split(' ').next() {
            Some("quanto") => "optimum-quanto",
            Some("hqq") => "HQQ",
            _ => "transformers fp8",
        };
        out.push(Peer {
            name: format!("transformers: {name}"),
            project,
            windows: row["windows"].as_u64().unwrap_or(2) as usize,
            perplexity,
            exact_perplexity: row["f16_ppl_same_windows"].as_f64().context("f16_ppl_same_windows")?,
            kl,
            top1: row["top1_agree_pct"].as_f64().context("top1_agree_pct")?,
            bits: two[name]["bits_per_element_f16_cache"].as_f64(),
            bytes_2k: two[name]["bytes_at_2048_f16_cache"].as_f64(),
        });
    }
    Ok(out)
}

fn llama_cpp(json: &Value) -> Result<Vec<Peer>> {
    let exact = json["llama_cpp_f16_ppl_2_windows"].as_f64().context("llama_cpp_f16_ppl_2_windows")?;
    let rows = json["llama_cpp"]["quality"].as_object().context("llama_cpp.quality")?;
    let row = |(name, row): (&String, &Value)| -> Result<Peer> {
        let number = |key: &str| row[key].as_f64().with_context(|| format!("{name}: {key}"));
        Ok(Peer {
            name: format!("llama.cpp: {name}"),
            project: "llama.cpp",
            windows: 2,
            perplexity: number("ppl")?,
            exact_perplexity: exact,
            kl: number("kl")?,
            top1: number("top1_agree_pct")?,
            bits: row["bits_per_element"].as_f64(),
            bytes_2k: row["bytes_at_2048"].as_f64(),
        })
    };
    rows.iter().filter(|(name, _)| *name != "K f16 / V f16").map(row).collect()
}

/// What a peer wrote for the prompt `hello,` with its cache: (name, text or error).
///
/// # Errors
/// If the data file is damaged.
pub fn peer_texts() -> Result<Vec<(String, String)>> {
    let json: Value = serde_json::from_str(include_str!("../data/peer_quality.json"))?;
    let rows = json["generation_hello"].as_object().context("generation_hello")?;
    let text = |row: &Value| {
        let error = row["error"].as_str().map(|e| format!("fails: {e}"));
        error.or_else(|| row["text"].as_str().map(str::to_string)).unwrap_or_default()
    };
    Ok(rows.iter().map(|(name, row)| (name.clone(), text(row))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_carry_the_published_figures() {
        let six = peers(6).unwrap();
        let row = |all: &[Peer], name: &str| all.iter().find(|p| p.name.ends_with(name)).unwrap().clone();
        let hqq = row(&six, "hqq int8 axis 1/1 R=128");
        assert_eq!((hqq.windows, hqq.kl, hqq.bits), (6, 0.000028, Some(8.5)));
        assert_eq!(row(&six, "quanto int4 axis 0/0 R=128").kl, 0.009416);
        let two = peers(2).unwrap();
        assert_eq!(row(&two, "quanto int4 axis 0/0 R=128").bytes_2k, Some(13_271_040.0));
        assert_eq!(row(&two, "K q8_0 / V q8_0").project, "llama.cpp");
        assert!(two.iter().all(|p| p.windows == 2 && p.kl > 0.0));
        assert!(two.len() > 15 && six.len() > 15);
        assert!(peer_texts().unwrap().iter().any(|(_, t)| t.starts_with("fails: RuntimeError")));
    }
}
