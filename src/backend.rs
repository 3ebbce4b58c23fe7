//! What a backend must do.
