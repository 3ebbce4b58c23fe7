//! Fatbins: what nvcc puts PTX and cubins into.
