//! Variables and parameters: declarations and initialisers.

use super::ast::{Init, Relocation, Space, Type, Variable};
use super::expr::Value;
use super::lexer::{Kind, Token};
use super::parser::{OpenName, Parser, Step, space, type_of};

/// Deepest nesting of braces in an initialiser.
const DEPTH: usize = 16;
/// Most zero bytes that the gaps of a module's initialisers may take.
const PADDING: u64 = 16 << 20;
/// Greatest alignment of a variable.
const MAX_ALIGN: u32 = 1 << 16;

/// What stands before the names of a declaration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) space: Space,
    pub(super) ty: Type,
    /// 1, 2 or 4 (`.v2`, `.v4`).
    pub(super) lanes: u32,
    align: Option<u32>,
}

/// Floating value to the bits of a type of this many bits.
fn float_bits(ty: Type, value: Value) -> Option<u64> {
    let (single, double) = match value {
        Value::F32(bits) => (bits, f64::from(f32::from_bits(bits)).to_bits()),
        Value::F64(bits) => ((f64::from_bits(bits) as f32).to_bits(), bits),
        Value::Integer(_) => return None,
    };
    match ty.bits() {
        32 => Some(single.into()),
        64 => Some(double),
        _ => None,
    }
}

impl<'a> Parser<'a> {
    /// `.global .align 16 .v4 .f32`; attributes come in any order.
    pub(super) fn head(&mut self) -> Step<Head> {
        let Some(space) = self.dotted().and_then(space) else { return self.expected("a state space") };
        self.next();
        let (mut align, mut lanes) = (None, 1);
        loop {
            let token = self.peek();
            match self.dotted() {
                Some(".align") => {
                    self.next();
                    align = Some(self.alignment(token)?);
                }
                Some(".v2") => lanes = self.lanes(2),
                Some(".v4") => lanes = self.lanes(4),
                Some(".attribute") => self.attribute()?,
                Some(directive) => {
                    let Some(ty) = type_of(directive) else { return self.expected("a type") };
                    self.next();
                    if space != Space::Reg && (ty == Type::Pred || ty.bits() < 8) {
                        return Err(
                            self.error(token, format!("`{directive}` is no type of a variable in memory"))
                        );
                    }
                    return Ok(Head { space, ty, lanes, align });
                }
                None => return self.expected("a type"),
            }
        }
    }

    fn lanes(&mut self, lanes: u32) -> u32 {
        self.next();
        lanes
    }

    fn alignment(&mut self, token: Token) -> Step<u32> {
        let align = self.count("an alignment")?;
        if align.is_power_of_two() && align <= MAX_ALIGN {
            return Ok(align);
        }
        Err(self.error(token, format!("an alignment is a power of two up to {MAX_ALIGN}, not {align}")))
    }

    /// `.attribute(.managed, .unified(0, 0))`
    pub(super) fn attribute(&mut self) -> Step<()> {
        self.next();
        let open = self.peek();
        self.expect("(")?;
        let mut depth = 1;
        while depth > 0 {
            if self.accept("(") {
                depth += 1;
            } else if self.accept(")") {
                depth -= 1;
            } else if self.next().kind == Kind::End {
                return Err(self.error(open, "this parenthesis is never closed"));
            }
        }
        Ok(())
    }

    /// `.global .b32 x[2] = {1, 2}, y;` up to the semicolon. Names of variables are left empty.
    pub(super) fn variables(&mut self, external: bool) -> Step<Vec<(&'a str, Variable)>> {
        let head = self.head()?;
        let mut variables = Vec::new();
        loop {
            let name = self.name("the name of a variable")?;
            let (dimensions, open) = self.dimensions()?;
            let mut variable = self.variable(head, &dimensions, external)?;
            if self.is_punct("=") {
                let token = self.next();
                self.initialize(&mut variable, head, &dimensions, open, token)?;
            }
            variables.push((name, variable));
            if !self.accept(",") {
                break;
            }
        }
        self.expect(";")?;
        Ok(variables)
    }

    /// `[2][3]`: the sizes, the first 0 if it is `[]`, and whether it is.
    fn dimensions(&mut self) -> Step<(Vec<u64>, bool)> {
        let mut dimensions = Vec::new();
        let mut open = false;
        while self.accept("[") {
            if dimensions.is_empty() && self.accept("]") {
                dimensions.push(0);
                open = true;
                continue;
            }
            let token = self.peek();
            let size = self.constant("the size of an array")?;
            let size = u64::try_from(size);
            dimensions.push(size.map_err(|_| self.error(token, "the size of an array cannot be negative"))?);
            self.expect("]")?;
        }
        Ok((dimensions, open))
    }

