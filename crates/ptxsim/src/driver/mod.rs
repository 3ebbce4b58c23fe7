//! The C functions of the CUDA driver API.
