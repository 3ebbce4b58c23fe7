//! Short names of formats, for command lines and tables.
//!
//! `int4-c64` = 4 bits, groups of 64 tokens of a channel; `int4-t64` = 4 bits, groups of 64 channels of a token.
//! Behind it may follow the fit (`-minmax`, `-opt`, `-hqq`), a rotation (`-r64`) and `-m` for centred keys. `f16`,
//! `bf16`; `e4m3` and `e5m2` have one scale a token and head, `e4m3-tensor` and `e4m3-head` static ones.

use qkv::{Affine, Axis, Bits, Fit, Format, Fp8, Fp8Kind, Granularity};

/// The format with this name.
///
/// # Errors
/// A sentence that says which part of the name is not known.
pub fn parse_format(name: &str) -> Result<Format, String> {
    let mut parts = name.trim().split('-');
    let head = parts.next().unwrap_or_default();
    let rest: Vec<&str> = parts.collect();
    let unknown = |part: &str| {
        format!(
            "{part:?} in format {name:?} is not known; formats look like f16, int4-c64, int2-t32-hqq-r64, e4m3-tensor"
        )
    };
    let kind = match head {
        "f16" | "bf16" => {
            return match rest.first() {
                Some(part) => Err(unknown(part)),
                None => Ok(if head == "f16" { Format::F16 } else { Format::Bf16 }),
            };
        }
        "e4m3" | "fp8" => Some(Fp8Kind::E4M3),
        "e5m2" => Some(Fp8Kind::E5M2),
        _ => None,
    };
    if let Some(kind) = kind {
        let granularity = match rest[..] {
            [] | ["token"] => Granularity::TokenHead,
            ["tensor"] => Granularity::Tensor,
            ["head"] => Granularity::Head,
            _ => return Err(unknown(&rest.join("-"))),
        };
        return Ok(match kind {
            Fp8Kind::E4M3 => Fp8::e4m3(granularity),
            Fp8Kind::E5M2 => Fp8::e5m2(granularity),
        }
        .into());
    }
    let bits = head.strip_prefix("int").and_then(|b| b.parse().ok()).ok_or_else(|| unknown(head))?;
    let bits = Bits::new(bits).map_err(|e| e.to_string())?;
    let Some((group, options)) = rest.split_first() else {
        return Err(format!(
            "format {name:?} names no groups; add -c64 (tokens of a channel) or -t64 (channels)"
        ));
    };
    let size = |x: &str| x.get(1..).and_then(|n| n.parse().ok()).ok_or_else(|| unknown(x));
    let mut a = match group.chars().next() {
        Some('c') => Affine::per_channel(bits, size(group)?),
        Some('t') => Affine::per_token(bits, size(group)?),
        _ => return Err(unknown(group)),
    };
    for option in options {
        a = match *option {
            "minmax" => a.with_fit(Fit::MinMax),
            "opt" => a.with_fit(Fit::ErrorOptimal),
            "hqq" => a.with_fit(Fit::HQQ),
            "m" => a.with_center(),
            r if r.starts_with('r') => a.with_rotation(size(r)?),
            other => return Err(unknown(other)),
        };
    }
    Ok(a.into())
}

/// The name of a format: [`parse_format`] reads it back, but for the parameters of an HQQ fit.
pub fn format_name(format: &Format) -> String {
    match format {
        Format::F16 => "f16".into(),
        Format::Bf16 => "bf16".into(),
        Format::Fp8(f) => {
            let kind = if f.kind == Fp8Kind::E4M3 { "e4m3" } else { "e5m2" };
            match f.granularity {
                Granularity::TokenHead => kind.into(),
                Granularity::Tensor => format!("{kind}-tensor"),
                Granularity::Head => format!("{kind}-head"),
            }
        }
        Format::Affine(a) => {
            let axis = if a.axis == Axis::PerChannel { 'c' } else { 't' };
            let mut name = format!("int{}-{axis}{}", a.bits.get(), a.group);
            if a.fit != Fit::default_for(a.bits) {
                name += match a.fit {
                    Fit::MinMax => "-minmax",
                    Fit::ErrorOptimal => "-opt",
                    Fit::Hqq { .. } => "-hqq",
                };
            }
            if let Some(r) = a.rotate {
                name += &format!("-r{r}");
            }
            if a.center {
                name += "-m";
            }
            name
        }
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for name in [
            "f16",
            "bf16",
            "int4-c64",
            "int2-t32",
            "int2-c32-minmax",
            "int1-t64-hqq-r64",
            "int4-t64-r64-m",
            "int3-t32-minmax",
            "int8-t32-opt",
            "int8-t64",
            "e4m3",
            "e5m2",
            "e4m3-tensor",
            "e5m2-head",
        ] {
            assert_eq!(format_name(&parse_format(name).unwrap()), name);
        }
        assert_eq!(parse_format("int4-c64").unwrap(), Affine::per_channel(Bits::B4, 64).into());
        assert_eq!(parse_format("fp8").unwrap(), Fp8::e4m3(Granularity::TokenHead).into());
    }

    #[test]
    fn unknown_names_say_what_is_wrong() {
        for (name, part) in [
            ("int5-c64", "bits"),
            ("int4", "names no groups"),
            ("int4-x64", "x64"),
            ("q4_0", "q4_0"),
            ("f16-t64", "t64"),
            ("e4m3-row", "row"),
            ("int4-t64-fast", "fast"),
            ("int4-t", "\"t\""),
            ("", "\"\""),
        ] {
            let e = parse_format(name).unwrap_err();
            assert!(e.contains(part), "{name}: {e}");
        }
    }
}
