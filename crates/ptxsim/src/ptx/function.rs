//! Functions: heads and bodies.

use super::ast::{Function, Guard, Instruction, Limits, Location, Operand, Prototype, Space, Type, Variable};
use super::lexer::{Kind, Token};
use super::parser::{Global, OpenName, Parser, Step};
use super::scope::{Label, Local, Scopes, make};
use std::collections::HashSet;

/// Deepest nesting of scopes.
const DEPTH: usize = 256;

/// A function while its body is read.
pub(super) struct Body<'a> {
    pub(super) function: Function,
    pub(super) scopes: Scopes<'a>,
    /// Names of variables and labels, which are unique in a function.
    taken: HashSet<String>,
    /// Names in instructions that may be labels declared later: where they stand and their scope.
    pub(super) forward: Vec<Forward<'a>>,
    targets: Vec<Targets<'a>>,
    location: Location,
}

/// A `.branchtargets`: index into the function's list, scope, and the labels as written.
struct Targets<'a> {
    index: usize,
    scope: usize,
    labels: Vec<(&'a str, Token)>,
}

/// A name that may be a label.
#[derive(Debug, Clone, Copy)]
pub(super) struct Forward<'a> {
    pub(super) name: &'a str,
    pub(super) instruction: usize,
    pub(super) scope: usize,
    pub(super) token: Token,
}

impl<'a> Body<'a> {
    /// A name that nothing else in the function has.
    fn unique(&mut self, name: &str) -> String {
        if self.taken.insert(name.to_string()) {
            return name.to_string();
        }
        // more names than are taken cannot all be taken
        (1..=self.taken.len())
            .rev()
            .map(|n| format!("{name}${n}"))
            .find(|candidate| self.taken.insert(candidate.clone()))
            .unwrap_or_else(|| name.to_string())
    }
}

impl<'a> Parser<'a> {
    /// After `.entry` or `.func`.
    pub(super) fn function(&mut self, kernel: bool) -> Step<()> {
        let mut limits = Limits::default();
        self.function_directives(&mut limits)?;
        let returns = if !kernel && self.is_punct("(") { self.parameters()? } else { Vec::new() };
        let token = self.peek();
        let name = self.name("the name of a function")?;
        let params = if self.is_punct("(") { self.parameters()? } else { Vec::new() };
        self.function_directives(&mut limits)?;
        let declaration = self.accept(";");
        let function = Function {
            name: name.to_string(),
            kernel,
            declaration,
            returns: returns.iter().map(|p| p.1.clone()).collect(),
            params: params.iter().map(|p| p.1.clone()).collect(),
            limits,
            line: token.line,
            ..Function::default()
        };
        let twice = match self.globals.insert(name, Global::Function) {
            Some(Global::Function) => {
                !declaration && self.module.functions.iter().any(|f| f.name == name && !f.declaration)
            }
            Some(Global::Variable(_)) => true,
            None => false,
        };
        if twice {
            return Err(self.error(token, format!("`{name}` is defined twice")));
        }
        if declaration {
            self.module.functions.push(function);
            return Ok(());
        }
        let mut body = Body {
            function,
            scopes: Scopes::new(),
            taken: HashSet::new(),
            forward: Vec::new(),
            targets: Vec::new(),
            location: Location::default(),
        };
        for (name, parameter) in returns.into_iter().chain(params) {
            let local = if parameter.space == Space::Reg {
                make(name, parameter.ty, 1, &mut body.function.registers)
            } else {
                body.taken.insert(name.to_string());
                Local::Variable(name.to_string())
            };
            // prototypes call every parameter `_`
            if !body.scopes.declare(name, local) && name != "_" {
                return Err(self.error(token, format!("two parameters are called `{name}`")));
            }
        }
        self.expect("{")?;
        self.body(&mut body)?;
        self.resolve(&mut body);
        self.module.functions.push(body.function);
        Ok(())
    }

