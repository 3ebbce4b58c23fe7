//! PTX text to tokens.

use super::error::ParseError;

/// Classes of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `%r1`, `mov`, `$L__BB0_1`, `_`
    Name,
    /// `.global`, `.shared::cta`, `.1d`: a dot and what follows it without a space.
    Dotted,
    /// `12`, `0x1fU`, `017`, `0b1`
    Integer,
    /// `1.5`, `0.`, `1e5`
    Decimal,
    /// `0f3f800000`
    F32,
    /// `0d3ff0000000000000`
    F64,
    /// `"text"`, quotes included.
    Str,
    /// One or two characters of punctuation.
    Punct,
    /// The end of the text.
    End,
}

/// A token: where it stands in the text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) start: u32,
    pub(super) len: u32,
    pub(super) line: u32,
}

fn name_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'$'
}

struct Lexer<'a> {
    bytes: &'a [u8],
    at: usize,
    line: u32,
    line_start: usize,
    tokens: Vec<Token>,
}

/// All tokens, the last one [`Kind::End`].
pub(super) fn tokenize(text: &str) -> Result<Vec<Token>, ParseError> {
    if u32::try_from(text.len()).is_err() {
        return Err(ParseError { line: 1, column: 1, message: "the text is longer than 4 GiB".into() });
    }
    let tokens = Vec::with_capacity(text.len() / 4);
    let mut lexer = Lexer { bytes: text.as_bytes(), at: 0, line: 1, line_start: 0, tokens };
    while lexer.token(text)? {}
    lexer.push(Kind::End, lexer.at);
    Ok(lexer.tokens)
}

