//! Random histories of a paged cache against a plain `Vec` model.
//!
//! The model keeps, for every sequence, the value of every token as attention should see it. It knows the rules of
//! the state machine and its own transcription of the min-max definition, nothing of the library's inside.

mod histories;
mod model;
mod splits;
