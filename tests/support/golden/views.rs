//! The peers' axes as views of one tensor, and their pairs in the library's order.

use crate::golden::{Case, Golden};
use qkv::{Axis, Bits};

/// How a case's flat tensor is looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(crate) dims: [usize; 3],
    pub(crate) axis: Axis,
    pub(crate) group: usize,
}

impl View {
    /// The view of a tensor `[.., dim]` under a peer's axis. `per_token` says which of its two axes is meant;
    /// `strided`: the peer's groups are columns of `[group, n / group]`.
    fn of(shape: &[usize], group: usize, kind: Kind) -> Self {
        let n: usize = shape.iter().product();
        let dim = *shape.last().unwrap();
        match kind {
            Kind::Rows if n.is_multiple_of(group) => {
                Self { dims: [n / group, 1, group], axis: Axis::PerToken, group }
            }
            // The peer refuses this; a short group is ours to make.
            Kind::Rows => Self { dims: [n / dim, 1, dim], axis: Axis::PerToken, group: group.min(dim) },
            Kind::Columns => Self { dims: [n / dim, 1, dim], axis: Axis::PerChannel, group },
            Kind::Strided => Self { dims: [group, 1, n / group], axis: Axis::PerChannel, group },
        }
    }

    /// The view of an affine case, whichever peer made it.
    pub(crate) fn affine(case: &Case) -> Self {
        let shape = case.usizes("shape");
        let group = case.int("group_size").unwrap() as usize;
        if case.flag("per_element_scale_quirk") {
            // One pair an element: groups of one token.
            let n = shape.iter().product();
            return Self { dims: [1, 1, n], axis: Axis::PerChannel, group };
        }
        Self::of(&shape, group, Kind::of(case))
    }

    /// The same for a named peer and axis.
    pub(crate) fn peer(file: &str, axis: i64, shape: &[usize], group: usize) -> Self {
        Self::of(shape, group, Kind::named(file, axis))
    }

    /// Pairs of the view.
    pub(crate) fn pair_count(&self) -> usize {
        let [t, h, d] = self.dims;
        match self.axis {
            Axis::PerToken => t * h * d.div_ceil(self.group),
            Axis::PerChannel => h * t.div_ceil(self.group) * d,
        }
    }

    /// The pair of every element, by its flat index.
    pub(crate) fn pair_of(&self, flat: usize) -> usize {
        let [_, _, d] = self.dims;
        match self.axis {
            Axis::PerToken => flat / d * d.div_ceil(self.group) + flat % d / self.group,
            Axis::PerChannel => flat / d / self.group * d + flat % d,
        }
    }

    /// The peer's per-group numbers in the library's order.
    pub(crate) fn order<T: Copy>(&self, case: &Case, peer: &[T]) -> Vec<T> {
        assert_eq!(peer.len(), self.pair_count(), "{}: pairs", case.id);
        if Kind::of(case) == Kind::Columns && case.file == "quanto" {
            let (d, blocks) = (self.dims[2], peer.len() / self.dims[2]);
            return (0..peer.len()).map(|i| peer[i % d * blocks + i / d]).collect();
        }
        peer.to_vec()
    }

    /// Elements of every group, by flat index.
    pub(crate) fn groups(&self) -> Vec<Vec<usize>> {
        let mut all = vec![Vec::new(); self.pair_count()];
        for i in 0..self.dims.iter().product() {
            all[self.pair_of(i)].push(i);
        }
        all
    }
}

/// Which elements the peer puts into a group.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// `group` neighbours in memory.
    Rows,
    /// `group` neighbouring rows of one channel.
    Columns,
    /// Elements `n / group` apart.
    Strided,
}

impl Kind {
    fn named(file: &str, axis: i64) -> Self {
        match (file, axis) {
            ("quanto", 0) | ("hqq", 1) => Kind::Rows,
            ("quanto", -1) => Kind::Columns,
            ("hqq", 0) => Kind::Strided,
            other => panic!("axis of {other:?}"),
        }
    }

    fn of(case: &Case) -> Self {
        match case.str("side") {
            Some("key") => {
                let (shape, group) = (case.usizes("shape"), case.int("group_size").unwrap() as usize);
                assert_eq!(shape[shape.len() - 2] % group, 0, "{}: groups would cross heads", case.id);
                Kind::Columns
            }
            Some(_) => Kind::Rows,
            None => Self::named(&case.file, case.int("axis").unwrap()),
        }
    }
}

/// The peer's (step, min) of every group as f32, in the library's order. `exact` takes HQQ's pair from before
/// its cast to the compute dtype.
pub(crate) fn pairs(golden: &Golden, case: &Case, view: &View, exact: bool) -> Vec<(f32, f32)> {
    let get = |name: &str| view.order(case, &golden.tensor(case, name).f32());
    let zip = |step: Vec<f32>, min: Vec<f32>| step.into_iter().zip(min).collect();
    if case.lists_tensor("zero") {
        let (s, z) = if exact { ("scale_f32", "zero_f32") } else { ("scale", "zero") };
        let (step, zero) = (get(s), get(z));
        let min = step.iter().zip(&zero).map(|(s, z)| -z * s).collect();
        zip(step, min)
    } else if case.lists_tensor("shift") {
        zip(get("scale"), get("shift").into_iter().map(|x| -x).collect())
    } else {
        zip(get("scale"), get("mn"))
    }
}

/// Bits of a case.
pub(crate) fn bits(case: &Case) -> Bits {
    Bits::new(case.int("bits").unwrap() as usize).unwrap()
}
