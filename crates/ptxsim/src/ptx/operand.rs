//! Operands of instructions.

use super::ast::{Address, Base, Operand, Space};
use super::expr::Value;
use super::function::{Body, Forward};
use super::lexer::{Kind, Token};
use super::parser::{Global, Parser, Step};
use super::scope::Local;
use super::special;

/// Deepest nesting of braces and parentheses.
const DEPTH: u32 = 4;

/// What a name that is not a register means.
enum Meaning {
    Operand(Operand),
    Symbol(String),
}

impl<'a> Parser<'a> {
    /// One operand.
    pub(super) fn operand(&mut self, body: &mut Body<'a>, opcode: &str) -> Step<Operand> {
        let first = self.part(body, opcode, 0)?;
        if !self.accept("|") {
            return Ok(first);
        }
        let second = self.part(body, opcode, 0)?;
        Ok(Operand::Pair(Box::new(first), Box::new(second)))
    }

    fn part(&mut self, body: &mut Body<'a>, opcode: &str, depth: u32) -> Step<Operand> {
        let token = self.peek();
        if depth > DEPTH {
            return Err(self.error(token, "this operand is nested too deeply"));
        }
        match (token.kind, self.text_of(token)) {
            (Kind::Name, "_") => {
                self.next();
                Ok(Operand::Sink)
            }
            (Kind::Name, name) if name != "WARP_SZ" || self.ends(1) => self.named(body, opcode, token),
            (Kind::Punct, "{") => self.many(body, opcode, "}", depth).map(Operand::Vector),
            (Kind::Punct, "(") if opcode == "call" => self.many(body, opcode, ")", depth).map(Operand::List),
            (Kind::Punct, "[") => self.address(body, opcode, depth),
            (Kind::Punct, "!") if self.peek_at(1).kind == Kind::Name => {
                self.next();
                let token = self.next();
                let name = self.text_of(token);
                match body.scopes.find(name, &mut body.function.registers) {
                    Some(&Local::Register(register)) => Ok(Operand::Not(register)),
                    _ => Err(self.error(token, format!("`{name}` is no predicate register"))),
                }
            }
            _ => Ok(match self.expression("an operand", 0)? {
                Value::Integer(value) => Operand::Integer(value),
                Value::F32(bits) => Operand::F32(bits),
                Value::F64(bits) => Operand::F64(bits),
            }),
        }
    }

    /// Whether the token after `ahead` ends an operand.
    fn ends(&self, ahead: usize) -> bool {
        matches!(self.text_of(self.peek_at(ahead)), "," | ";" | "}" | ")" | "]")
    }

    /// `{a, b}` or `(a, b)`
    fn many(&mut self, body: &mut Body<'a>, opcode: &str, close: &str, depth: u32) -> Step<Vec<Operand>> {
        self.next();
        let mut operands = Vec::new();
        if self.accept(close) {
            return Ok(operands);
        }
        loop {
            operands.push(self.part(body, opcode, depth + 1)?);
            if self.accept(close) {
                return Ok(operands);
            }
            self.expect(",")?;
        }
    }

    /// What a name means; a name that the function does not have so far may be a label that follows.
    fn meaning(&mut self, body: &mut Body<'a>, token: Token) -> Step<Meaning> {
        let name = self.text_of(token);
        let component = self.dotted().filter(|d| special::component(d).is_some());
        let index = component.and_then(special::component);
        match body.scopes.find(name, &mut body.function.registers) {
            Some(&Local::Register(register)) => {
                if let Some(selector) = self.dotted() {
                    let message = format!("`{name}` has no part `{selector}`");
                    return Err(self.error(token, message));
                }
                return Ok(Meaning::Operand(Operand::Register(register)));
            }
            Some(Local::Registers(registers)) => {
                let Some(index) = index else {
                    let all = registers.iter().map(|&r| Operand::Register(r)).collect();
                    return Ok(Meaning::Operand(Operand::Vector(all)));
                };
                let register = registers.get(usize::from(index)).copied();
                let Some(register) = register else {
                    return Err(self.error(token, format!("`{name}` has fewer components")));
                };
                self.next();
                return Ok(Meaning::Operand(Operand::Register(register)));
            }
            Some(Local::Variable(unique)) => return Ok(Meaning::Symbol(unique.clone())),
            None => {}
        }
        if let Some(register) = special::scalar(name) {
            return Ok(Meaning::Operand(Operand::Special(register)));
        }
        if let Some(register) = special::vector(name) {
            let Some(index) = index else {
                let all = (0..4).map(|i| special::part(register, i)).collect();
                return Ok(Meaning::Operand(Operand::Vector(all)));
            };
            self.next();
            return Ok(Meaning::Operand(special::part(register, index)));
        }
        if name.starts_with('%') && !self.globals.contains_key(name) {
            return Err(self.error(token, format!("the register `{name}` is not declared")));
        }
        let instruction = body.function.body.len();
        body.forward.push(Forward { name, instruction, scope: body.scopes.current(), token });
        Ok(Meaning::Symbol(name.to_string()))
    }