    /// Directives between the parts of a function's head.
    fn function_directives(&mut self, limits: &mut Limits) -> Step<()> {
        while let Some(directive) = self.dotted() {
            match directive {
                ".noreturn" | ".blocksareclusters" => {
                    self.next();
                }
                ".explicitcluster" => {
                    self.next();
                    limits.explicit_cluster = true;
                }
                ".abi_preserve" | ".abi_preserve_control" | ".maxclusterrank" => {
                    self.next();
                    self.count("a number")?;
                }
                ".maxntid" => limits.max_threads = Some(self.three()?),
                ".reqntid" => limits.required_threads = Some(self.three()?),
                ".reqnctapercluster" => {
                    limits.explicit_cluster = true;
                    limits.cluster = Some(self.three()?);
                }
                ".minnctapersm" | ".maxnctapersm" => {
                    self.next();
                    let blocks = self.count("a number of blocks")?;
                    if directive == ".minnctapersm" {
                        limits.min_blocks = Some(blocks);
                    }
                }
                ".maxnreg" => {
                    self.next();
                    limits.max_registers = Some(self.count("a number of registers")?);
                }
                ".pragma" => self.pragma()?,
                ".attribute" => self.attribute()?,
                _ => return self.expected("a directive of a function"),
            }
        }
        Ok(())
    }

    /// One to three extents after a directive.
    fn three(&mut self) -> Step<[u32; 3]> {
        self.next();
        let mut extents = [1; 3];
        for (i, extent) in extents.iter_mut().enumerate() {
            if i > 0 && !self.accept(",") {
                break;
            }
            *extent = self.count("an extent")?;
        }
        Ok(extents)
    }

    /// Statements up to the closing brace.
    fn body(&mut self, body: &mut Body<'a>) -> Step<()> {
        let mut depth = 0;
        loop {
            let token = self.peek();
            if token.kind == Kind::End {
                let name = &body.function.name;
                return Err(self.error(token, format!("the body of `{name}` is never closed")));
            }
            if self.accept("{") {
                if depth >= DEPTH {
                    return Err(self.error(token, format!("scopes are nested deeper than {DEPTH}")));
                }
                depth += 1;
                body.scopes.enter();
            } else if self.accept("}") {
                depth -= usize::from(depth > 0);
                if !body.scopes.leave() {
                    return Ok(());
                }
            } else if let Err(error) = self.statement(body) {
                if !self.report(error.clone()) {
                    return Err(error);
                }
                self.skip_in_body();
            }
        }
    }

    /// Goes on after the next semicolon; braces on the way belong to the broken statement.
    fn skip_in_body(&mut self) {
        let mut depth = 0;
        loop {
            let token = self.peek();
            match self.text_of(token) {
                _ if token.kind == Kind::End => return,
                "{" => depth += 1,
                "}" if depth == 0 => return,
                "}" => depth -= 1,
                ";" => {
                    self.next();
                    return;
                }
                _ => {}
            }
            self.next();
        }
    }

    fn statement(&mut self, body: &mut Body<'a>) -> Step<()> {
        let token = self.peek();
        match token.kind {
            Kind::Dotted => self.body_directive(body),
            Kind::Name if self.text_of(self.peek_at(1)) == ":" => self.label(body),
            Kind::Name => self.instruction(body, None),
            Kind::Punct if self.text_of(token) == "@" => {
                self.next();
                let negated = self.accept("!");
                let token = self.peek();
                let name = self.name("a predicate after `@`")?;
                match body.scopes.find(name, &mut body.function.registers) {
                    Some(&Local::Register(register))
                        if body.function.registers[register as usize].ty == Type::Pred =>
                    {
                        self.instruction(body, Some(Guard { register, negated }))
                    }
                    _ => Err(self.error(token, format!("`{name}` is no predicate register"))),
                }
            }
            Kind::Punct if self.text_of(token) == ";" => {
                self.next();
                Ok(())
            }
            _ => self.expected("an instruction, a directive or a label"),
        }
    }

