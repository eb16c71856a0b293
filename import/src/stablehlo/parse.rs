//! Parses MLIR text into the syntax tree: modules, functions, regions, and ops in the generic form.
//!
//! A recursive-descent parser with one token of lookahead. It accepts the text that printers write, not
//! everything that MLIR's own parser accepts, and stops at the first error.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use super::attribute::{LocationNode, unescape};
use super::lexer::{Lexed, Lexer, MAX_DEPTH, ParseError, Token};
use super::syntax::{
    Argument, Attribute, Attributes, Function, FunctionResult, LocationId, Module, Operand, Operation, Place, Region,
    ResultName, Type,
};

/// Parses the text of one module, or of functions without a module around them.
pub fn parse(text: &str) -> Result<Module<'_>, ParseError> {
    let mut parser = Parser::new(text)?;
    let mut module = Module { name: None, functions: Vec::new(), meshes: Vec::new(), location_names: Vec::new() };
    while parser.current.token != Token::End {
        if matches!(parser.current.token, Token::Hash(_) | Token::Bang(_)) {
            parser.alias()?;
        } else {
            parser.module_item(&mut module)?;
        }
    }
    let mut names = HashSet::new();
    for function in &module.functions {
        if !names.insert(&function.name) {
            let name = function.name.as_ref().into();
            return Err(ParseError::DuplicateFunction { place: function.place, name });
        }
    }
    module.location_names = parser.location_names();
    Ok(module)
}