    /// A register, special register, label or symbol, `symbol + 4` and `symbol[4]`.
    fn named(&mut self, body: &mut Body<'a>, opcode: &str, token: Token) -> Step<Operand> {
        self.next();
        let symbol = match self.meaning(body, token)? {
            Meaning::Operand(operand) => return Ok(operand),
            Meaning::Symbol(symbol) => symbol,
        };
        if self.accept("[") {
            let index = self.constant("an index")?;
            self.expect("]")?;
            let size = self.element_size(body, self.text_of(token), &symbol);
            let offset = i64::try_from(index).ok().and_then(|i| i.checked_mul(size));
            let Some(offset) = offset else { return Err(self.error(token, "this index is too large")) };
            let value = matches!(opcode, "mov" | "cvta" | "mapa" | "add" | "sub");
            return Ok(if value {
                Operand::Symbol(symbol, offset)
            } else {
                Operand::Address(Address { base: Base::Symbol(symbol), offset })
            });
        }
        let offset = self.offset()?;
        Ok(Operand::Symbol(symbol, offset))
    }

    /// Bytes from one element of an array to the next.
    fn element_size(&self, body: &Body<'a>, written: &str, unique: &str) -> i64 {
        let function = &body.function;
        let local = function.locals.iter().chain(&function.params).chain(&function.returns);
        let global = match self.globals.get(written) {
            Some(&Global::Variable(index)) => self.module.variables.get(index),
            _ => None,
        };
        let variable = local.rev().find(|v| v.name == unique && v.space != Space::Reg).or(global);
        variable.map_or(1, |v| v.ty.bytes().into())
    }

    /// `+4`, `-4`, `+-4`, or nothing; several are added up.
    fn offset(&mut self) -> Step<i64> {
        let mut sum = 0i64;
        loop {
            let token = self.peek();
            if !self.is_punct("+") && !self.is_punct("-") {
                return Ok(sum);
            }
            if self.peek_at(1).kind == Kind::Name && self.text_of(self.peek_at(1)) != "WARP_SZ" {
                self.next();
                return self.expected("an immediate offset");
            }
            let value = i64::try_from(self.constant("an offset")?);
            let added = value.ok().and_then(|v| sum.checked_add(v));
            sum = added.ok_or_else(|| self.error(token, "this offset is too large"))?;
        }
    }

    /// `[base + offset]`, and `[map, {c0, c1}, {o0}]`
    fn address(&mut self, body: &mut Body<'a>, opcode: &str, depth: u32) -> Step<Operand> {
        self.next();
        let token = self.peek();
        let address = if token.kind == Kind::Name && self.text_of(token) != "WARP_SZ" {
            self.next();
            let base = match self.meaning(body, token)? {
                Meaning::Operand(Operand::Register(register)) => Base::Register(register),
                Meaning::Operand(_) => {
                    return Err(self.error(token, "an address starts with a register or a symbol"));
                }
                Meaning::Symbol(symbol) => Base::Symbol(symbol),
            };
            Address { base, offset: self.offset()? }
        } else {
            let value = self.constant("an address")?;
            // addresses are 64 bits, written signed or unsigned
            Address { base: Base::Absolute, offset: value as i64 }
        };
        if !self.is_punct(",") {
            self.expect("]")?;
            return Ok(Operand::Address(address));
        }
        let mut groups = Vec::new();
        while self.accept(",") {
            if !self.is_punct("{") {
                groups.push(vec![self.part(body, opcode, depth + 1)?]);
                continue;
            }
            groups.push(self.many(body, opcode, "}", depth + 1)?);
        }
        self.expect("]")?;
        Ok(Operand::Tensor(address, groups))
    }
}
