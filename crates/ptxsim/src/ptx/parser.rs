//! The parser's state, and module scope.

use super::ast::{Base, Function, Module, Operand, Space, Target, Type, Variant};
use super::error::{ParseError, ParseErrors};
use super::lexer::{Kind, Token, tokenize};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A step of the parser; an error leads to a point from which to go on.
pub(super) type Step<T> = Result<T, ParseError>;

/// A name in an instruction that nothing inside its function explains.
#[derive(Debug)]
pub(super) struct OpenName<'a> {
    pub(super) name: &'a str,
    /// Index into [`Module::functions`] and into that function's body; `None` in an initialiser.
    pub(super) place: Option<(usize, usize)>,
    pub(super) token: Token,
}

/// What module scope knows about a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    /// A variable: index into [`Module::variables`].
    Variable(usize),
    Function,
}

pub(super) struct Parser<'a> {
    pub(super) text: &'a str,
    tokens: Vec<Token>,
    at: usize,
    errors: Vec<ParseError>,
    words: HashMap<&'a str, Arc<str>>,
    pub(super) module: Module,
    pub(super) globals: HashMap<&'a str, Global>,
    pub(super) open: Vec<OpenName<'a>>,
    aliases: HashMap<&'a str, &'a str>,
    /// Zero bytes that initialisers with gaps made so far.
    pub(super) padding: u64,
}

/// Parses the text of a module.
///
/// # Errors
/// What is wrong with it: several mistakes at once where the parser could go on. An unknown opcode is none.
pub fn parse(text: &str) -> Result<Module, ParseErrors> {
    let tokens = tokenize(text).map_err(|e| ParseErrors { errors: vec![e] })?;
    let mut parser = Parser {
        text,
        tokens,
        at: 0,
        errors: Vec::new(),
        words: HashMap::new(),
        module: Module::default(),
        globals: HashMap::new(),
        open: Vec::new(),
        aliases: HashMap::new(),
        padding: 0,
    };
    parser.run();
    if parser.errors.is_empty() {
        return Ok(parser.module);
    }
    parser.errors.sort_by_key(|e| (e.line, e.column));
    Err(ParseErrors { errors: parser.errors })
}

// Tokens.
impl<'a> Parser<'a> {
    pub(super) fn peek(&self) -> Token {
        self.peek_at(0)
    }

    pub(super) fn peek_at(&self, ahead: usize) -> Token {
        // the last token is `End`, so there is one
        self.tokens[(self.at + ahead).min(self.tokens.len() - 1)]
    }

