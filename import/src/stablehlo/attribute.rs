//! Parses attributes, types and locations, the parts of MLIR text that all ops share.

use std::borrow::Cow;

use super::lexer::{ParseError, Token};
use super::parse::Parser;
use super::syntax::{Attribute, Attributes, Dense, Elements, LocationId, Scalar, TensorType, Type};

/// A location as written. Its name is resolved once all aliases are known.
#[derive(Debug, Clone)]
pub(super) enum LocationNode<'a> {
    Unknown,
    Name(Cow<'a, str>, Option<LocationId>),
    File(Cow<'a, str>, &'a str, &'a str),
    /// The parts of a fused location, or the callee of a call site. The first part with a name gives the name.
    First(Vec<LocationId>),
    Alias(&'a str),
}

impl<'a> Parser<'a> {
    /// `{a = 1, "b.c" = @d, unit}`.
    pub(crate) fn attribute_dictionary(&mut self) -> Result<Attributes<'a>, ParseError> {
        self.expect(b'{', "'{'")?;
        self.attribute_list(b'}', true)
    }

    /// Parses `key = value` pairs through the closing byte.
    pub(crate) fn attribute_list(&mut self, close: u8, typed: bool) -> Result<Attributes<'a>, ParseError> {
        let mut attributes = Vec::new();
        self.enter()?;
        while !self.eat(close)? {
            let name = match self.current.token {
                Token::Word(name) => Cow::Borrowed(name),
                Token::String(raw) => unescape(raw),
                _ => return Err(self.expected("an attribute name")),
            };
            self.advance()?;
            let value = if self.eat(b'=')? { self.attribute(typed)? } else { Attribute::Unit };
            attributes.push((name, value));
            self.separator(close)?;
        }
        self.leave();
        Ok(attributes)
    }

    /// Parses one attribute. `typed` says whether numbers and strings may be followed by `: type`; in an op's
    /// own syntax a colon after a number begins the type of the op.
    pub(crate) fn attribute(&mut self, typed: bool) -> Result<Attribute<'a>, ParseError> {
        self.enter()?;
        let attribute = self.attribute_inside(typed)?;
        self.leave();
        Ok(attribute)
    }

    fn attribute_inside(&mut self, typed: bool) -> Result<Attribute<'a>, ParseError> {
        match self.current.token {
            Token::Integer(_) | Token::Float(_) | Token::Punctuation(b'-') => {
                let attribute = match self.scalar()? {
                    Scalar::Int(value) => Attribute::Int(value),
                    Scalar::Bits(value) => Attribute::Int(i128::from(value)),
                    Scalar::Float(value) => Attribute::Float(value),
                    Scalar::Bool(value) => Attribute::Bool(value),
                    Scalar::Complex(..) => return Err(self.expected("a number")),
                };
                self.optional_type(typed)?;
                Ok(attribute)
            }
            Token::String(raw) => {
                self.advance()?;
                self.optional_type(typed)?;
                Ok(Attribute::String(unescape(raw)))
            }
            Token::Symbol(_) => Ok(Attribute::Symbol(self.symbol_path()?)),
            Token::Punctuation(b'[') => {
                self.advance()?;
                let mut items = Vec::new();
                while !self.eat(b']')? {
                    items.push(self.attribute(true)?);
                    self.separator(b']')?;
                }
                Ok(Attribute::Array(items))
            }
            Token::Punctuation(b'{') => Ok(Attribute::Dictionary(self.attribute_dictionary()?)),
            Token::Punctuation(b'<') => Ok(Attribute::Opaque(self.balanced()?)),
            Token::Hash(name) => self.dialect_attribute(name),
            Token::Word(word) => self.word_attribute(word),
            Token::Punctuation(b'(') | Token::Bang(_) => Ok(Attribute::Type(self.ty()?)),
            _ => Err(self.expected("an attribute")),
        }
    }

    fn optional_type(&mut self, typed: bool) -> Result<(), ParseError> {
        if typed && self.eat(b':')? {
            self.ty()?;
        }
        Ok(())
    }

    fn word_attribute(&mut self, word: &'a str) -> Result<Attribute<'a>, ParseError> {
        let bracket = self.lexer.byte(self.current.end) == b'<';
        match word {
            "true" | "false" => {
                self.advance()?;
                Ok(Attribute::Bool(word == "true"))
            }
            "unit" => {
                self.advance()?;
                Ok(Attribute::Unit)
            }
            "dense" if bracket => {
                self.advance()?;
                let elements = self.dense_elements()?;
                self.expect(b':', "':' and the type of the literal")?;
                let ty = self.ty()?;
                Ok(Attribute::Dense(Dense { ty, elements }))
            }
            "array" if bracket => {
                self.advance()?;
                self.expect(b'<', "'<'")?;
                self.ty()?;
                let mut items = Vec::new();
                if self.eat(b':')? {
                    while !self.eat(b'>')? {
                        items.push(self.attribute(false)?);
                        self.separator(b'>')?;
                    }
                } else {
                    self.expect(b'>', "':' or '>'")?;
                }
                Ok(Attribute::Array(items))
            }
            "tensor" | "tuple" | "vector" | "memref" | "complex" if bracket => Ok(Attribute::Type(self.ty()?)),
            "loc" if self.lexer.byte(self.current.end) == b'(' => {
                self.location()?;
                Ok(Attribute::Opaque("loc"))
            }
            _ if bracket => {
                let start = self.current.start;
                self.advance()?;
                self.balanced()?;
                if self.eat(b':')? {
                    self.ty()?;
                }
                Ok(Attribute::Opaque(self.lexer.slice(start, self.previous_end)))
            }
            _ => {
                self.advance()?;
                Ok(match is_scalar_type(word) {
                    true => Attribute::Type(Type::Other(word)),
                    false => Attribute::Enum(word),
                })
            }
        }
    }

    /// `#alias`, `#stablehlo<precision DEFAULT>`, `#stablehlo.gather<offset_dims = [0], ...>`, or another dialect's.
    fn dialect_attribute(&mut self, name: &'a str) -> Result<Attribute<'a>, ParseError> {
        let start = self.current.start;
        self.advance()?;
        if !self.at(b'<') {
            let alias = self.attribute_aliases.get(name).filter(|_| !self.in_alias);
            return Ok(alias.cloned().unwrap_or(Attribute::Opaque(name)));
        }
        let bracket = (self.lexer, self.current, self.previous_end, self.depth);
        let known = match name {
            "stablehlo.conv" => self.convolution_dimensions(),
            _ if name.contains('.') => {
                self.advance()?;
                self.attribute_list(b'>', false).map(Attribute::DimensionNumbers)
            }
            _ => self.enum_attribute(),
        };
        match known {
            Ok(attribute) => Ok(attribute),
            // Text of other dialects between the brackets is kept unparsed.
            Err(error) if name != "stablehlo.conv" || matches!(error, ParseError::TooDeep { .. }) => {
                (self.lexer, self.current, self.previous_end, self.depth) = bracket;
                self.balanced()?;
                Ok(Attribute::Opaque(self.lexer.slice(start, self.previous_end)))
            }
            Err(error) => Err(error),
        }
    }

    /// `<precision DEFAULT>`.
    fn enum_attribute(&mut self) -> Result<Attribute<'a>, ParseError> {
        self.expect(b'<', "'<'")?;
        self.word()?;
        let word = self.word()?;
        self.expect(b'>', "'>'")?;
        Ok(Attribute::Enum(word))
    }

    /// `<[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]>` or `<raw input_batch_dimension = 0, ...>`.
    fn convolution_dimensions(&mut self) -> Result<Attribute<'a>, ParseError> {
        self.expect(b'<', "'<'")?;
        if self.eat_word("raw")? {
            return self.attribute_list(b'>', false).map(Attribute::DimensionNumbers);
        }
        let dimensions = self.convolution_labels()?;
        self.expect(b'>', "'>'")?;
        Ok(dimensions)
    }

    /// Parses `[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]` into the fields of the raw form.
    pub(crate) fn convolution_labels(&mut self) -> Result<Attribute<'a>, ParseError> {
        let mut fields = Vec::new();
        self.labels(
            &mut fields,
            ["b", "f"],
            "input_batch_dimension",
            "input_feature_dimension",
            "input_spatial_dimensions",
        )?;
        if !self.eat_word("x")? {
            return Err(self.expected("'x'"));
        }
        self.labels(
            &mut fields,
            ["i", "o"],
            "kernel_input_feature_dimension",
            "kernel_output_feature_dimension",
            "kernel_spatial_dimensions",
        )?;
        self.expect_arrow()?;
        self.labels(
            &mut fields,
            ["b", "f"],
            "output_batch_dimension",
            "output_feature_dimension",
            "output_spatial_dimensions",
        )?;
        Ok(Attribute::DimensionNumbers(fields))
    }

    fn labels(
        &mut self,
        fields: &mut Attributes<'a>,
        letters: [&str; 2],
        first: &'static str,
        second: &'static str,
        spatial: &'static str,
    ) -> Result<(), ParseError> {
        self.expect(b'[', "'['")?;
        let mut found = [None, None];
        // Pairs of label and position: label n is the n-th spatial dimension.
        let mut positions: Vec<(i128, i128)> = Vec::new();
        let mut position = 0;
        while !self.eat(b']')? {
            match self.current.token {
                Token::Word(word) if word == letters[0] && found[0].is_none() => found[0] = Some(position),
                Token::Word(word) if word == letters[1] && found[1].is_none() => found[1] = Some(position),
                Token::Integer(digits) => positions.push((self.integer(digits)?, position)),
                // An unknown dimension has no role. The op parses, but does not convert.
                Token::Punctuation(b'?') => {}
                _ => return Err(self.expected("a dimension label")),
            }
            self.advance()?;
            position += 1;
            self.separator(b']')?;
        }
        let ([Some(a), Some(b)], true) = (found, position <= 64) else {
            return Err(self.expected("a label for each of the dimensions before this"));
        };
        positions.sort_unstable();
        let spatial_dims = positions.iter().map(|(_, position)| Attribute::Int(*position)).collect();
        fields.push((first.into(), Attribute::Int(a)));
        fields.push((second.into(), Attribute::Int(b)));
        fields.push((spatial.into(), Attribute::Array(spatial_dims)));
        Ok(())
    }

    /// `<...>` of a dense literal.
    fn dense_elements(&mut self) -> Result<Elements<'a>, ParseError> {
        self.expect(b'<', "'<'")?;
        let elements = match self.current.token {
            Token::Punctuation(b'[') => self.dense_list()?,
            // `dense<>` is the literal of a tensor without elements.
            Token::Punctuation(b'>') => Elements::List { shape: vec![0], values: Vec::new() },
            Token::String(raw) => {
                let Some(digits) = raw.strip_prefix("0x") else {
                    return Err(self.expected("a string of hexadecimal digits"));
                };
                if digits.len() % 2 == 1 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                    return Err(self.expected("a string of hexadecimal digits"));
                }
                self.advance()?;
                Elements::Hex(digits)
            }
            _ => Elements::Splat(self.scalar()?),
        };
        self.expect(b'>', "'>'")?;
        Ok(elements)
    }

    fn dense_list(&mut self) -> Result<Elements<'a>, ParseError> {
        let mut values = Vec::new();
        // The length of each level once one of its lists has ended, and the lengths of the lists now open.
        let mut shape: Vec<Option<u64>> = Vec::new();
        let mut open: Vec<u64> = Vec::new();
        // The innermost level, the only one that may hold scalars.
        let mut innermost = None;
        loop {
            if self.at(b'[') {
                self.enter()?;
                self.advance()?;
                open.push(0);
                if shape.len() < open.len() {
                    shape.push(None);
                }
            } else if !self.at(b']') {
                let place = self.current.place;
                values.push(self.scalar()?);
                if *innermost.get_or_insert(open.len()) != open.len() {
                    return Err(ParseError::RaggedLiteral { place });
                }
                self.count_item(&mut open);
            }
            // Close all lists that end here, up to a comma.
            let mut after_item = !matches!(open.last(), Some(0));
            loop {
                if self.at(b']') {
                    let place = self.current.place;
                    self.advance()?;
                    self.leave();
                    let length = open.pop().unwrap_or(0);
                    match &mut shape[open.len()] {
                        Some(known) if *known != length => {
                            return Err(ParseError::RaggedLiteral { place });
                        }
                        known => *known = Some(length),
                    }
                    if open.is_empty() {
                        let shape = shape.into_iter().map(|length| length.unwrap_or(0)).collect();
                        return Ok(Elements::List { shape, values });
                    }
                    self.count_item(&mut open);
                    after_item = true;
                } else if after_item {
                    self.expect(b',', "',' or ']'")?;
                    break;
                } else {
                    break;
                }
            }
        }
    }

    fn count_item(&self, open: &mut [u64]) {
        if let Some(count) = open.last_mut() {
            *count += 1;
        }
    }

    /// One element of a literal.
    fn scalar(&mut self) -> Result<Scalar, ParseError> {
        if self.eat(b'(')? {
            let real = self.real()?;
            self.expect(b',', "','")?;
            let imaginary = self.real()?;
            self.expect(b')', "')'")?;
            return Ok(Scalar::Complex(real, imaginary));
        }
        match self.current.token {
            Token::Word(word @ ("true" | "false")) => {
                self.advance()?;
                Ok(Scalar::Bool(word == "true"))
            }
            _ => self.number(),
        }
    }

    fn number(&mut self) -> Result<Scalar, ParseError> {
        let negative = self.eat(b'-')?;
        let scalar = match self.current.token {
            Token::Integer(digits) => {
                let value = self.integer(digits)?;
                match digits.starts_with("0x") && !negative {
                    true => Scalar::Bits(u64::try_from(value).unwrap_or(u64::MAX)),
                    false => Scalar::Int(if negative { -value } else { value }),
                }
            }
            Token::Float(digits) => {
                let value: f64 = digits.parse().map_err(|_| self.expected("a number"))?;
                if value.is_infinite() {
                    return Err(ParseError::NumberTooLarge { place: self.current.place });
                }
                Scalar::Float(if negative { -value } else { value })
            }
            _ => return Err(self.expected("a number")),
        };
        self.advance()?;
        Ok(scalar)
    }

    fn real(&mut self) -> Result<f64, ParseError> {
        match self.number()? {
            Scalar::Float(value) => Ok(value),
            #[expect(clippy::cast_precision_loss, reason = "complex values are never used")]
            other => Ok(other.as_int().unwrap_or(0) as f64),
        }
    }

    /// The value of `digits`, the text of the current token; at most 64 bits.
    pub(crate) fn integer(&self, digits: &str) -> Result<i128, ParseError> {
        let value = match digits.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => digits.parse::<u64>(),
        };
        match value {
            Ok(value) => Ok(i128::from(value)),
            Err(_) => Err(ParseError::NumberTooLarge { place: self.current.place }),
        }
    }

    pub(crate) fn ty(&mut self) -> Result<Type<'a>, ParseError> {
        self.enter()?;
        let ty = self.type_inside()?;
        self.leave();
        Ok(ty)
    }

    fn type_inside(&mut self) -> Result<Type<'a>, ParseError> {
        let start = self.current.start;
        match self.current.token {
            Token::Word("tensor") if self.lexer.byte(self.current.end) == b'<' => self.tensor_type(),
            Token::Word("tuple") if self.lexer.byte(self.current.end) == b'<' => {
                self.advance()?;
                self.advance()?;
                let mut items = Vec::new();
                while !self.eat(b'>')? {
                    items.push(self.ty()?);
                    self.separator(b'>')?;
                }
                Ok(Type::Tuple(items))
            }
            Token::Punctuation(b'(') => {
                let (operands, results) = self.function_type()?;
                Ok(Type::Function(operands, results))
            }
            Token::Bang(name) if self.type_aliases.contains_key(name) && !self.in_alias => {
                self.advance()?;
                Ok(self.type_aliases.get(name).cloned().unwrap_or(Type::Other(name)))
            }
            Token::Word(_) | Token::Bang(_) => {
                self.advance()?;
                if self.at(b'<') && self.current.start == self.previous_end {
                    self.balanced()?;
                }
                Ok(Type::Other(self.lexer.slice(start, self.previous_end)))
            }
            _ => Err(self.expected("a type")),
        }
    }

    /// `(operands) -> results`.
    pub(crate) fn function_type(&mut self) -> Result<(Vec<Type<'a>>, Vec<Type<'a>>), ParseError> {
        let operands = self.type_list()?;
        self.expect_arrow()?;
        let results = self.result_types()?;
        Ok((operands, results))
    }

    /// One type, or several in parentheses.
    pub(crate) fn result_types(&mut self) -> Result<Vec<Type<'a>>, ParseError> {
        match self.at(b'(') {
            true => self.type_list(),
            false => Ok(vec![self.ty()?]),
        }
    }

    fn type_list(&mut self) -> Result<Vec<Type<'a>>, ParseError> {
        self.expect(b'(', "'('")?;
        let mut types = Vec::new();
        while !self.eat(b')')? {
            types.push(self.ty()?);
            self.separator(b')')?;
        }
        Ok(types)
    }

    fn tensor_type(&mut self) -> Result<Type<'a>, ParseError> {
        self.advance()?;
        if !self.at(b'<') {
            return Err(self.expected("'<'"));
        }
        // Dimensions and the `x` between them are not tokens. They are read byte by byte, from after the '<'.
        let mut position = self.current.end;
        let mut dims = Vec::new();
        let mut ranked = true;
        loop {
            let end = position + self.lexer.digits(position);
            if end > position && self.lexer.byte(end) == b'x' {
                let Ok(dim) = self.lexer.slice(position, end).parse::<u64>() else {
                    return Err(ParseError::NumberTooLarge { place: self.lexer.place(position) });
                };
                dims.push(Some(dim));
                position = end + 1;
            } else if self.lexer.byte(position) == b'?' && self.lexer.byte(position + 1) == b'x' {
                dims.push(None);
                position += 2;
            } else if self.lexer.byte(position) == b'*' && self.lexer.byte(position + 1) == b'x' {
                ranked = false;
                position += 2;
            } else {
                break;
            }
        }
        self.lexer.seek(position);
        self.advance()?;
        let start = self.current.start;
        self.ty()?;
        let element = self.lexer.slice(start, self.previous_end);
        let mut encoding = None;
        if self.eat(b',')? {
            let start = self.current.start;
            self.attribute(true)?;
            encoding = Some(self.lexer.slice(start, self.previous_end));
        }
        self.expect(b'>', "'>'")?;
        Ok(Type::Tensor(TensorType { dims, ranked, element, encoding }))
    }

    /// Parses `loc(...)` if it comes next.
    pub(crate) fn optional_location(&mut self) -> Result<Option<LocationId>, ParseError> {
        match self.current.token {
            Token::Word("loc") => self.location().map(Some),
            _ => Ok(None),
        }
    }

    pub(crate) fn location(&mut self) -> Result<LocationId, ParseError> {
        self.advance()?;
        self.expect(b'(', "'('")?;
        let location = self.location_body()?;
        self.expect(b')', "')'")?;
        Ok(location)
    }

    fn location_body(&mut self) -> Result<LocationId, ParseError> {
        self.enter()?;
        let node = match self.current.token {
            Token::Hash(alias) => {
                self.advance()?;
                if self.at(b'<') {
                    self.balanced()?;
                }
                LocationNode::Alias(alias)
            }
            Token::Word("loc") => {
                let inner = self.location()?;
                LocationNode::First(vec![inner])
            }
            Token::String(raw) => self.named_location(raw)?,
            Token::Word("callsite") => {
                self.advance()?;
                self.expect(b'(', "'('")?;
                let callee = self.location_body()?;
                if !self.eat_word("at")? {
                    return Err(self.expected("'at'"));
                }
                self.location_body()?;
                self.expect(b')', "')'")?;
                LocationNode::First(vec![callee])
            }
            Token::Word("fused") => {
                self.advance()?;
                if self.at(b'<') {
                    self.balanced()?;
                }
                self.expect(b'[', "'['")?;
                let mut parts = Vec::new();
                while !self.eat(b']')? {
                    parts.push(self.location_body()?);
                    self.separator(b']')?;
                }
                LocationNode::First(parts)
            }
            Token::Word("unknown") => {
                self.advance()?;
                LocationNode::Unknown
            }
            _ => return Err(self.expected("a location")),
        };
        self.leave();
        self.add_location(node)
    }

    fn add_location(&mut self, node: LocationNode<'a>) -> Result<LocationId, ParseError> {
        let Ok(id) = u32::try_from(self.locations.len()) else {
            return Err(ParseError::NumberTooLarge { place: self.current.place });
        };
        self.locations.push(node);
        Ok(LocationId(id))
    }

    /// `"name"`, `"name"(child)` or `"file":line:column` with an optional ` to line:column`.
    fn named_location(&mut self, raw: &'a str) -> Result<LocationNode<'a>, ParseError> {
        self.advance()?;
        let name = unescape(raw);
        if self.eat(b'(')? {
            let child = self.location_body()?;
            self.expect(b')', "')'")?;
            return Ok(LocationNode::Name(name, Some(child)));
        }
        if !self.eat(b':')? {
            return Ok(LocationNode::Name(name, None));
        }
        let line = self.digits()?;
        self.expect(b':', "':'")?;
        let column = self.digits()?;
        if self.eat_word("to")? {
            if !self.at(b':') {
                self.digits()?;
            }
            self.expect(b':', "':'")?;
            self.digits()?;
        }
        Ok(LocationNode::File(name, line, column))
    }

    fn digits(&mut self) -> Result<&'a str, ParseError> {
        match self.current.token {
            Token::Integer(digits) => {
                self.advance()?;
                Ok(digits)
            }
            _ => Err(self.expected("a number")),
        }
    }

    /// The name of each location, with aliases resolved.
    pub(crate) fn location_names(&self) -> Vec<Option<Cow<'a, str>>> {
        let mut names = vec![None; self.locations.len()];
        let mut done = vec![false; self.locations.len()];
        for index in 0..self.locations.len() {
            self.name_location(index, 0, &mut names, &mut done);
        }
        names
    }

    /// Follows references by recursion, since a location may come before or after those it refers to. Chains are
    /// short and a cycle has no name, so a depth limit and a mark suffice.
    fn name_location(&self, index: usize, depth: u32, names: &mut [Option<Cow<'a, str>>], done: &mut [bool]) {
        if depth > super::lexer::MAX_DEPTH || done[index] {
            return;
        }
        done[index] = true;
        let mut follow = |id: &LocationId| {
            let index = usize::try_from(id.0).unwrap_or(usize::MAX);
            self.name_location(index, depth + 1, names, done);
            names[index].clone()
        };
        let name = match &self.locations[index] {
            LocationNode::Unknown => None,
            // JAX wraps an op that it lowers to several as `"reduce:"(...)`. The name inside is more specific.
            LocationNode::Name(name, Some(child)) => match name.strip_suffix(':') {
                Some(short) => follow(child).or_else(|| Some(short.to_owned().into())),
                None => Some(name.clone()),
            },
            LocationNode::Name(name, None) => Some(name.clone()),
            LocationNode::File(file, line, column) => Some(format!("{file}:{line}:{column}").into()),
            LocationNode::First(parts) => parts.iter().find_map(follow),
            LocationNode::Alias(alias) => self.location_aliases.get(alias).and_then(follow),
        };
        names[index] = name.filter(|name| !name.is_empty());
    }
}

