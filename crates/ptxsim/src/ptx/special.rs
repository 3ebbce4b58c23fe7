//! Names of special registers.

use super::ast::{Operand, Special};

/// The special register of a name with its percent sign, where it has no components.
pub(super) fn scalar(name: &str) -> Option<Special> {
    use Special as S;
    Some(match name {
        "%cluster_ctarank" => S::ClusterCtarank,
        "%cluster_nctarank" => S::ClusterNctarank,
        "%is_explicit_cluster" => S::IsExplicitCluster,
        "%laneid" => S::Laneid,
        "%warpid" => S::Warpid,
        "%nwarpid" => S::Nwarpid,
        "%smid" => S::Smid,
        "%nsmid" => S::Nsmid,
        "%gridid" => S::Gridid,
        "%lanemask_eq" => S::LanemaskEq,
        "%lanemask_le" => S::LanemaskLe,
        "%lanemask_lt" => S::LanemaskLt,
        "%lanemask_ge" => S::LanemaskGe,
        "%lanemask_gt" => S::LanemaskGt,
        "%clock" | "%clock_lo" => S::Clock,
        "%clock_hi" => S::ClockHi,
        "%clock64" => S::Clock64,
        "%globaltimer" => S::Globaltimer,
        "%globaltimer_lo" => S::GlobaltimerLo,
        "%globaltimer_hi" => S::GlobaltimerHi,
        "%dynamic_smem_size" => S::DynamicSmemSize,
        "%total_smem_size" => S::TotalSmemSize,
        "%aggr_smem_size" => S::AggrSmemSize,
        "%reserved_smem_offset_begin" => S::ReservedSmemOffset(0),
        "%reserved_smem_offset_end" => S::ReservedSmemOffset(1),
        "%reserved_smem_offset_cap" => S::ReservedSmemOffset(2),
        "%reserved_smem_offset_0" => S::ReservedSmemOffset(3),
        "%reserved_smem_offset_1" => S::ReservedSmemOffset(4),
        "%current_graph_exec" => S::CurrentGraphExec,
        "WARP_SZ" => S::WarpSize,
        _ => {
            let number = |prefix| name.strip_prefix(prefix).and_then(|n: &str| n.parse::<u32>().ok());
            let counter = name.strip_suffix("_64").unwrap_or(name);
            let counter = counter.strip_prefix("%pm").and_then(|n| n.parse::<u32>().ok());
            match number("%envreg") {
                Some(n) if n < 32 => S::Envreg(n as u8),
                _ if counter.is_some_and(|n| n < 8) => S::Other,
                _ => return None,
            }
        }
    })
}

/// The constructor of a special register with components.
pub(super) fn vector(name: &str) -> Option<fn(u8) -> Special> {
    Some(match name {
        "%tid" => Special::Tid,
        "%ntid" => Special::Ntid,
        "%ctaid" => Special::Ctaid,
        "%nctaid" => Special::Nctaid,
        "%clusterid" => Special::ClusterId,
        "%nclusterid" => Special::NClusterId,
        "%cluster_ctaid" => Special::ClusterCtaid,
        "%cluster_nctaid" => Special::ClusterNctaid,
        _ => return None,
    })
}

/// Component `.x`, `.r`, `.y` …: 0 to 3.
pub(super) fn component(dotted: &str) -> Option<u8> {
    match dotted {
        ".x" | ".r" => Some(0),
        ".y" | ".g" => Some(1),
        ".z" | ".b" => Some(2),
        ".w" | ".a" => Some(3),
        _ => None,
    }
}

/// Component `index` of a special register; the fourth is 0.
pub(super) fn part(register: fn(u8) -> Special, index: u8) -> Operand {
    if index < 3 { Operand::Special(register(index)) } else { Operand::Integer(0) }
}
