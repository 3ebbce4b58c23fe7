//! What is wrong with a PTX text.

use std::fmt;

/// One mistake in a PTX text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    /// Line, from 1.
    pub line: u32,
    /// Column in bytes, from 1.
    pub column: u32,
    /// What was expected and what came.
    pub message: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}, column {}: {}", self.line, self.column, self.message)
    }
}

impl std::error::Error for ParseError {}

/// The mistakes of a PTX text, at least one; the search ends after [`ParseErrors::LIMIT`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseErrors {
    /// In order of their lines.
    pub errors: Vec<ParseError>,
}

impl ParseErrors {
    /// Most mistakes that are collected.
    pub const LIMIT: usize = 20;
}

impl fmt::Display for ParseErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.errors.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ParseErrors {}