impl Lexer<'_> {
    fn peek(&self, ahead: usize) -> u8 {
        self.bytes.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn push(&mut self, kind: Kind, start: usize) {
        let len = (self.at - start) as u32;
        self.tokens.push(Token { kind, start: start as u32, len, line: self.line });
    }

    fn error<T>(&self, start: usize, message: String) -> Result<T, ParseError> {
        let column = (start.saturating_sub(self.line_start) + 1) as u32;
        Err(ParseError { line: self.line, column, message })
    }

    fn skip(&mut self, more: impl Fn(u8) -> bool) {
        while self.bytes.get(self.at).is_some_and(|&b| more(b)) {
            self.at += 1;
        }
    }

    fn newline(&mut self) {
        self.line += 1;
        self.line_start = self.at;
    }

    /// Reads one token or one stretch of blanks; false at the end.
    fn token(&mut self, text: &str) -> Result<bool, ParseError> {
        let Some(&b) = self.bytes.get(self.at) else { return Ok(false) };
        let start = self.at;
        match b {
            b'\n' => {
                self.at += 1;
                self.newline();
            }
            b' ' | b'\t' | b'\r' | 0x0b | 0x0c => {
                self.skip(|b| matches!(b, b' ' | b'\t' | b'\r' | 0x0b | 0x0c))
            }
            b'/' if self.peek(1) == b'/' => self.skip(|b| b != b'\n'),
            b'/' if self.peek(1) == b'*' => self.block_comment()?,
            // a preprocessor's line marker, and the line form of DWARF data of old compilers
            b'#' => self.skip(|b| b != b'\n'),
            b'@' if self.peek(1) == b'@' => self.skip(|b| b != b'\n'),
            b'"' => self.string()?,
            b'0'..=b'9' => self.number()?,
            b'.' if name_byte(self.peek(1)) => self.dotted(),
            b'a'..=b'z' | b'A'..=b'Z' | b'_' | b'$' => {
                self.skip(name_byte);
                self.push(Kind::Name, start);
            }
            b'%' if name_byte(self.peek(1)) => {
                self.at += 1;
                self.skip(name_byte);
                self.push(Kind::Name, start);
            }
            b'<' | b'>' | b'=' | b'!' | b'&' | b'|' => {
                let second = self.peek(1);
                let double = match b {
                    b'<' | b'>' => second == b || second == b'=',
                    b'=' | b'!' => second == b'=',
                    _ => second == b,
                };
                self.at += 1 + usize::from(double);
                self.push(Kind::Punct, start);
            }
            b',' | b';' | b':' | b'{' | b'}' | b'[' | b']' | b'(' | b')' | b'+' | b'-' | b'*' | b'/'
            | b'%' | b'~' | b'^' | b'?' | b'@' => {
                self.at += 1;
                self.push(Kind::Punct, start);
            }
            _ => {
                let c = text.get(start..).and_then(|t| t.chars().next()).unwrap_or('?');
                return self.error(start, format!("the character {c:?} has no meaning in PTX"));
            }
        }
        Ok(true)
    }

    fn block_comment(&mut self) -> Result<(), ParseError> {
        let start = self.at;
        self.at += 2;
        while self.at < self.bytes.len() {
            if self.peek(0) == b'*' && self.peek(1) == b'/' {
                self.at += 2;
                return Ok(());
            }
            self.at += 1;
            if self.bytes[self.at - 1] == b'\n' {
                self.newline();
            }
        }
        self.error(start, "this comment has no end".into())
    }

    fn string(&mut self) -> Result<(), ParseError> {
        let start = self.at;
        self.at += 1;
        loop {
            match self.bytes.get(self.at) {
                None | Some(b'\n') => return self.error(start, "this string has no closing quote".into()),
                Some(b'"') => break,
                Some(b'\\') if self.peek(1) != b'\n' && self.at + 1 < self.bytes.len() => self.at += 2,
                Some(_) => self.at += 1,
            }
        }
        self.at += 1;
        self.push(Kind::Str, start);
        Ok(())
    }

    /// `.shared::cta`
    fn dotted(&mut self) {
        let start = self.at;
        self.at += 1;
        loop {
            self.skip(name_byte);
            if self.peek(0) == b':' && self.peek(1) == b':' && name_byte(self.peek(2)) {
                self.at += 2;
            } else {
                break;
            }
        }
        self.push(Kind::Dotted, start);
    }

    fn number(&mut self) -> Result<(), ParseError> {
        let start = self.at;
        let kind = match (self.peek(0), self.peek(1)) {
            (b'0', b'f' | b'F') => self.bits(8, Kind::F32)?,
            (b'0', b'd' | b'D') => self.bits(16, Kind::F64)?,
            (b'0', b'x' | b'X') => {
                self.at += 2;
                self.skip(|b| b.is_ascii_hexdigit());
                Kind::Integer
            }
            (b'0', b'b' | b'B') => {
                self.at += 2;
                self.skip(|b| b == b'0' || b == b'1');
                Kind::Integer
            }
            _ => self.decimal(),
        };
        if kind == Kind::Integer && matches!(self.peek(0), b'u' | b'U') {
            self.at += 1;
        }
        if name_byte(self.peek(0)) {
            self.skip(name_byte);
            let text = String::from_utf8_lossy(&self.bytes[start..self.at]).into_owned();
            return self.error(start, format!("`{text}` is not a number"));
        }
        self.push(kind, start);
        Ok(())
    }

    /// `0f` or `0d` with exactly `digits` hexadecimal digits.
    fn bits(&mut self, digits: usize, kind: Kind) -> Result<Kind, ParseError> {
        let start = self.at;
        self.at += 2;
        self.skip(|b| b.is_ascii_hexdigit());
        let got = self.at - start - 2;
        if got == digits {
            return Ok(kind);
        }
        let prefix = if digits == 8 { "0f" } else { "0d" };
        self.error(start, format!("`{prefix}` takes {digits} hexadecimal digits, here are {got}"))
    }

    fn decimal(&mut self) -> Kind {
        self.skip(|b| b.is_ascii_digit());
        let mut kind = Kind::Integer;
        if self.peek(0) == b'.' {
            kind = Kind::Decimal;
            self.at += 1;
            self.skip(|b| b.is_ascii_digit());
        }
        let sign = usize::from(matches!(self.peek(1), b'+' | b'-'));
        if matches!(self.peek(0), b'e' | b'E') && self.peek(1 + sign).is_ascii_digit() {
            kind = Kind::Decimal;
            self.at += 1 + sign;
            self.skip(|b| b.is_ascii_digit());
        }
        kind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<(Kind, &str)> {
        let tokens = tokenize(text).unwrap();
        let text = |t: &Token| &text[t.start as usize..(t.start + t.len) as usize];
        tokens.iter().map(|t| (t.kind, text(t))).take_while(|t| t.0 != Kind::End).collect()
    }

    #[test]
    fn modifiers_are_one_token() {
        use Kind::{Dotted, Name};
        let expected = vec![
            (Name, "cp"),
            (Dotted, ".async"),
            (Dotted, ".shared::cluster"),
            (Dotted, ".mbarrier::complete_tx::bytes"),
            (Dotted, ".1d"),
            (Dotted, ".128b"),
            (Dotted, ".L2::128B"),
        ];
        assert_eq!(
            tokens("cp.async.shared::cluster.mbarrier::complete_tx::bytes.1d.128b.L2::128B"),
            expected
        );
    }

    #[test]
    fn numbers() {
        use Kind::{Decimal, F32, F64, Integer, Punct};
        for (text, kind) in [
            ("0", Integer),
            ("0x1fU", Integer),
            ("017", Integer),
            ("0b101", Integer),
            ("12U", Integer),
            ("0.", Decimal),
            ("1.5e-3", Decimal),
            ("1e5", Decimal),
            ("0f3F800000", F32),
            ("0d3FF0000000000000", F64),
        ] {
            assert_eq!(tokens(text), vec![(kind, text)]);
        }
        assert_eq!(tokens("0.,"), vec![(Decimal, "0."), (Punct, ",")]);
        assert!(tokenize("0f3F80").unwrap_err().message.contains("8 hexadecimal digits, here are 4"));
        assert!(tokenize("12abc").unwrap_err().message.contains("not a number"));
    }

    #[test]
    fn comments_and_lines() {
        let tokens = tokenize("a // x\n/* b\n */ c\n# 5 \"f\"\n@@DWARF .b8 1\n% %d\n").unwrap();
        let lines: Vec<u32> = tokens.iter().map(|t| t.line).collect();
        assert_eq!(lines, [1, 3, 6, 6, 7]);
        assert_eq!(tokens[2].kind, Kind::Punct);
        let error = tokenize("a\n  ü").unwrap_err();
        assert_eq!((error.line, error.column), (2, 3));
        assert!(tokenize("/* a").is_err() && tokenize("\"a").is_err() && tokenize("\"a\\").is_err());
    }
}
