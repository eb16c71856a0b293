//! Resolves sizes that a module leaves open: the `?` of its arguments, as `jax.export` writes symbolic shapes.
//!
//! Such a module has a function whose first arguments are the symbols, and a wrapper that reads them from the
//! shapes of its own arguments. Symbols and arguments are named as in the inner function. All other sizes
//! follow during conversion, since the sizes of the arguments are numbers by then.

use std::collections::BTreeMap;

use super::report::ImportError;
use super::syntax::{Attribute, Function, Module, Operation, Type, find};
use crate::OpenSize;

/// Names of the entry's arguments, and the open sizes.
pub(super) struct Opened {
    pub names: Vec<Option<String>>,
    /// Sizes by argument and dimension.
    pub sizes: BTreeMap<(usize, usize), u64>,
    pub open: Vec<OpenSize>,
}

/// The smallest size that cannot be mistaken for a broadcast dimension.
const LEAST: u64 = 2;

pub(super) fn open(module: &Module<'_>, main: &Function<'_>, said: &[(String, u64)]) -> Result<Opened, ImportError> {
    let position = |name: &str| main.arguments.iter().position(|argument| argument.name == name);
    let calls = || main.operations.iter().filter_map(|operation| Some((operation, called(module, operation)?)));
    let mut names: Vec<Option<String>> =
        main.arguments.iter().map(|a| module.location_name(a.location).map(str::to_owned)).collect();
    for (operation, inner) in calls() {
        for (operand, argument) in operation.operands.iter().zip(&inner.arguments) {
            let name = module.location_name(argument.location);
            if let (Some(at), Some(name)) = (position(operand.name), name) {
                names[at].get_or_insert_with(|| name.to_owned());
            }
        }
    }
    // A call passes `%0 = get_dimension_size %arg10, dim = 0` to the argument that is the symbol.
    let mut symbols: BTreeMap<(usize, usize), String> = BTreeMap::new();
    for (operation, inner) in calls() {
        for (operand, argument) in operation.operands.iter().zip(&inner.arguments) {
            let symbol = find(&argument.attributes, "jax.global_constant").and_then(Attribute::as_word);
            let size = main.operations.iter().find(|size| {
                size.name == "get_dimension_size" && size.results.first().is_some_and(|r| r.name == operand.name)
            });
            let of = size.and_then(|size| {
                let dim = size.attribute("dimension").and_then(Attribute::ints)?;
                Some((position(size.operands.first()?.name)?, usize::try_from(*dim.first()?).ok()?))
            });
            if let (Some(symbol), Some(of)) = (symbol, of) {
                symbols.insert(of, symbol.to_owned());
            }
        }
    }
    let known: std::collections::BTreeSet<String> = symbols.values().cloned().collect();
    let only = known.first().filter(|_| known.len() == 1);
    let mut open: Vec<OpenSize> = Vec::new();
    let mut places: Vec<((usize, usize), usize)> = Vec::new();
    for (index, argument) in main.arguments.iter().enumerate() {
        let Type::Tensor(ty) = &argument.ty else { continue };
        let leaf = names[index].clone().unwrap_or_else(|| format!("arg{index}"));
        for (dim, _) in ty.dims.iter().enumerate().filter(|(_, size)| size.is_none()) {
            // If there is only one symbol, any open size is that symbol.
            let symbol = symbols.get(&(index, dim)).or(only).cloned().unwrap_or_else(|| format!("{leaf}.{dim}"));
            let at = open.iter().position(|size| size.symbol == symbol).unwrap_or(open.len());
            if at == open.len() {
                let (least, most) = (Some(1), None);
                open.push(OpenSize { symbol, value: LEAST, dims: Vec::new(), chosen: true, least, most });
            }
            open[at].dims.push((leaf.clone(), dim));
            places.push(((index, dim), at));
        }
    }
    for (name, value) in said {
        let meant = open.iter_mut().find(|size| size.is_called(name));
        let Some(size) = meant else {
            let known = open.iter().map(OpenSize::to_string).collect();
            return Err(ImportError::UnknownSize { name: name.as_str().into(), known });
        };
        (size.value, size.chosen) = (*value, false);
    }
    let sizes = places.into_iter().map(|(place, at)| (place, open[at].value)).collect();
    Ok(Opened { names, sizes, open })
}

/// The function that an op calls.
fn called<'m, 'a>(module: &'m Module<'a>, operation: &Operation<'_>) -> Option<&'m Function<'a>> {
    let callee = (operation.name == "call").then(|| operation.attribute("callee"))??;
    module.function(callee.as_word()?)
}
