//! Reads requested splits of values over devices: Shardy's annotations, and the older ones of `mhlo`.
//!
//! They become pins of the graph. Annotations without effect, such as a mesh of one device or a value without
//! an axis, are dropped.

use super::control::regions;
use super::convert::{Converter, Scope};
use super::lower::{Lowered, exactly};
use super::report::Reject;
use super::syntax::{Attribute, Attributes, Operation};
use altiplano_ir::graph::{Pin, PinnedDim, ValueId};

const SEVERAL_DEVICES: Reject =
    Reject::Unsupported("written for several devices; a plan starts from the program of one");

impl<'t, 'a> Converter<'t, 'a> {
    /// Lowers ops of Shardy's dialect.
    pub fn sharding(&mut self, operation: &'t Operation<'a>, operands: &[ValueId], scope: &Scope<'_, 't>) -> Lowered {
        match operation.name {
            "sharding_constraint" | "reshard" => {
                let [x] = exactly(operands)?;
                let text = match operation.attribute("sharding") {
                    Some(Attribute::Opaque(text)) => *text,
                    _ => return Err(super::lower::attribute("sharding")),
                };
                self.pin(x, text);
                Ok(vec![x])
            }
            // These ops are hints on how far annotations propagate.
            "propagation_barrier" => Ok(operands.to_vec()),
            "sharding_group" => Ok(Vec::new()),
            "named_computation" => {
                let [region] = regions(operation)?;
                Ok(self.region(operation, region, operands.to_vec(), operation.result_types.len(), scope)?)
            }
            "manual_computation" if self.ranks.is_some() => self.manual_computation(operation, operands, scope),
            "manual_computation" => {
                let [region] = regions(operation)?;
                let axes = match operation.attribute("manual_axes") {
                    Some(Attribute::Dictionary(axes)) => axes.len(),
                    Some(Attribute::Opaque(text)) => text.matches('"').count(),
                    _ => 0,
                };
                if axes > 0 {
                    return Err(SEVERAL_DEVICES);
                }
                Ok(self.region(operation, region, operands.to_vec(), operation.result_types.len(), scope)?)
            }
            "all_gather" | "all_reduce" | "all_slice" | "all_to_all" | "collective_permute" | "reduce_scatter" => {
                Err(SEVERAL_DEVICES)
            }
            _ => Err(Reject::Unsupported("")),
        }
    }

    /// Lowers `custom_call @Sharding` with an attribute `mhlo.sharding`.
    pub(crate) fn sharding_call(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [x] = exactly(operands)?;
        self.note_tiling(operation, x);
        self.pin_named(x, &operation.attributes);
        Ok(vec![x])
    }

    /// Adds pins from the annotations among the attributes of an argument or a result.
    pub(crate) fn pin_named(&mut self, value: ValueId, attributes: &Attributes<'_>) {
        for (name, attribute) in attributes {
            match (&**name, attribute) {
                ("sdy.sharding", Attribute::Opaque(text)) => self.pin(value, text),
                ("mhlo.sharding", Attribute::String(text)) => {
                    let rank = self.graph.ty(value).rank();
                    self.pins.extend(tiles(value, rank, text));
                }
                _ => {}
            }
        }
    }

    fn pin(&mut self, value: ValueId, text: &str) {
        let rank = self.graph.ty(value).rank();
        if let Some((mesh, dims)) = shardy(text)
            && dims.len() == rank
        {
            let named = self.module.meshes.iter().find(|known| known.0 == mesh);
            let axes = match mesh.starts_with('[') {
                true => axes_of(mesh),
                false => named.map(|(_, text)| axes_of(text)).unwrap_or_default(),
            };
            let used = dims.iter().flat_map(|dim| &dim.axes);
            let is_split = |axis: &String| axes.iter().any(|(name, size)| name == axis && *size > 1);
            if used.clone().next().is_some()
                && used.clone().all(|axis| axes.iter().any(|(name, _)| name == axis))
                && used.clone().any(is_split)
            {
                self.pins.push(Pin { value, mesh: axes, dims });
            }
        }
    }
}

/// Parses `["x"=2, "y"=4]` inside the text of a mesh.
pub(super) fn axes_of(text: &str) -> Vec<(String, u64)> {
    let list = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(list, _)| list);
    let axis = |item: &str| {
        let (name, size) = item.split_once('=')?;
        Some((name.trim().trim_matches('"').to_owned(), size.trim().parse().ok()?))
    };
    list.split(',').filter_map(axis).collect()
}

/// Parses `<@mesh, [{"x", "y"}, {?}], replicated={...}>` into the dimensions and the mesh's name, or its axes
/// if they are written out. A pin cannot express a part of an axis (`"x":(1)2`), so such a text gives `None`.
pub(super) fn shardy(text: &str) -> Option<(&str, Vec<PinnedDim>)> {
    let inside = &text[text.find('<')? + 1..];
    let (mesh, rest) = match inside.trim_start().strip_prefix('@') {
        Some(rest) => {
            let (name, rest) = rest.split_once(',')?;
            (name.trim().trim_matches('"'), rest)
        }
        None => {
            let rest = inside.trim_start().strip_prefix("mesh")?;
            let end = rest.find('>')?;
            let axes = rest[..end].trim_start_matches('<');
            (axes, &rest[end + 1..])
        }
    };
    let mut rest = rest[rest.find('[')? + 1..].trim_start();
    let mut dims = Vec::new();
    while let Some(body) = rest.strip_prefix('{') {
        let (items, after) = body.split_once('}')?;
        let mut dim = PinnedDim::default();
        for item in items.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            match item.strip_prefix('"').and_then(|item| item.strip_suffix('"')) {
                Some(axis) => dim.axes.push(axis.to_owned()),
                None if item == "?" => dim.open = true,
                None => return None,
            }
        }
        dims.push(dim);
        // Skips a priority, which orders Shardy's own propagation.
        rest = after.trim_start_matches(|c: char| c == 'p' || c.is_ascii_digit()).trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
    }
    rest.starts_with(']').then_some((mesh, dims))
}

/// Parses `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`, which gives the number of parts per dimension. Axes
/// have no names there, so dimensions with equal numbers of parts share one.
fn tiles(value: ValueId, rank: usize, text: &str) -> Option<Pin> {
    let list = text.split_once("devices=[")?.1.split_once(']')?.0;
    let parts: Option<Vec<u64>> = list.split(',').map(|part| part.trim().parse().ok()).collect();
    let parts = parts.filter(|parts| parts.len() >= rank)?;
    let mut pin = Pin { value, mesh: Vec::new(), dims: Vec::new() };
    for &part in &parts[..rank] {
        let mut dim = PinnedDim::default();
        if part > 1 {
            let mut name = format!("devices{part}");
            while pin.mesh.iter().any(|(known, _)| *known == name) {
                name.push('_');
            }
            pin.mesh.push((name.clone(), part));
            dim.axes.push(name);
        }
        pin.dims.push(dim);
    }
    (!pin.mesh.is_empty()).then_some(pin)
}