    pub(super) fn text_of(&self, token: Token) -> &'a str {
        self.text.get(token.start as usize..(token.start + token.len) as usize).unwrap_or_default()
    }

    pub(super) fn next(&mut self) -> Token {
        let token = self.peek();
        if token.kind != Kind::End {
            self.at += 1;
        }
        token
    }

    pub(super) fn error(&self, token: Token, message: impl Into<String>) -> ParseError {
        let before = &self.text.as_bytes()[..(token.start as usize).min(self.text.len())];
        let start = before.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
        let column = (before.len() - start + 1) as u32;
        ParseError { line: token.line, column, message: message.into() }
    }

    /// The token for a message.
    pub(super) fn show(&self, token: Token) -> String {
        match token.kind {
            Kind::End => "the end of the text".to_string(),
            _ => {
                let text = self.text_of(token);
                let short: String = text.chars().take(60).collect();
                if short.len() < text.len() { format!("`{short}…`") } else { format!("`{text}`") }
            }
        }
    }

    /// "expected this, found that" at the next token.
    pub(super) fn expected<T>(&self, what: &str) -> Step<T> {
        let token = self.peek();
        Err(self.error(token, format!("expected {what}, found {}", self.show(token))))
    }

    pub(super) fn is_punct(&self, text: &str) -> bool {
        let token = self.peek();
        token.kind == Kind::Punct && self.text_of(token) == text
    }

    /// Takes this punctuation if it comes next.
    pub(super) fn accept(&mut self, text: &str) -> bool {
        let is = self.is_punct(text);
        self.at += usize::from(is);
        is
    }

    pub(super) fn expect(&mut self, text: &str) -> Step<()> {
        if self.accept(text) { Ok(()) } else { self.expected(&format!("`{text}`")) }
    }

    /// The next token's text if it is a directive or modifier.
    pub(super) fn dotted(&self) -> Option<&'a str> {
        let token = self.peek();
        (token.kind == Kind::Dotted).then(|| self.text_of(token))
    }

    pub(super) fn accept_dotted(&mut self, text: &str) -> bool {
        let is = self.dotted() == Some(text);
        self.at += usize::from(is);
        is
    }

    pub(super) fn name(&mut self, what: &str) -> Step<&'a str> {
        let token = self.peek();
        if token.kind != Kind::Name {
            return self.expected(what);
        }
        self.at += 1;
        Ok(self.text_of(token))
    }

    /// A whole number that fits.
    pub(super) fn count(&mut self, what: &str) -> Step<u32> {
        let token = self.peek();
        let value = self.constant(what)?;
        u32::try_from(value).map_err(|_| self.error(token, format!("{what} cannot be {value}")))
    }

    /// One shared copy of a word that occurs often.
    pub(super) fn word(&mut self, text: &'a str) -> Arc<str> {
        self.words.entry(text).or_insert_with(|| text.into()).clone()
    }

    /// Notes a mistake; false when there are enough.
    pub(super) fn report(&mut self, error: ParseError) -> bool {
        if self.errors.len() < ParseErrors::LIMIT {
            self.errors.push(error);
        }
        self.errors.len() < ParseErrors::LIMIT
    }

    /// Skips `{ … }` whose opening brace is next.
    fn skip_braces(&mut self) -> Step<()> {
        let open = self.peek();
        self.expect("{")?;
        let mut depth = 1;
        while depth > 0 {
            if self.peek().kind == Kind::End {
                return Err(self.error(open, "this brace is never closed"));
            }
            if self.accept("{") {
                depth += 1;
            } else if self.accept("}") {
                depth -= 1;
            } else {
                self.at += 1;
            }
        }
        Ok(())
    }

    /// Goes on at the next directive that starts something in module scope; a body on the way is skipped.
    fn skip_item(&mut self) {
        let mut previous = "";
        while self.peek().kind != Kind::End {
            let text = self.text_of(self.peek());
            match self.dotted() {
                Some(
                    ".visible" | ".extern" | ".weak" | ".common" | ".entry" | ".func" | ".file" | ".section"
                    | ".alias",
                ) => return,
                Some(".global" | ".const" | ".shared") if matches!(previous, ";" | "}") => return,
                _ => {}
            }
            if text == "{" && self.skip_braces().is_ok() {
                previous = "}";
                continue;
            }
            self.at += 1;
            previous = text;
        }
    }
}

// Module scope.
impl<'a> Parser<'a> {
    fn run(&mut self) {
        if let Err(error) = self.header() {
            self.report(error);
            return;
        }
        while self.peek().kind != Kind::End {
            let before = self.at;
            if let Err(error) = self.item() {
                if !self.report(error) {
                    return;
                }
                // whatever happens, go forward
                self.at = self.at.max(before + 1);
                self.skip_item();
            }
        }
        self.close();
    }

    /// `.version 9.0 .target sm_80 .address_size 64`
    fn header(&mut self) -> Step<()> {
        let token = self.peek();
        if !self.accept_dotted(".version") {
            return self.expected("`.version` at the start of a PTX module");
        }
        self.version(token)?;
        let token = self.peek();
        if !self.accept_dotted(".target") {
            return self.expected("`.target` after `.version`");
        }
        self.target(token)?;
        // ptxas takes a module without the directive for a 64-bit one
        self.module.address_size = 64;
        if self.accept_dotted(".address_size") {
            let token = self.peek();
            self.module.address_size = self.count("an address size")?;
            if !matches!(self.module.address_size, 32 | 64) {
                return Err(self.error(token, "an address size is 32 or 64"));
            }
        }
        Ok(())
    }

