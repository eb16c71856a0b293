//! Parses ops in their own syntax, which most StableHLO ops have, and gives them the attribute names, operand
//! order and regions of the generic form.
//!
//! One loop reads nearly all of them: after the name come operands, words, strings and `key = value` pairs in any
//! order, then attributes, then types. Only `reduce`, `while`, `convolution` and calls have a form of their own.

use std::borrow::Cow;

use super::attribute::unescape;
use super::lexer::{ParseError, Token};
use super::parse::{Parser, named, new_operation};
use super::syntax::{Argument, Attribute, Attributes, Operand, Operation};

impl<'a> Parser<'a> {
    pub(crate) fn pretty_operation(&mut self, name: &'a str) -> Result<Operation<'a>, ParseError> {
        let mut operation = new_operation(name, self.current.place);
        self.advance()?;
        match name {
            "stablehlo.constant" => self.constant(&mut operation)?,
            "stablehlo.reduce" => self.reduce(&mut operation)?,
            "stablehlo.while" => self.while_loop(&mut operation)?,
            "sdy.manual_computation" => self.manual_computation(&mut operation)?,
            _ => {
                self.items(&mut operation)?;
                if self.eat_word("attributes")? || self.at(b'{') {
                    operation.attributes.extend(self.attribute_dictionary()?);
                }
                if self.eat(b':')? {
                    self.operation_type(&mut operation)?;
                }
            }
        }
        Ok(operation)
    }

    /// Parses the items between the name of an op and its attributes or type.
    fn items(&mut self, operation: &mut Operation<'a>) -> Result<(), ParseError> {
        loop {
            // In `@name(...)` and `"name" %a`, no comma follows the name.
            let mut comma_needed = true;
            match self.current.token {
                Token::Value(_) => {
                    let operand = self.operand()?;
                    operation.operands.push(operand);
                    if self.at(b'[') {
                        self.brackets_after_operand(operation)?;
                    } else if self.at(b'<') {
                        let text = self.balanced()?;
                        operation.attributes.push(named("sharding", Attribute::Opaque(text)));
                    }
                }
                Token::Symbol(_) => {
                    comma_needed = false;
                    let symbol = self.symbol_path()?;
                    operation.attributes.push(match operation.name {
                        "custom_call" => named("call_target_name", Attribute::String(symbol)),
                        _ => named("callee", Attribute::Symbol(symbol)),
                    });
                }
                Token::Punctuation(b'(') => {
                    self.advance()?;
                    // `top_k(%a, k = 2)` has its attribute inside the parentheses.
                    while let Token::Value(_) = self.current.token {
                        operation.operands.push(self.operand()?);
                        self.separator(b')')?;
                    }
                    operation.attributes.extend(self.attribute_list(b')', true)?);
                }
                Token::String(raw) => {
                    self.advance()?;
                    comma_needed = false;
                    operation.attributes.push(named("text", Attribute::String(unescape(raw))));
                }
                Token::Word(word) if word != "loc" && word != "attributes" => self.word_item(operation, word)?,
                _ => return Ok(()),
            }
            // `convolution(%a, %b) dim_numbers = ..., window = {...}` has irregular commas.
            if !self.eat(b',')? && comma_needed && operation.name != "convolution" {
                return Ok(());
            }
        }
    }

    /// Parses a bare word, or a `key = value` pair.
    fn word_item(&mut self, operation: &mut Operation<'a>, word: &'a str) -> Result<(), ParseError> {
        self.advance()?;
        if !self.eat(b'=')? {
            // In `compare LT, %a, %b, FLOAT`, the first word is the direction.
            let name = match operation.operands.is_empty() {
                true => "comparison_direction",
                false => "compare_type",
            };
            operation.attributes.push(named(name, Attribute::Enum(word)));
            return Ok(());
        }
        match word {
            "batching_dims" | "contracting_dims" => {
                let left = self.attribute(false)?;
                if !self.eat_word("x")? {
                    return Err(self.expected("'x'"));
                }
                let right = self.attribute(false)?;
                let (left_name, right_name) = match word {
                    "batching_dims" => ("lhs_batching_dimensions", "rhs_batching_dimensions"),
                    _ => ("lhs_contracting_dimensions", "rhs_contracting_dimensions"),
                };
                operation.attributes.push(named(left_name, left));
                operation.attributes.push(named(right_name, right));
            }
            "dim_numbers" => {
                let dimensions = self.convolution_labels()?;
                operation.attributes.push(named("dimension_numbers", dimensions));
            }
            "window" => {
                self.expect(b'{', "'{'")?;
                for (name, value) in self.attribute_list(b'}', false)? {
                    let name = window_name(&name).map_or(name, Cow::Borrowed);
                    operation.attributes.push((name, value));
                }
            }
            _ => {
                let value = self.attribute(false)?;
                operation.attributes.push((Cow::Borrowed(generic_name(operation.name, word)), value));
            }
        }
        Ok(())
    }

    /// Parses `%0 [1:3, 4:8:2]` of a slice, or `%0[1]` of a tuple.
    fn brackets_after_operand(&mut self, operation: &mut Operation<'a>) -> Result<(), ParseError> {
        if operation.name == "get_tuple_element" {
            self.advance()?;
            let index = self.attribute(false)?;
            operation.attributes.push(named("index", index));
            return self.expect(b']', "']'");
        }
        let [mut starts, mut limits, mut strides] = [const { Vec::new() }; 3];
        self.advance()?;
        while !self.eat(b']')? {
            starts.push(self.attribute(false)?);
            self.expect(b':', "':'")?;
            limits.push(self.attribute(false)?);
            strides.push(match self.eat(b':')? {
                true => self.attribute(false)?,
                false => Attribute::Int(1),
            });
            self.separator(b']')?;
        }
        operation.attributes.push(named("start_indices", Attribute::Array(starts)));
        operation.attributes.push(named("limit_indices", Attribute::Array(limits)));
        operation.attributes.push(named("strides", Attribute::Array(strides)));
        Ok(())
    }

    /// Parses `stablehlo.constant {attributes} dense<1.0> : tensor<f32>`. The literal and the result have the
    /// same type.
    fn constant(&mut self, operation: &mut Operation<'a>) -> Result<(), ParseError> {
        if self.at(b'{') {
            operation.attributes = self.attribute_dictionary()?;
        }
        if self.at_word("dense_resource") {
            // The values are stored elsewhere, or were elided by the printer.
            self.advance()?;
            let value = Attribute::Opaque(self.balanced()?);
            self.expect(b':', "':' and the type of the literal")?;
            operation.result_types = vec![self.ty()?];
            operation.attributes.push(named("value", value));
            return Ok(());
        }
        let value = self.attribute(true)?;
        let Attribute::Dense(dense) = &value else {
            return Err(self.expected("'dense<...>' before this"));
        };
        operation.result_types = vec![dense.ty.clone()];
        operation.attributes.push(named("value", value));
        Ok(())
    }

    /// Parses the types after the colon: `(a, b) -> c`, or a short form whose meaning depends on the op.
    fn operation_type(&mut self, operation: &mut Operation<'a>) -> Result<(), ParseError> {
        if self.at(b'(') {
            (operation.operand_types, operation.result_types) = self.function_type()?;
            return Ok(());
        }
        let mut types = vec![self.ty()?];
        while self.eat(b',')? {
            types.push(self.ty()?);
        }
        if self.current.token == Token::Arrow {
            self.advance()?;
            operation.operand_types = types;
            operation.result_types = self.result_types()?;
            return Ok(());
        }
        match (operation.name, types.as_slice()) {
            ("return" | "trace", _) => operation.operand_types = types,
            // `select %p, %a, %b : tensor<i1>, T`.
            ("select", [predicate, value]) => {
                operation.operand_types = vec![predicate.clone(), value.clone(), value.clone()];
                operation.result_types = vec![value.clone()];
            }
            // Operand types of these ops differ from the result type, and the text does not give them.
            ("tuple" | "complex", _) => operation.result_types = types,
            (_, [ty]) => {
                operation.operand_types = vec![ty.clone(); operation.operands.len()];
                operation.result_types = types;
            }
            _ => {
                operation.operand_types.clone_from(&types);
                operation.result_types = types;
            }
        }
        Ok(())
    }

    /// Parses `stablehlo.reduce(%a init: %i), (%b init: %j)`, followed by
    /// `applies stablehlo.add across dimensions = [2]`, or by `across dimensions = [2]` with a `reducer` region
    /// after the type.
    fn reduce(&mut self, operation: &mut Operation<'a>) -> Result<(), ParseError> {
        let mut inits = Vec::new();
        loop {
            self.expect(b'(', "'('")?;
            operation.operands.push(self.operand()?);
            if !self.eat_word("init")? {
                return Err(self.expected("'init'"));
            }
            self.expect(b':', "':'")?;
            inits.push(self.operand()?);
            self.expect(b')', "')'")?;
            if !self.eat(b',')? {
                break;
            }
        }
        operation.operands.extend(inits);
        if self.eat_word("applies")? {
            let reducer = self.word()?;
            let reducer = reducer.split_once('.').map_or(reducer, |(_, name)| name);
            operation.attributes.push(named("applies", Attribute::Enum(reducer)));
        }
        for word in ["across", "dimensions"] {
            if !self.eat_word(word)? {
                return Err(self.expected("'across dimensions = [...]'"));
            }
        }
        self.expect(b'=', "'='")?;
        let dimensions = self.attribute(false)?;
        operation.attributes.push(named("dimensions", dimensions));
        if self.eat_word("attributes")? || self.at(b'{') {
            operation.attributes.extend(self.attribute_dictionary()?);
        }
        self.expect(b':', "':'")?;
        (operation.operand_types, operation.result_types) = self.function_type()?;
        if self.eat_word("reducer")? {
            // The text lists both arguments of each operand as a pair. The region takes all first arguments,
            // then all second ones.
            let (mut first, mut second) = (Vec::new(), Vec::new());
            while self.at(b'(') {
                let mut pair = self.arguments()?.into_iter();
                first.extend(pair.next());
                second.extend(pair);
            }
            first.extend(second);
            operation.regions.push(self.region(first)?);
        }
        Ok(())
    }

    /// `stablehlo.while(%i = %a, ...) : types attributes {...} cond { ... } do { ... }`.
    fn while_loop(&mut self, operation: &mut Operation<'a>) -> Result<(), ParseError> {
        self.expect(b'(', "'('")?;
        let mut names: Vec<Operand<'a>> = Vec::new();
        while !self.eat(b')')? {
            names.push(self.operand()?);
            self.expect(b'=', "'='")?;
            operation.operands.push(self.operand()?);
            self.optional_location()?;
            self.separator(b')')?;
        }
        if self.eat(b':')? {
            self.operation_type(operation)?;
        }
        if operation.result_types.len() != names.len() {
            return Err(ParseError::ResultCount {
                place: operation.place,
                names: u64::try_from(names.len()).unwrap_or(u64::MAX),
                types: operation.result_types.len(),
            });
        }
        if self.eat_word("attributes")? {
            operation.attributes = self.attribute_dictionary()?;
        }
        let arguments: Vec<Argument<'a>> = (names.iter().zip(&operation.result_types))
            .map(|(name, ty)| Argument {
                name: name.name,
                ty: ty.clone(),
                attributes: Attributes::new(),
                location: None,
                place: name.place,
            })
            .collect();
        for word in ["cond", "do"] {
            if !self.eat_word(word)? {
                return Err(self.expected("'cond { ... } do { ... }'"));
            }
            let region = self.region(arguments.clone())?;
            operation.regions.push(region);
        }
        Ok(())
    }

    /// `sdy.manual_computation(%a) in_shardings=[...] out_shardings=[...] manual_axes={...} (%b: type) {...} : type`.
    fn manual_computation(&mut self, operation: &mut Operation<'a>) -> Result<(), ParseError> {
        self.expect(b'(', "'('")?;
        operation.operands = self.operands(b')')?;
        while let Token::Word(word) = self.current.token {
            self.advance()?;
            self.expect(b'=', "'='")?;
            let value = self.attribute(false)?;
            operation.attributes.push((Cow::Borrowed(word), value));
        }
        let arguments = self.arguments()?;
        let region = self.region(arguments)?;
        operation.regions.push(region);
        self.expect(b':', "':' and the type of the operation")?;
        self.operation_type(operation)
    }
}

/// The generic name of a key that an op's own syntax uses.
fn generic_name<'a>(operation: &str, key: &'a str) -> &'a str {
    match (operation, key) {
        ("broadcast_in_dim" | "dynamic_broadcast_in_dim", "dims") => "broadcast_dimensions",
        ("transpose", "dims") => "permutation",
        (_, "dims") => "dimensions",
        ("iota" | "dynamic_iota", "dim") => "iota_dimension",
        (_, "dim") => "dimension",
        ("broadcast", "sizes") => "broadcast_sizes",
        (_, "sizes") => "slice_sizes",
        ("pad", "low") => "edge_padding_low",
        ("pad", "high") => "edge_padding_high",
        ("pad", "interior") => "interior_padding",
        (_, "precision") => "precision_config",
        ("rng", "distribution") => "rng_distribution",
        ("rng_bit_generator", "algorithm") => "rng_algorithm",
        ("fft", "type") => "fft_type",
        ("fft", "length") => "fft_length",
        ("einsum" | "unary_einsum", "config") => "einsum_config",
        (_, key) => key,
    }
}

fn window_name(key: &str) -> Option<&'static str> {
    match key {
        "stride" => Some("window_strides"),
        "pad" => Some("padding"),
        "lhs_dilate" => Some("lhs_dilation"),
        "rhs_dilate" => Some("rhs_dilation"),
        "reverse" => Some("window_reversal"),
        _ => None,
    }
}