    fn label(&mut self, body: &mut Body<'a>) -> Step<()> {
        let token = self.next();
        let name = self.text_of(token);
        self.expect(":")?;
        let unique = body.unique(name);
        let label = match self.dotted() {
            Some(".branchtargets") => {
                self.next();
                let mut labels = Vec::new();
                loop {
                    let token = self.peek();
                    labels.push((self.name("a label")?, token));
                    if !self.accept(",") {
                        break;
                    }
                }
                self.expect(";")?;
                let (index, scope) = (body.function.branch_targets.len(), body.scopes.current());
                body.targets.push(Targets { index, scope, labels });
                body.function.branch_targets.push((unique.clone(), Vec::new()));
                Label::Table(unique)
            }
            Some(".calltargets") => {
                self.next();
                loop {
                    let token = self.peek();
                    let name = self.name("a function")?;
                    self.open.push(OpenName { name, place: None, token });
                    if !self.accept(",") {
                        break;
                    }
                }
                self.expect(";")?;
                Label::Table(unique)
            }
            Some(".callprototype") => {
                self.next();
                self.prototype(body, unique.clone())?;
                Label::Table(unique)
            }
            _ => {
                body.function.labels.push((unique, body.function.body.len()));
                Label::Code(body.function.labels.len() - 1)
            }
        };
        if body.scopes.declare_label(name, label) {
            return Ok(());
        }
        Err(self.error(token, format!("the label `{name}` stands twice in this scope")))
    }

    /// `(.param .b32 _) _ (.param .b64 _) .noreturn;`
    fn prototype(&mut self, body: &mut Body<'a>, name: String) -> Step<()> {
        let returns = if self.is_punct("(") { self.parameters()? } else { Vec::new() };
        self.name("`_`")?;
        let params = if self.is_punct("(") { self.parameters()? } else { Vec::new() };
        self.function_directives(&mut Limits::default())?;
        self.expect(";")?;
        let variables =
            |list: Vec<(&str, Variable)>| list.into_iter().map(|(_, variable)| variable).collect::<Vec<_>>();
        let prototype = Prototype { name, returns: variables(returns), params: variables(params) };
        body.function.prototypes.push(prototype);
        Ok(())
    }

    fn body_directive(&mut self, body: &mut Body<'a>) -> Step<()> {
        match self.dotted().unwrap_or_default() {
            ".loc" => {
                (body.location.file, body.location.line) = self.location()?;
                Ok(())
            }
            ".reg" => self.registers(body),
            ".local" | ".shared" | ".param" | ".const" | ".global" => self.local_variables(body, false),
            ".extern" if self.text_of(self.peek_at(1)) == ".shared" => {
                self.next();
                self.local_variables(body, true)
            }
            ".pragma" => self.pragma(),
            ".file" => self.file(),
            _ => self.expected("a directive of a function's body"),
        }
    }

    fn local_variables(&mut self, body: &mut Body<'a>, external: bool) -> Step<()> {
        let token = self.peek();
        for (name, mut variable) in self.variables(external)? {
            // an outer name must keep its meaning in the rest of the function
            if body.scopes.current() > 0 && self.globals.contains_key(name) {
                body.taken.insert(name.to_string());
            }
            variable.name = body.unique(name);
            if !body.scopes.declare(name, Local::Variable(variable.name.clone())) {
                return Err(self.error(token, format!("`{name}` is declared twice")));
            }
            body.function.locals.push(variable);
        }
        Ok(())
    }