    fn version(&mut self, directive: Token) -> Step<()> {
        let token = self.next();
        let parsed = self
            .text_of(token)
            .split_once('.')
            .and_then(|(major, minor)| Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?)));
        match parsed {
            Some(version) if token.kind == Kind::Decimal => self.module.version = version,
            _ => return Err(self.error(directive, "`.version` takes a number such as 9.0")),
        }
        Ok(())
    }

    fn target(&mut self, directive: Token) -> Step<()> {
        loop {
            let token = self.peek();
            let name = self.name("an architecture such as sm_80")?;
            if let Some(arch) = name.strip_prefix("sm_") {
                let digits = arch.trim_end_matches(|c: char| c.is_ascii_alphabetic());
                let variant = match &arch[digits.len()..] {
                    "" => Variant::Plain,
                    "a" => Variant::Arch,
                    "f" => Variant::Family,
                    _ => return Err(self.error(token, format!("`{name}` is not an architecture"))),
                };
                let arch = digits.parse();
                let arch = arch.map_err(|_| self.error(token, format!("`{name}` is not an architecture")))?;
                self.module.target = Target { arch, variant };
            }
            if !self.accept(",") {
                break;
            }
        }
        if self.module.target.arch == 0 {
            return Err(self.error(directive, "`.target` names no architecture such as sm_80"));
        }
        Ok(())
    }

    /// One directive of module scope.
    fn item(&mut self) -> Step<()> {
        let Some(directive) = self.dotted() else { return self.expected("a directive") };
        match directive {
            ".file" => return self.file(),
            ".section" => {
                self.at += 1;
                // `.debug_str` is a directive-like word, other names are plain
                self.at += 1;
                return self.skip_braces();
            }
            ".loc" => return self.location().map(|_| ()),
            ".pragma" => return self.pragma(),
            ".alias" => return self.alias(),
            ".texref" | ".samplerref" | ".surfref" => {
                return self.expected("something else: textures and surfaces are not supported");
            }
            _ => {}
        }
        let mut external = false;
        loop {
            match self.dotted() {
                Some(".extern") => external = true,
                Some(".visible" | ".weak" | ".common" | ".managed") => {}
                _ => break,
            }
            self.at += 1;
        }
        match self.dotted() {
            Some(".entry") => {
                self.at += 1;
                self.function(true)
            }
            Some(".func") => {
                self.at += 1;
                self.function(false)
            }
            Some(".global" | ".const" | ".shared" | ".local" | ".param") => self.globals(external),
            _ => self.expected("a function or a variable"),
        }
    }

    /// `.file 1 "a.cu", 123, 456`
    pub(super) fn file(&mut self) -> Step<()> {
        self.at += 1;
        let index = self.count("the index of a file")?;
        let token = self.next();
        if token.kind != Kind::Str {
            return Err(self.error(token, format!("expected a path in quotes, found {}", self.show(token))));
        }
        let quoted = self.text_of(token);
        let path = quoted.get(1..quoted.len().saturating_sub(1)).unwrap_or_default();
        self.module.files.push((index, path.to_string()));
        while self.accept(",") {
            self.constant("a time stamp or size")?;
        }
        self.accept(";");
        Ok(())
    }

    /// `.pragma "nounroll", "used_bytes_mask 0xff";`
    pub(super) fn pragma(&mut self) -> Step<()> {
        self.at += 1;
        while self.peek().kind == Kind::Str {
            self.at += 1;
            self.accept(",");
        }
        self.expect(";")
    }

    /// `.loc 1 2 3, function_name $L__info_string0 + 4, inlined_at 1 5 6`: file and line of the innermost function.
    pub(super) fn location(&mut self) -> Step<(u32, u32)> {
        self.at += 1;
        let file = self.integer("the index of a file")?;
        let line = self.integer("a line")?;
        self.integer("a column")?;
        while self.is_punct(",") && matches!(self.text_of(self.peek_at(1)), "function_name" | "inlined_at") {
            self.at += 1;
            if self.name("`function_name`")? == "inlined_at" {
                for what in ["the index of a file", "a line", "a column"] {
                    self.integer(what)?;
                }
            } else {
                self.name("a label")?;
                if self.accept("+") {
                    self.integer("an offset")?;
                }
            }
        }
        self.accept(";");
        let clamp = |value: u64| u32::try_from(value).unwrap_or(0);
        Ok((clamp(file), clamp(line)))
    }

    /// `.alias f, g;`
    fn alias(&mut self) -> Step<()> {
        self.at += 1;
        let alias = self.name("the name of an alias")?;
        self.expect(",")?;
        let token = self.peek();
        let function = self.name("a function")?;
        self.expect(";")?;
        if alias == function || self.aliases.contains_key(alias) {
            return Err(self.error(token, format!("the alias `{alias}` is not possible")));
        }
        self.globals.insert(alias, Global::Function);
        self.aliases.insert(alias, function);
        self.open.push(OpenName { name: function, place: None, token });
        Ok(())
    }

    /// `.global .align 4 .b8 x[4] = {…}, y;`
    fn globals(&mut self, external: bool) -> Step<()> {
        let token = self.peek();
        for (name, mut variable) in self.variables(external)? {
            if variable.space == Space::Local || variable.space == Space::Param {
                return Err(self.error(token, "this state space has no variables of module scope"));
            }
            variable.name = name.to_string();
            match self.globals.get(name) {
                // a declaration and a definition in any order, or two declarations
                Some(&Global::Variable(i)) if variable.external || self.module.variables[i].external => {
                    if !variable.external {
                        self.module.variables[i] = variable;
                    }
                }
                Some(_) => return Err(self.error(token, format!("`{name}` is defined twice"))),
                None => {
                    self.globals.insert(name, Global::Variable(self.module.variables.len()));
                    self.module.variables.push(variable);
                }
            }
        }
        Ok(())
    }

    /// Follows aliases, at most as many as there are.
    fn aliased(&self, name: &'a str) -> &'a str {
        let mut name = name;
        for _ in 0..=self.aliases.len() {
            match self.aliases.get(name) {
                Some(&next) => name = next,
                None => break,
            }
        }
        name
    }

    /// What can only be known at the end: names of module scope, declarations that have a definition.
    fn close(&mut self) {
        let open = std::mem::take(&mut self.open);
        for OpenName { name, place, token } in open {
            if !self.globals.contains_key(name) {
                let message =
                    format!("`{name}` is no register, label, variable, parameter or function of this module");
                if !self.report(self.error(token, message)) {
                    return;
                }
            }
            let target = self.aliased(name);
            let function = place.and_then(|(f, _)| self.module.functions.get_mut(f));
            if target != name
                && let Some(instruction) = function.and_then(|f| f.body.get_mut(place.map_or(0, |p| p.1)))
            {
                for operand in &mut instruction.operands {
                    rename(operand, name, target);
                }
            }
        }
        let defined: HashSet<String> =
            self.module.functions.iter().filter(|f| !f.declaration).map(|f| f.name.clone()).collect();
        let mut seen = HashSet::new();
        let aliases = &self.aliases;
        self.module.functions.retain(|f: &Function| {
            let superfluous = defined.contains(&f.name) || aliases.contains_key(&*f.name);
            !f.declaration || !superfluous && seen.insert(f.name.clone())
        });
        for variable in &mut self.module.variables {
            for relocation in variable.init.iter_mut().flat_map(|init| &mut init.relocations) {
                let mut name = relocation.symbol.as_str();
                for _ in 0..=aliases.len() {
                    name = aliases.get(name).copied().unwrap_or(name);
                }
                if name != relocation.symbol {
                    relocation.symbol = name.to_string();
                }
            }
        }
    }
}

