//! Kernels by name.

use ptxsim::ptx::ast::{Function, Module, Type, Variable};

/// The kernel that a name means: its own name, or the only one whose name, mangled or not, starts so.
pub(crate) fn find<'a>(module: &'a Module, name: &str) -> Result<&'a Function, String> {
    let kernels = || module.functions.iter().filter(|f| f.kernel && !f.declaration);
    if let Some(kernel) = kernels().find(|k| k.name == name) {
        return Ok(kernel);
    }
    let readable = |k: &Function| readable(&k.name).unwrap_or_else(|| k.name.clone());
    let exact: Vec<_> = kernels().filter(|k| readable(k) == name).collect();
    let near: Vec<_> = kernels()
        .filter(|k| {
            let readable = readable(k);
            let last = readable.rsplit("::").next().unwrap_or_default();
            k.name.starts_with(name) || readable.starts_with(name) || last.starts_with(name)
        })
        .collect();
    let list =
        |kernels: Vec<&Function>| kernels.iter().map(|k| format!("\n  {}", k.name)).collect::<String>();
    match (&exact[..], &near[..]) {
        ([one], _) | ([], [one]) => Ok(one),
        ([], []) => Err(format!("no kernel is called `{name}`; the file has{}", list(kernels().collect()))),
        _ => Err(format!("`{name}` may mean{}", list(near))),
    }
}

/// The qualified name in a mangled one, without template arguments and parameters: `a::f` of `_ZN1a1fIiEEvi`.
pub(crate) fn readable(mangled: &str) -> Option<String> {
    let rest = mangled.strip_prefix("_Z")?;
    let nested = rest.strip_prefix('N');
    let mut rest = nested.unwrap_or(rest);
    let mut parts: Vec<&str> = Vec::new();
    while let digits @ 1.. = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len() {
        let len: usize = rest[..digits].parse().ok()?;
        let end = digits.checked_add(len)?;
        parts.push(rest.get(digits..end)?);
        rest = &rest[end..];
        if nested.is_none() {
            break;
        }
    }
    (!parts.is_empty()).then(|| parts.join("::"))
}

/// A type as PTX writes it.
pub(crate) fn type_name(ty: Type) -> String {
    format!("{ty:?}").to_lowercase()
}

/// `f32`, or `b8[24]` of a parameter that is passed by value.
pub(crate) fn parameter_type(p: &Variable) -> String {
    let name = type_name(p.ty);
    if p.array { format!("{name}[{}]", p.bytes / u64::from(p.ty.bytes())) } else { name }
}

/// `kernel(u64 x, f32 factor)`
pub(crate) fn signature(kernel: &Function) -> String {
    let parameters: Vec<_> =
        kernel.params.iter().map(|p| format!("{} {}", parameter_type(p), p.name)).collect();
    format!("{}({})", kernel.name, parameters.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readable_names() {
        assert_eq!(readable("_Z10vector_addPKfS0_Pfi").unwrap(), "vector_add");
        assert_eq!(readable("_ZN2ns5inner1fIiEEvT_").unwrap(), "ns::inner::f");
        for odd in ["plain", "_Z", "_Z99short", "_Z99999999999999999999999x", "_ZN", "_Z1é"] {
            assert_eq!(readable(odd), None, "{odd}");
        }
    }

    #[test]
    fn kernels_are_found_by_their_beginning() {
        let text = ".version 8.0 .target sm_80 .entry _Z3addv() { ret; } .entry _Z4add2v() { ret; }
                    .entry _ZN1n3mulEv() { ret; } .func addf() { ret; }";
        let module = ptxsim::ptx::parse(text).unwrap();
        assert_eq!(find(&module, "add").unwrap().name, "_Z3addv");
        assert_eq!(find(&module, "add2").unwrap().name, "_Z4add2v");
        assert_eq!(find(&module, "mu").unwrap().name, "_ZN1n3mulEv");
        assert!(find(&module, "ad").unwrap_err().contains("may mean"));
        assert!(find(&module, "sub").unwrap_err().contains("_ZN1n3mulEv"));
    }
}