    fn variable(&self, head: Head, dimensions: &[u64], external: bool) -> Step<Variable> {
        let element = u64::from(head.ty.bytes() * head.lanes);
        let bytes = dimensions.iter().try_fold(element, |bytes, &n| bytes.checked_mul(n));
        // sizes are added up later: leave room for that
        let Some(bytes) = bytes.filter(|&b| b < 1 << 48) else {
            return Err(self.error(self.peek(), "this variable is larger than any memory"));
        };
        Ok(Variable {
            name: String::new(),
            space: head.space,
            ty: head.ty,
            align: head.align.unwrap_or(element as u32),
            bytes,
            array: !dimensions.is_empty(),
            external,
            init: None,
        })
    }

    /// `(.param .u64 .ptr .global .align 4 a, .param .align 8 .b8 b[24])`
    pub(super) fn parameters(&mut self) -> Step<Vec<(&'a str, Variable)>> {
        self.expect("(")?;
        let mut parameters = Vec::new();
        if self.accept(")") {
            return Ok(parameters);
        }
        loop {
            if !matches!(self.dotted(), Some(".param" | ".reg")) {
                return self.expected("a parameter: `.param` or `.reg`");
            }
            let mut head = self.head()?;
            // what a pointer points to is no part of the parameter itself
            if self.accept_dotted(".ptr") {
                loop {
                    let token = self.peek();
                    match self.dotted() {
                        Some(".align") => {
                            self.next();
                            self.alignment(token)?;
                        }
                        Some(".const" | ".global" | ".local" | ".shared") => {
                            self.next();
                        }
                        _ => break,
                    }
                }
            }
            if self.dotted() == Some(".align") {
                let token = self.next();
                head.align = Some(self.alignment(token)?);
            }
            let name = self.name("the name of a parameter")?;
            let (dimensions, _) = self.dimensions()?;
            let mut variable = self.variable(head, &dimensions, false)?;
            if head.space == Space::Reg && variable.bytes != u64::from(head.ty.bytes()) {
                return self.expected("a scalar register");
            }
            variable.name = name.to_string();
            parameters.push((name, variable));
            if !self.accept(",") {
                break;
            }
        }
        self.expect(")")?;
        Ok(parameters)
    }

    /// What follows `=`.
    fn initialize(
        &mut self,
        variable: &mut Variable,
        head: Head,
        dimensions: &[u64],
        open: bool,
        token: Token,
    ) -> Step<()> {
        if !matches!(variable.space, Space::Global | Space::Const) || variable.external {
            return Err(self.error(token, "only `.global` and `.const` variables have initial values"));
        }
        // the vector of an element is one more dimension
        let mut shape = dimensions.to_vec();
        if head.lanes > 1 {
            shape.push(head.lanes.into());
        }
        let size = u64::from(head.ty.bytes());
        // bytes from one step of each dimension to the next, innermost 1 element
        let mut strides = vec![size; shape.len() + 1];
        for i in (0..shape.len()).rev() {
            strides[i] = strides[i + 1].saturating_mul(shape[i].max(1));
        }
        let limit = if open { u64::MAX } else { variable.bytes };
        let mut init = Init::default();
        let mut end = 0;
        if !self.is_punct("{") {
            self.element(head.ty, 0, &mut init)?;
        } else {
            // offset in the variable at each level of braces
            let mut levels: Vec<u64> = Vec::new();
            let mut at = 0u64;
            loop {
                let token = self.peek();
                if self.accept("{") {
                    if levels.len() >= DEPTH.min(shape.len()) {
                        return Err(self.error(token, "more braces than the variable has dimensions"));
                    }
                    levels.push(at);
                    if !self.is_punct("}") {
                        continue;
                    }
                } else {
                    if at.saturating_add(size) > limit {
                        return Err(self.error(token, "more initial values than the variable has elements"));
                    }
                    self.element(head.ty, at, &mut init)?;
                    at += size;
                    end = end.max(at);
                }
                // after a value or an empty pair of braces: close as many as end here
                loop {
                    let token = self.peek();
                    if self.accept("}") {
                        let start = levels.pop().unwrap_or(0);
                        if levels.is_empty() {
                            break;
                        }
                        let step = strides[levels.len()];
                        if at.saturating_sub(start) > step {
                            return Err(self.error(token, "more initial values than this dimension has"));
                        }
                        at = start.saturating_add(step);
                        end = end.max(at.min(limit));
                    } else if self.accept(",") {
                        if self.is_punct("}") {
                            continue;
                        }
                        break;
                    } else {
                        return self.expected("`,` or `}`");
                    }
                }
                if levels.is_empty() {
                    break;
                }
            }
        }
        if open {
            let row = strides.get(1).copied().unwrap_or(size).max(1);
            variable.bytes = end.checked_next_multiple_of(row).filter(|&b| b < 1 << 48).unwrap_or(end);
        }
        variable.init = Some(init);
        Ok(())
    }