/// Replaces a function's name in an operand.
fn rename(operand: &mut Operand, from: &str, to: &str) {
    let in_base = |base: &mut Base| {
        if let Base::Symbol(name) = base
            && name == from
        {
            *name = to.to_string();
        }
    };
    match operand {
        Operand::Symbol(name, _) if name == from => *name = to.to_string(),
        Operand::List(operands) | Operand::Vector(operands) => {
            operands.iter_mut().for_each(|o| rename(o, from, to));
        }
        Operand::Pair(a, b) => {
            rename(a, from, to);
            rename(b, from, to);
        }
        Operand::Address(address) => in_base(&mut address.base),
        Operand::Tensor(address, groups) => {
            in_base(&mut address.base);
            groups.iter_mut().flatten().for_each(|o| rename(o, from, to));
        }
        _ => {}
    }
}

/// A state space by its directive.
pub(super) fn space(directive: &str) -> Option<Space> {
    Some(match directive {
        ".reg" => Space::Reg,
        ".const" => Space::Const,
        ".global" => Space::Global,
        ".local" => Space::Local,
        ".param" => Space::Param,
        ".shared" | ".shared::cta" => Space::Shared,
        _ => return None,
    })
}

/// A type by its directive.
pub(super) fn type_of(directive: &str) -> Option<Type> {
    directive.strip_prefix('.').and_then(Type::parse)
}
