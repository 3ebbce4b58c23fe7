//! A chart as SVG: bytes to the right, KL divergence upwards on a logarithmic scale. One line a family, other
//! projects as points. Plain shapes and generic font names, so that it looks the same everywhere.

/// Points that belong together.
#[derive(Debug, Clone)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Joined by a line, or single points.
    pub line: bool,
    /// (x, y, label); `y` must be positive to be drawn.
    pub points: Vec<(f64, f64, String)>,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 58.0;
/// Readable on white and on dark pages, distinct for the colour-blind.
const COLOURS: [&str; 8] =
    ["#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#6f5bb5", "#888888"];

/// Where numbers land on the page. Both scales are logarithmic.
struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    fn at(&self, x: f64) -> f64 {
        let share = (x.ln() - self.low.ln()) / (self.high.ln() - self.low.ln());
        self.from + share * (self.to - self.from)
    }
}

/// The chart. `None` if there is no point to draw.
pub fn svg(title: &str, x_name: &str, y_name: &str, series: &[Series]) -> Option<String> {
    let all = || series.iter().flat_map(|s| &s.points).filter(|p| p.0 > 0.0 && p.1 > 0.0 && p.1.is_finite());
    let range = |f: fn(&(f64, f64, String)) -> f64| {
        let fold = |(lo, hi): (f64, f64), x: f64| (lo.min(x), hi.max(x));
        all().map(f).fold((f64::INFINITY, 0.0), fold)
    };
    let ((x0, x1), (y0, y1)) = (range(|p| p.0), range(|p| p.1));
    if x1 == 0.0 {
        return None;
    }
    let x = Scale { low: x0 / 1.15, high: x1 * 1.15, from: LEFT, to: WIDTH - RIGHT };
    let decade = |v: f64, up: bool| 10f64.powf(if up { v.log10().ceil() } else { v.log10().floor() });
    let (low, high) = (decade(y0, false), decade(y1, true).max(decade(y0, false) * 10.0));
    let y = Scale { low, high, from: HEIGHT - BOTTOM, to: TOP };

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let text = |x: f64, y: f64, anchor: &str, more: &str, s: &str| {
        format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {more}>{}</text>\n", escape(s))
    };
    out += &text(LEFT, 24.0, "start", "font-size=\"15\" font-weight=\"bold\"", title);
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let mut tick = low;
    while tick <= high * 1.001 {
        let at = y.at(tick);
        out +=
            &format!("<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\n");
        out += &text(LEFT - 8.0, at + 4.0, "end", "", &power(tick));
        tick *= 10.0;
    }
    for tick in x_ticks(x.low, x.high) {
        let at = x.at(tick);
        out +=
            &format!("<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" stroke=\"#eee\"/>\n");
        out += &text(at, bottom + 18.0, "middle", "", &format!("{tick}"));
    }
    out += &format!(
        "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#444\"/>\n{}{}",
        text((LEFT + right) / 2.0, HEIGHT - 14.0, "middle", "", x_name),
        text(
            0.0,
            0.0,
            "middle",
            &format!("transform=\"translate(18 {:.1}) rotate(-90)\"", (TOP + bottom) / 2.0),
            y_name
        )
    );
    for (i, s) in series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let mut points: Vec<_> =
            s.points.iter().filter(|p| p.0 > 0.0 && p.1 > 0.0 && p.1.is_finite()).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        if s.line && points.len() > 1 {
            let path: Vec<String> =
                points.iter().map(|p| format!("{:.1},{:.1}", x.at(p.0), y.at(p.1))).collect();
            let path = path.join(" ");
            out += &format!(
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n"
            );
        }
        for (px, py, label) in points {
            let (cx, cy) = (x.at(*px), y.at(*py));
            out += &format!("<g>{}", mark(s.line, cx, cy, colour));
            out += &format!(
                "<title>{}: {label}, x {px:.4}, KL {py:.6}</title></g>\n",
                escape(&s.name),
                label = escape(label)
            );
            if s.line && !label.is_empty() {
                out +=
                    &text(cx + 6.0, cy - 6.0, "start", &format!("font-size=\"10\" fill=\"{colour}\""), label);
            }
        }
        let (lx, ly) = (right + 18.0, TOP + 12.0 + 20.0 * i as f64);
        out += &mark(s.line, lx, ly - 4.0, colour);
        out += &text(lx + 12.0, ly, "start", "", &s.name);
    }
    out += "</svg>\n";
    Some(out)
}

/// A dot for our own lines, a cross for other projects.
fn mark(dot: bool, x: f64, y: f64, colour: &str) -> String {
    if dot {
        format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>\n")
    } else {
        let (a, b, c, d) = (x - 4.0, y - 4.0, x + 4.0, y + 4.0);
        format!(
            "<path d=\"M{a:.1} {b:.1}L{c:.1} {d:.1}M{a:.1} {d:.1}L{c:.1} {b:.1}\" stroke=\"{colour}\" stroke-width=\"2\"/>\n"
        )
    }
}

/// 1, 2, 5, 10, 20, ... inside the range.
fn x_ticks(low: f64, high: f64) -> Vec<f64> {
    let start = low.log10().floor() as i32;
    let all = (start..start + 8).flat_map(|e| [1.0, 2.0, 3.0, 5.0].map(|m| m * 10f64.powi(e)));
    all.filter(|t| *t >= low && *t <= high).collect()
}

fn power(x: f64) -> String {
    let e = x.log10().round() as i32;
    match e {
        -3..=3 => format!("{}", 10f64.powi(e)),
        _ => format!("1e{e}"),
    }
}

fn escape(s: &str) -> String {
    s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series() -> Vec<Series> {
        let p = |x, y, l: &str| (x, y, l.to_string());
        vec![
            Series {
                name: "a < b".into(),
                line: true,
                points: vec![p(4.0, 0.002, "4 bit"), p(2.0, 0.05, "2 bit")],
            },
            Series {
                name: "peer".into(),
                line: false,
                points: vec![p(4.5, 0.009, "x"), p(8.0, 0.0, "zero is not drawn")],
            },
        ]
    }

    #[test]
    fn every_point_is_inside_the_axes() {
        let text = svg("t", "MB", "KL", &series()).unwrap();
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
        assert_eq!(text.matches("<title>").count(), 3);
        assert_eq!(text.matches("<polyline").count(), 1);
        assert!(text.contains("a &lt; b") && !text.contains("zero is not drawn"));
        let numbers = |key: &str| -> Vec<f64> {
            text.split(key).skip(1).map(|s| s.split('"').next().unwrap().parse().unwrap()).collect()
        };
        for (cx, cy) in numbers("cx=\"").into_iter().zip(numbers("cy=\"")).take(2) {
            assert!((LEFT..WIDTH - RIGHT).contains(&cx) && (TOP..HEIGHT - BOTTOM).contains(&cy), "{cx} {cy}");
        }
    }

    #[test]
    fn larger_is_further_right_and_lower_kl_is_lower() {
        let x = Scale { low: 1.0, high: 100.0, from: 0.0, to: 10.0 };
        assert!((x.at(10.0) - 5.0).abs() < 1e-9);
        assert!(svg("t", "x", "y", &[]).is_none());
        assert!(svg("t", "x", "y", &series()[..1]).is_some());
    }
}