/// True if a bare word is a type. Other bare words are enum values.
fn is_scalar_type(word: &str) -> bool {
    if matches!(word, "index" | "none" | "bf16" | "tf32") {
        return true;
    }
    let digits = word.trim_start_matches(|c: char| c.is_ascii_lowercase());
    let prefix = &word[..word.len() - digits.len()];
    matches!(prefix, "i" | "si" | "ui" | "f") && digits.starts_with(|c: char| c.is_ascii_digit())
}

/// Replaces the escapes `\"`, `\\`, `\n`, `\t`, and `\` followed by two hexadecimal digits.
pub(super) fn unescape(raw: &str) -> Cow<'_, str> {
    if !raw.contains('\\') {
        return Cow::Borrowed(raw);
    }
    let mut bytes = Vec::with_capacity(raw.len());
    let mut rest = raw.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'\\' {
            bytes.push(*first);
            continue;
        }
        let hex = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        match tail {
            [high, low, after @ ..] if hex(high).is_some() && hex(low).is_some() => {
                bytes.push(hex(high).unwrap_or(0) * 16 + hex(low).unwrap_or(0));
                rest = after;
            }
            [b'n', after @ ..] => {
                bytes.push(b'\n');
                rest = after;
            }
            [b't', after @ ..] => {
                bytes.push(b'\t');
                rest = after;
            }
            [other, after @ ..] => {
                bytes.push(*other);
                rest = after;
            }
            [] => {}
        }
    }
    Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
}
