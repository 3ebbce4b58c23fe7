//! Constant expressions.

use super::lexer::Kind;
use super::parser::{Parser, Step};

/// Deepest nesting of parentheses and signs.
const DEPTH: u32 = 64;

/// A literal or the value of an expression.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value {
    Integer(i128),
    F32(u32),
    F64(u64),
}

/// How tightly a binary operator binds, loosest first.
fn precedence(operator: &str) -> Option<u32> {
    Some(match operator {
        "||" => 1,
        "&&" => 2,
        "|" => 3,
        "^" => 4,
        "&" => 5,
        "==" | "!=" => 6,
        "<" | ">" | "<=" | ">=" => 7,
        "<<" | ">>" => 8,
        "+" | "-" => 9,
        "*" | "/" | "%" => 10,
        _ => return None,
    })
}

fn apply(operator: &str, a: i128, b: i128) -> Result<i128, String> {
    let shift = || {
        u32::try_from(b)
            .ok()
            .filter(|&n| n < 64)
            .ok_or_else(|| format!("a 64-bit constant cannot be shifted by {b}"))
    };
    // the manual's constants have 64 bits: keep to their range, so that nothing overflows
    let wrap = |value: i128| {
        if i128::from(i64::MIN) <= value && value <= i128::from(u64::MAX) {
            value
        } else {
            i128::from(value as i64)
        }
    };
    Ok(wrap(match operator {
        "||" => i128::from(a != 0 || b != 0),
        "&&" => i128::from(a != 0 && b != 0),
        "|" => a | b,
        "^" => a ^ b,
        "&" => a & b,
        "==" => i128::from(a == b),
        "!=" => i128::from(a != b),
        "<" => i128::from(a < b),
        ">" => i128::from(a > b),
        "<=" => i128::from(a <= b),
        ">=" => i128::from(a >= b),
        "<<" => i128::from((a as u64) << shift()?),
        ">>" => a >> shift()?,
        "+" => a + b,
        "-" => a - b,
        "*" => a.wrapping_mul(b),
        "/" | "%" if b == 0 => return Err("a constant is divided by zero".into()),
        "/" => a / b,
        _ => a % b,
    }))
}

impl Parser<'_> {
    /// A plain integer literal.
    pub(super) fn integer(&mut self, what: &str) -> Step<u64> {
        let token = self.peek();
        if token.kind != Kind::Integer {
            return self.expected(what);
        }
        self.next();
        let text = self.text_of(token).trim_end_matches(['u', 'U']);
        let parsed = match text.as_bytes() {
            [b'0', b'x' | b'X', ..] => u64::from_str_radix(&text[2..], 16),
            [b'0', b'b' | b'B', ..] => u64::from_str_radix(&text[2..], 2),
            [b'0', _, ..] => u64::from_str_radix(&text[1..], 8),
            _ => text.parse(),
        };
        parsed.map_err(|_| self.error(token, format!("{} is not a 64-bit integer", self.show(token))))
    }

    /// An expression whose value is an integer.
    pub(super) fn constant(&mut self, what: &str) -> Step<i128> {
        let token = self.peek();
        match self.expression(what, 0)? {
            Value::Integer(value) => Ok(value),
            _ => Err(self.error(token, format!("expected {what}, found a floating-point number"))),
        }
    }

    /// An expression; `what` is for the message if none comes.
    pub(super) fn expression(&mut self, what: &str, depth: u32) -> Step<Value> {
        let token = self.peek();
        let condition = self.binary(what, 0, depth)?;
        if !self.is_punct("?") {
            return Ok(condition);
        }
        self.next();
        let Value::Integer(condition) = condition else {
            return Err(self.error(token, "the condition of `?` is no integer"));
        };
        let depth = self.deeper(depth)?;
        let yes = self.expression(what, depth)?;
        self.expect(":")?;
        let no = self.expression(what, depth)?;
        Ok(if condition != 0 { yes } else { no })
    }

    fn deeper(&self, depth: u32) -> Step<u32> {
        if depth < DEPTH {
            return Ok(depth + 1);
        }
        Err(self.error(self.peek(), "this expression is nested too deeply"))
    }

    fn binary(&mut self, what: &str, least: u32, depth: u32) -> Step<Value> {
        let depth = self.deeper(depth)?;
        let mut left = self.unary(what, depth)?;
        loop {
            let token = self.peek();
            let operator = self.text_of(token);
            let Some(level) = precedence(operator).filter(|&l| token.kind == Kind::Punct && l > least) else {
                return Ok(left);
            };
            self.next();
            let right = self.binary(what, level, depth)?;
            let (Value::Integer(a), Value::Integer(b)) = (left, right) else {
                return Err(self.error(token, format!("`{operator}` takes integers here")));
            };
            left = Value::Integer(apply(operator, a, b).map_err(|message| self.error(token, message))?);
        }
    }

    fn unary(&mut self, what: &str, depth: u32) -> Step<Value> {
        let token = self.peek();
        let depth = self.deeper(depth)?;
        match (token.kind, self.text_of(token)) {
            (Kind::Punct, sign @ ("+" | "-" | "~" | "!")) => {
                self.next();
                let value = self.unary(what, depth)?;
                Ok(match (sign, value) {
                    ("+", value) => value,
                    ("-", Value::Integer(v)) => Value::Integer(-v),
                    ("-", Value::F32(bits)) => Value::F32(bits ^ 1 << 31),
                    ("-", Value::F64(bits)) => Value::F64(bits ^ 1 << 63),
                    ("~", Value::Integer(v)) => Value::Integer(!v),
                    ("!", Value::Integer(v)) => Value::Integer(i128::from(v == 0)),
                    _ => return Err(self.error(token, format!("`{sign}` takes an integer here"))),
                })
            }
            (Kind::Punct, "(") => {
                self.next();
                // a cast changes the type of a constant, not its bits
                if matches!(self.dotted(), Some(".s64" | ".u64")) {
                    self.next();
                    self.expect(")")?;
                    return self.unary(what, depth);
                }
                let value = self.expression(what, depth)?;
                self.expect(")")?;
                Ok(value)
            }
            (Kind::Integer, _) => Ok(Value::Integer(self.integer(what)?.into())),
            (Kind::F32, text) => {
                self.next();
                Ok(Value::F32(u32::from_str_radix(&text[2..], 16).unwrap_or(0)))
            }
            (Kind::F64, text) => {
                self.next();
                Ok(Value::F64(u64::from_str_radix(&text[2..], 16).unwrap_or(0)))
            }
            (Kind::Decimal, text) => {
                self.next();
                let value: Result<f64, _> = text.parse();
                value.map(|v| Value::F64(v.to_bits())).map_err(|_| self.error(token, "not a number"))
            }
            (Kind::Name, "WARP_SZ") => {
                self.next();
                Ok(Value::Integer(32))
            }
            _ => self.expected(what),
        }
    }
}
