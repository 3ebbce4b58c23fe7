//! Markdown tables, and numbers the way they are read.

/// A table: a head and rows of the same length.
#[derive(Debug, Clone, Default)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with this head.
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { head: head.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row. Cells beyond the head are dropped, missing ones stay empty.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut row: Vec<String> = cells.into_iter().map(|c| escape(&c.into())).collect();
        row.resize(self.head.len(), String::new());
        self.rows.push(row);
    }

    /// The table as Markdown, columns aligned: the first to the left, numbers to the right.
    pub fn markdown(&self) -> String {
        let length = |s: &String| s.chars().count();
        let widths: Vec<usize> = (0..self.head.len())
            .map(|c| {
                self.rows.iter().map(|r| length(&r[c])).chain([length(&self.head[c]), 3]).max().unwrap_or(3)
            })
            .collect();
        let line = |row: &[String]| {
            let cell = |(i, (s, w)): (usize, (&String, &usize))| {
                let gap = " ".repeat(w - length(s));
                if i == 0 { format!("{s}{gap}") } else { format!("{gap}{s}") }
            };
            let cells: Vec<String> = row.iter().zip(&widths).enumerate().map(cell).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let rule: Vec<String> = widths
            .iter()
            .enumerate()
            .map(|(i, w)| if i == 0 { "-".repeat(*w) } else { format!("{}:", "-".repeat(w - 1)) })
            .collect();
        let mut out = line(&self.head);
        out += &format!("| {} |\n", rule.join(" | "));
        self.rows.iter().for_each(|r| out += &line(r));
        out
    }
}

/// A cell may hold neither a bar nor a line break.
fn escape(cell: &str) -> String {
    cell.replace('|', "\\|").replace(['\n', '\r'], " ")
}

/// 1234567 as `1,234,567`.
pub fn thousands(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(d);
    }
    out
}

/// Bytes in MB of 10⁶, with as many digits as say something.
pub fn megabytes(bytes: f64) -> String {
    let mb = bytes / 1e6;
    if mb >= 100.0 { format!("{mb:.0}") } else { format!("{mb:.2}") }
}

/// A KL divergence: two significant digits or more.
pub fn nats(kl: f64) -> String {
    match kl.abs() {
        x if x >= 0.1 => format!("{kl:.3}"),
        x if x >= 0.001 => format!("{kl:.4}"),
        x if x >= 1e-5 => format!("{kl:.6}"),
        _ => format!("{kl:.1e}"),
    }
}

/// A perplexity.
pub fn perplexity(p: f64) -> String {
    if p >= 1000.0 { thousands(p.round() as usize) } else { format!("{p:.2}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_line_up() {
        let mut t = Table::new(["scheme", "KL"]);
        t.row(["4 bit", "0.0020"]);
        t.row(["a|b\nc"]);
        let text = t.markdown();
        assert_eq!(
            text,
            "| scheme |     KL |\n| ------ | -----: |\n| 4 bit  | 0.0020 |\n| a\\|b c |        |\n"
        );
        let lengths: Vec<usize> = text.lines().map(str::len).collect();
        assert!(lengths.iter().all(|l| *l == lengths[0]));
    }

    #[test]
    fn numbers() {
        assert_eq!((thousands(0), thousands(999), thousands(1_234_567)).2, "1,234,567");
        assert_eq!((thousands(0), thousands(1000)), ("0".into(), "1,000".into()));
        assert_eq!(
            (nats(0.5), nats(0.00198), nats(0.000028)),
            ("0.500".into(), "0.0020".into(), "0.000028".into())
        );
        assert_eq!(nats(7e-12), "7.0e-12");
        assert_eq!((megabytes(47_185_920.0), megabytes(754e6)), ("47.19".into(), "754".into()));
        assert_eq!((perplexity(44.703), perplexity(13323.57)), ("44.70".into(), "13,324".into()));
    }
}
