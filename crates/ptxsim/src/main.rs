//! `ptxsim info` and `ptxsim run`.

fn main() {}