pub(super) struct Parser<'a> {
    pub lexer: Lexer<'a>,
    pub current: Lexed<'a>,
    /// The end of the token before the current one.
    pub previous_end: usize,
    pub depth: u32,
    pub locations: Vec<LocationNode<'a>>,
    pub location_aliases: HashMap<&'a str, LocationId>,
    pub attribute_aliases: HashMap<&'a str, Attribute<'a>>,
    pub type_aliases: HashMap<&'a str, Type<'a>>,
    /// True while parsing an alias. Aliases inside an alias are not followed, since repeated doubling would
    /// exhaust the memory.
    pub in_alias: bool,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Result<Self, ParseError> {
        let mut lexer = Lexer::new(text);
        let current = lexer.next()?;
        Ok(Parser {
            lexer,
            current,
            previous_end: 0,
            depth: 0,
            locations: Vec::new(),
            location_aliases: HashMap::new(),
            attribute_aliases: HashMap::new(),
            type_aliases: HashMap::new(),
            in_alias: false,
        })
    }

    pub(crate) fn advance(&mut self) -> Result<(), ParseError> {
        self.previous_end = self.current.end;
        self.current = self.lexer.next()?;
        Ok(())
    }

    pub(crate) fn at(&self, byte: u8) -> bool {
        self.current.token == Token::Punctuation(byte)
    }

    pub(crate) fn at_word(&self, word: &str) -> bool {
        self.current.token == Token::Word(word)
    }

    /// Takes the punctuation if it is next; returns true if it was.
    pub(crate) fn eat(&mut self, byte: u8) -> Result<bool, ParseError> {
        let found = self.at(byte);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    pub(crate) fn eat_word(&mut self, word: &str) -> Result<bool, ParseError> {
        let found = self.at_word(word);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    pub(crate) fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), ParseError> {
        match self.eat(byte)? {
            true => Ok(()),
            false => Err(self.expected(expected)),
        }
    }

    pub(crate) fn expect_arrow(&mut self) -> Result<(), ParseError> {
        match self.current.token {
            Token::Arrow => self.advance(),
            _ => Err(self.expected("'->'")),
        }
    }

    /// Parses the separator after an item of a list: a comma, or the closing byte, which is not consumed.
    pub(crate) fn separator(&mut self, close: u8) -> Result<(), ParseError> {
        if self.at(close) || self.eat(b',')? {
            return Ok(());
        }
        Err(self.expected(match close {
            b')' => "',' or ')'",
            b']' => "',' or ']'",
            b'}' => "',' or '}'",
            _ => "',' or '>'",
        }))
    }

    pub(crate) fn expected(&self, expected: &'static str) -> ParseError {
        let Lexed { token, place, .. } = &self.current;
        ParseError::Expected { place: *place, expected, found: token.describe() }
    }

    /// Enters a nesting level. `leave` undoes it, unless there is an error.
    pub(crate) fn enter(&mut self) -> Result<(), ParseError> {
        self.depth += 1;
        match self.depth > MAX_DEPTH {
            true => Err(ParseError::TooDeep { place: self.current.place }),
            false => Ok(()),
        }
    }

    pub(crate) fn leave(&mut self) {
        self.depth -= 1;
    }

    pub(crate) fn word(&mut self) -> Result<&'a str, ParseError> {
        match self.current.token {
            Token::Word(word) => {
                self.advance()?;
                Ok(word)
            }
            _ => Err(self.expected("a word")),
        }
    }

    pub(crate) fn symbol(&mut self) -> Result<&'a str, ParseError> {
        match self.current.token {
            Token::Symbol(name) => {
                self.advance()?;
                Ok(name)
            }
            _ => Err(self.expected("a symbol '@name'")),
        }
    }

    /// Parses `@name`. Of `@outer::@inner`, returns the last name.
    pub(crate) fn symbol_path(&mut self) -> Result<Cow<'a, str>, ParseError> {
        let mut name = self.symbol()?;
        while self.at(b':') && self.lexer.byte(self.current.end) == b':' {
            self.advance()?;
            self.advance()?;
            name = self.symbol()?;
        }
        Ok(unescape(name))
    }

    /// Skips from an opening bracket to its closing bracket, and returns the text including both.
    pub(crate) fn balanced(&mut self) -> Result<&'a str, ParseError> {
        let start = self.current.start;
        let mut open = Vec::new();
        loop {
            match self.current.token {
                Token::Punctuation(b'(') => open.push(b')'),
                Token::Punctuation(b'[') => open.push(b']'),
                Token::Punctuation(b'{') => open.push(b'}'),
                Token::Punctuation(b'<') => open.push(b'>'),
                Token::Punctuation(byte @ (b')' | b']' | b'}' | b'>')) if open.pop() != Some(byte) => {
                    return Err(self.expected("the bracket that closes the last one opened"));
                }
                Token::End => return Err(self.expected("a closing bracket")),
                _ => {}
            }
            self.advance()?;
            if open.is_empty() {
                return Ok(self.lexer.slice(start, self.previous_end));
            }
        }
    }

    /// `#name = attribute`, `#loc1 = loc(...)` or `!name = type`.
    fn alias(&mut self) -> Result<(), ParseError> {
        let token = self.current.token;
        self.advance()?;
        self.expect(b'=', "'='")?;
        self.in_alias = true;
        match token {
            Token::Hash(name) if self.at_word("loc") => {
                let location = self.location()?;
                self.location_aliases.insert(name, location);
            }
            Token::Hash(name) => {
                let attribute = self.attribute(true)?;
                self.attribute_aliases.insert(name, attribute);
            }
            Token::Bang(name) => {
                let ty = self.ty()?;
                self.type_aliases.insert(name, ty);
            }
            _ => return Err(self.expected("an alias")),
        }
        self.in_alias = false;
        Ok(())
    }

    /// Parses a module, a function, or a declaration of another dialect, which is dropped.
    fn module_item(&mut self, module: &mut Module<'a>) -> Result<(), ParseError> {
        match self.current.token {
            Token::Word("module" | "builtin.module") => self.module(module),
            Token::Word("func.func" | "func") => {
                let function = self.function()?;
                module.functions.push(function);
                Ok(())
            }
            // `sdy.mesh @name = <[...]> {...}` describes a device mesh.
            Token::Word("sdy.mesh") => {
                self.advance()?;
                let name = unescape(self.symbol()?);
                self.expect(b'=', "'='")?;
                let axes = self.balanced()?;
                module.meshes.push((name, axes));
                if self.at(b'{') {
                    self.attribute_dictionary()?;
                }
                self.optional_location()?;
                Ok(())
            }
            Token::Word(_) | Token::String(_) | Token::Value(_) => {
                let operation = self.operation()?;
                self.generic_item(operation, module)
            }
            _ => Err(self.expected("a function or a module")),
        }
    }

    fn module(&mut self, module: &mut Module<'a>) -> Result<(), ParseError> {
        self.advance()?;
        if let Token::Symbol(name) = self.current.token {
            self.advance()?;
            module.name.get_or_insert(unescape(name));
        }
        if self.eat_word("attributes")? {
            self.attribute_dictionary()?;
        }
        self.enter()?;
        self.expect(b'{', "'{'")?;
        while !self.eat(b'}')? {
            self.module_item(module)?;
        }
        self.leave();
        self.optional_location()?;
        Ok(())
    }

    /// Handles modules and functions in the generic form, which are parsed as ops.
    fn generic_item(&mut self, mut operation: Operation<'a>, module: &mut Module<'a>) -> Result<(), ParseError> {
        let name = match operation.attribute("sym_name") {
            Some(Attribute::String(name)) => Some(name.clone()),
            _ => None,
        };
        match (operation.dialect, operation.name) {
            ("builtin", "module") => {
                if module.name.is_none() {
                    module.name = name;
                }
                for operation in operation.regions.into_iter().flat_map(|region| region.operations) {
                    self.generic_item(operation, module)?;
                }
            }
            ("sdy", "mesh") => {
                if let (Some(name), Some(Attribute::Opaque(axes))) = (name, operation.attribute("mesh")) {
                    module.meshes.push((name, axes));
                }
            }
            ("func", "func") => {
                let region = operation.regions.pop();
                let (Some(name), Some(region)) = (name, region) else {
                    return Ok(());
                };
                let visibility = match operation.attribute("sym_visibility").and_then(Attribute::as_word) {
                    Some("private") => "private",
                    _ => "public",
                };
                let results = match operation.attribute("function_type") {
                    Some(Attribute::Type(Type::Function(_, results))) => results.clone(),
                    _ => Vec::new(),
                };
                let results = results.into_iter().map(|ty| FunctionResult { ty, attributes: Vec::new() });
                module.functions.push(Function {
                    name,
                    visibility,
                    arguments: region.arguments,
                    results: results.collect(),
                    operations: region.operations,
                    place: operation.place,
                });
            }
            _ => {}
        }
        Ok(())
    }

    fn function(&mut self) -> Result<Function<'a>, ParseError> {
        let place = self.current.place;
        self.advance()?;
        let visibility = match self.current.token {
            Token::Word(word @ ("public" | "private" | "nested")) => {
                self.advance()?;
                word
            }
            _ => "",
        };
        let name = unescape(self.symbol()?);
        let arguments = self.arguments()?;
        let mut results = Vec::new();
        if self.current.token == Token::Arrow {
            self.advance()?;
            if self.eat(b'(')? {
                while !self.eat(b')')? {
                    let ty = self.ty()?;
                    results.push(FunctionResult { ty, attributes: self.optional_dictionary()? });
                    self.separator(b')')?;
                }
            } else {
                results.push(FunctionResult { ty: self.ty()?, attributes: Vec::new() });
            }
        }
        if self.eat_word("attributes")? {
            self.attribute_dictionary()?;
        }
        let operations = match self.at(b'{') {
            true => self.region(Vec::new())?.operations,
            false => Vec::new(),
        };
        self.optional_location()?;
        Ok(Function { name, visibility, arguments, results, operations, place })
    }

    fn optional_dictionary(&mut self) -> Result<Attributes<'a>, ParseError> {
        match self.at(b'{') {
            true => self.attribute_dictionary(),
            false => Ok(Vec::new()),
        }
    }

    /// Parses `(%arg0: tensor<f32> {attributes} loc("name"), ...)`. Declarations omit the names.
    pub(crate) fn arguments(&mut self) -> Result<Vec<Argument<'a>>, ParseError> {
        self.expect(b'(', "'('")?;
        let mut arguments = Vec::new();
        while !self.eat(b')')? {
            let place = self.current.place;
            let mut name = "";
            if let Token::Value(word) = self.current.token {
                name = word;
                self.advance()?;
                self.expect(b':', "':' and a type")?;
            }
            let ty = self.ty()?;
            let attributes = self.optional_dictionary()?;
            let location = self.optional_location()?;
            arguments.push(Argument { name, ty, attributes, location, place });
            self.separator(b')')?;
        }
        Ok(arguments)
    }

    /// Parses `{ ops }`, or `{ ^bb0(%arg: type): ops }` if the block names its arguments itself.
    pub(crate) fn region(&mut self, mut arguments: Vec<Argument<'a>>) -> Result<Region<'a>, ParseError> {
        self.enter()?;
        self.expect(b'{', "'{'")?;
        if let Token::Caret(_) = self.current.token {
            self.advance()?;
            if self.at(b'(') {
                arguments = self.arguments()?;
            }
            self.expect(b':', "':'")?;
        }
        let mut operations = Vec::new();
        while !self.eat(b'}')? {
            operations.push(self.operation()?);
        }
        self.leave();
        Ok(Region { arguments, operations })
    }

    fn operation(&mut self) -> Result<Operation<'a>, ParseError> {
        self.enter()?;
        let place = self.current.place;
        let mut results = Vec::new();
        while let Token::Value(name) = self.current.token {
            self.advance()?;
            let mut count = 1;
            if self.eat(b':')? {
                let Token::Integer(digits) = self.current.token else {
                    return Err(self.expected("a number of results"));
                };
                count = u32::try_from(self.integer(digits)?)
                    .map_err(|_| ParseError::NumberTooLarge { place: self.current.place })?;
                self.advance()?;
            }
            results.push(ResultName { name, count });
            if !self.eat(b',')? {
                self.expect(b'=', "'='")?;
                break;
            }
        }
        let mut operation = match self.current.token {
            Token::String(name) => self.generic_operation(name)?,
            Token::Word(name) => self.pretty_operation(name)?,
            _ => return Err(self.expected("an operation")),
        };
        operation.location = self.optional_location()?;
        operation.place = place;
        let names = results.iter().map(|result| u64::from(result.count)).sum();
        let types = operation.result_types.len();
        if types == 0 && names > 0 {
            return Err(self.expected("':' and the type of the operation"));
        }
        if !results.is_empty() && u64::try_from(types) != Ok(names) {
            return Err(ParseError::ResultCount { place, names, types });
        }
        operation.results = results;
        self.leave();
        Ok(operation)
    }

    /// `"dialect.name"(%a, %b) <{properties}> ({ region }, ...) {attributes} : (types) -> types`.
    fn generic_operation(&mut self, name: &'a str) -> Result<Operation<'a>, ParseError> {
        let mut operation = new_operation(name, self.current.place);
        self.advance()?;
        self.expect(b'(', "'('")?;
        operation.operands = self.operands(b')')?;
        if self.eat(b'<')? {
            operation.attributes = self.attribute_dictionary()?;
            self.expect(b'>', "'>'")?;
        }
        if self.eat(b'(')? {
            while !self.eat(b')')? {
                operation.regions.push(self.region(Vec::new())?);
                self.separator(b')')?;
            }
        }
        if self.at(b'{') {
            operation.attributes.extend(self.attribute_dictionary()?);
        }
        self.expect(b':', "':' and the type of the operation")?;
        (operation.operand_types, operation.result_types) = self.function_type()?;
        Ok(operation)
    }

    /// Parses operands through the closing byte.
    pub(crate) fn operands(&mut self, close: u8) -> Result<Vec<Operand<'a>>, ParseError> {
        let mut operands = Vec::new();
        while !self.eat(close)? {
            operands.push(self.operand()?);
            self.separator(close)?;
        }
        Ok(operands)
    }

    pub(crate) fn operand(&mut self) -> Result<Operand<'a>, ParseError> {
        let Lexed { token: Token::Value(name), place, .. } = self.current else {
            return Err(self.expected("a value '%name'"));
        };
        self.advance()?;
        let mut index = 0;
        if let Token::Hash(digits) = self.current.token
            && self.current.start == self.previous_end
        {
            index = digits.parse().map_err(|_| self.expected("a result number"))?;
            self.advance()?;
        }
        Ok(Operand { name, index, place })
    }
}

/// An op with this name and no other content.
pub(super) fn new_operation(name: &str, place: Place) -> Operation<'_> {
    let (dialect, name) = name.split_once('.').unwrap_or(("func", name));
    Operation {
        dialect,
        name,
        results: Vec::new(),
        operands: Vec::new(),
        attributes: Vec::new(),
        regions: Vec::new(),
        operand_types: Vec::new(),
        result_types: Vec::new(),
        location: None,
        place,
    }
}

/// An attribute with its generic name.
pub(super) fn named<'a>(name: &'static str, value: Attribute<'a>) -> (Cow<'a, str>, Attribute<'a>) {
    (Cow::Borrowed(name), value)
}