    /// `.reg .v2 .b32 a, b<4>;`
    fn registers(&mut self, body: &mut Body<'a>) -> Step<()> {
        let head = self.head()?;
        loop {
            let token = self.peek();
            let name = self.name("the name of a register")?;
            let new = if self.accept("<") {
                // no expression: `>` would be an operator
                let count = self.integer("a number of registers")?.min(u32::MAX.into()) as u32;
                self.expect(">")?;
                body.scopes.declare_range(name, count, head.ty, head.lanes)
            } else {
                let local = make(name, head.ty, head.lanes, &mut body.function.registers);
                body.scopes.declare(name, local)
            };
            if !new {
                return Err(self.error(token, format!("`{name}` is declared twice")));
            }
            if !self.accept(",") {
                break;
            }
        }
        self.expect(";")
    }

    fn instruction(&mut self, body: &mut Body<'a>, guard: Option<Guard>) -> Step<()> {
        let token = self.peek();
        let opcode = self.name("an instruction")?;
        let opcode = self.word(opcode);
        let mut modifiers = Vec::new();
        while let Some(modifier) = self.dotted() {
            self.next();
            modifiers.push(self.word(&modifier[1..]));
        }
        let call = &*opcode == "call";
        let mut operands = Vec::new();
        if !self.is_punct(";") {
            loop {
                operands.push(self.operand(body, &opcode)?);
                if !self.accept(",") {
                    break;
                }
            }
        }
        self.expect(";")?;
        if call {
            operands = call_operands(operands).ok_or_else(|| {
                self.error(token, "`call` takes `(returned), function, (arguments), prototype`")
            })?;
        }
        let location = Location { ptx_line: token.line, ..body.location };
        body.function.body.push(Instruction { guard, opcode, modifiers, operands, location });
        Ok(())
    }

    /// Labels of a whole body are known: names that were not yet.
    fn resolve(&mut self, body: &mut Body<'a>) {
        for Forward { name, instruction, scope, token } in std::mem::take(&mut body.forward) {
            let Some(used) = body.function.body.get_mut(instruction) else { continue };
            let meant = match body.scopes.label(name, scope) {
                Some(Label::Code(index)) => Operand::Label(*index),
                Some(Label::Table(unique)) => Operand::Symbol(unique.clone(), 0),
                None => {
                    let place = Some((self.module.functions.len(), instruction));
                    self.open.push(OpenName { name, place, token });
                    continue;
                }
            };
            if !put(&mut used.operands, name, &meant) {
                let error = self.error(token, format!("`{name}` is a label, which cannot stand here"));
                self.report(error);
            }
        }
        for Targets { index, scope, labels } in std::mem::take(&mut body.targets) {
            for (name, token) in labels {
                if let Some(Label::Code(label)) = body.scopes.label(name, scope) {
                    let unique = body.function.labels[*label].0.clone();
                    body.function.branch_targets[index].1.push(unique);
                } else {
                    let error = self.error(token, format!("`{name}` is no label of this function"));
                    self.report(error);
                }
            }
        }
    }
}

/// Replaces one use of a name that turned out to be a label; false if there is none where a label may stand.
fn put(operands: &mut [Operand], name: &str, with: &Operand) -> bool {
    operands.iter_mut().any(|operand| match operand {
        Operand::Symbol(symbol, 0) if symbol == name => {
            *operand = with.clone();
            true
        }
        Operand::List(inner) => put(inner, name, with),
        _ => false,
    })
}

/// `(returned), function, (arguments), prototype`, with empty lists for what is left out.
fn call_operands(operands: Vec<Operand>) -> Option<Vec<Operand>> {
    let mut rest = operands.into_iter().peekable();
    let list = |rest: &mut std::iter::Peekable<std::vec::IntoIter<Operand>>| {
        rest.next_if(|o| matches!(o, Operand::List(_))).unwrap_or_else(|| Operand::List(Vec::new()))
    };
    let returned = list(&mut rest);
    let function = rest.next_if(|o| matches!(o, Operand::Symbol(_, 0) | Operand::Register(_)))?;
    let arguments = list(&mut rest);
    let mut all = vec![returned, function, arguments];
    all.extend(rest.next_if(|o| matches!(o, Operand::Symbol(_, 0))));
    rest.next().is_none().then_some(all)
}
