//! PTX text: lexer, parser and what they make.
//!
//! The grammar is the PTX ISA manual's. Opcode modifiers are kept as a list without meaning: what an instruction does
//! is decided where it is executed (`crate::alu`, `crate::program`).

pub mod ast;
mod declare;
mod error;
mod expr;
mod function;
mod lexer;
mod operand;
mod parser;
mod scope;
mod special;
#[cfg(test)]
mod tests;

pub use error::{ParseError, ParseErrors};
pub use parser::parse;