    /// One value at `offset`: a number, a symbol's address, `generic(symbol) + 4`, `0xff00(symbol)`.
    fn element(&mut self, ty: Type, offset: u64, init: &mut Init) -> Step<()> {
        let size = ty.bytes() as usize;
        let start = self.reserve(offset, size, init)?;
        let token = self.peek();
        let text = self.text_of(token);
        let call = self.text_of(self.peek_at(1)) == "(";
        if token.kind == Kind::Integer && call {
            let mask = self.integer("a mask")?;
            return self.masked(token, mask, offset, size, init);
        }
        if token.kind == Kind::Name && text == "mask" && call {
            self.next();
            self.expect("(")?;
            let mask = self.constant("a mask")?;
            self.expect(")")?;
            return self.masked(token, mask as u64, offset, size, init);
        }
        if token.kind == Kind::Name && text != "WARP_SZ" {
            let (symbol, addend) = self.symbol_address()?;
            let bytes = size.min(8) as u32;
            init.relocations.push(Relocation { offset, bytes, symbol, addend, shift: 0 });
            return Ok(());
        }
        let bits = match self.expression("an initial value", 0)? {
            Value::Integer(value) if matches!(ty, Type::F32) => u128::from((value as f32).to_bits()),
            Value::Integer(value) if matches!(ty, Type::F64) => u128::from((value as f64).to_bits()),
            Value::Integer(value) => value as u128,
            value => match float_bits(ty, value) {
                Some(bits) => bits.into(),
                None => return Err(self.error(token, "this type takes no floating-point number")),
            },
        };
        init.bytes[start..start + size].copy_from_slice(&bits.to_le_bytes()[..size]);
        Ok(())
    }

    /// Room for `size` bytes at `offset`; gaps of a module are bounded.
    fn reserve(&mut self, offset: u64, size: usize, init: &mut Init) -> Step<usize> {
        let gap = offset.saturating_sub(init.bytes.len() as u64);
        self.padding = self.padding.saturating_add(gap);
        if self.padding > PADDING {
            return Err(self.error(self.peek(), "the gaps in initial values are too large"));
        }
        let start = offset as usize;
        if init.bytes.len() < start + size {
            init.bytes.resize(start + size, 0);
        }
        Ok(start)
    }

    /// `(symbol)` after a mask: one byte of an address.
    fn masked(&mut self, token: Token, mask: u64, offset: u64, size: usize, init: &mut Init) -> Step<()> {
        let shift = mask.trailing_zeros();
        if mask == 0 || mask >> shift != 0xff || !shift.is_multiple_of(8) || size != 1 {
            return Err(self.error(token, "a mask picks one byte of an address for a one-byte element"));
        }
        let (symbol, addend) = self.symbol_address()?;
        init.relocations.push(Relocation { offset, bytes: 1, symbol, addend, shift });
        Ok(())
    }

    /// `symbol`, `symbol + 4`, `generic(symbol) + 4`, `(symbol + 4)`
    fn symbol_address(&mut self) -> Step<(String, i64)> {
        let mut parentheses = 0;
        let symbol = loop {
            if self.accept("(") {
                parentheses += 1;
                continue;
            }
            let token = self.peek();
            let name = self.name("a symbol")?;
            if name != "generic" || !self.is_punct("(") {
                self.open.push(OpenName { name, place: None, token });
                break name.to_string();
            }
        };
        let mut addend = 0i64;
        loop {
            let token = self.peek();
            if self.is_punct("+") || self.is_punct("-") {
                let negative = self.is_punct("-");
                self.next();
                let value = self.integer("an offset")?;
                let value = i64::try_from(value).ok().map(|v| if negative { -v } else { v });
                let sum = value.and_then(|v| addend.checked_add(v));
                addend = sum.ok_or_else(|| self.error(token, "this offset is too large"))?;
            } else if parentheses > 0 {
                self.expect(")")?;
                parentheses -= 1;
            } else {
                return Ok((symbol, addend));
            }
        }
    }
}
