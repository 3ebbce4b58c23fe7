//! Attention through a cache against f64 attention over what the cache says it holds, for every pair of formats, and
//! the rules for values that are not finite.

#[path = "../support/reference.rs"]
mod reference;

mod formats;
mod special;
