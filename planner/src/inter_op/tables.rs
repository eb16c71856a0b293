//! What the layers of a model cost on one mesh, each kind and each part of a layer solved once, or remembered.

use crate::cache::Digest;
use crate::intra_op::layer::{Boundary, BoundaryRecord, LayerTable, Variant, solve_layer};
use crate::intra_op::space::Spaces;
use crate::model::Layered;
use crate::request::Request;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What all layer kinds cost on one mesh.
pub fn boundaries(
    layered: &Layered,
    request: &Request,
    spaces: &mut Spaces<'_>,
    variant: Variant,
) -> Option<Vec<Rc<Boundary>>> {
    let model = layered.model(request.trains().then_some(&request.optimizer));
    let cache = request.cache.as_deref();
    let of_mesh = cache.and_then(|_| spaces.prices.identity());
    let mut known: BTreeMap<(usize, bool), Option<Rc<Boundary>>> = BTreeMap::new();
    let mut of_layer = |&l: &usize| {
        let units = layered.units_of(l);
        let whole = units.len() == 1;
        let mut parts = Vec::with_capacity(units.len());
        for unit in units {
            let key = || {
                let of_layer = Digest::new("layer").shown((of_mesh?, layered.content(unit.kind, whole)?));
                of_layer.shown((spaces.roles, variant, model.optimizer)).key()
            };
            let kept = cache.zip(key());
            let find = || {
                if let Some(record) = kept.and_then(|(cache, key)| cache.get::<Option<BoundaryRecord>>(key)) {
                    return record.map(|record| Rc::new(Boundary::read(record, spaces)));
                }
                let found = solve_layer(&model, unit.range.clone(), spaces, variant).ok().map(|table| table.boundary);
                if let Some((cache, key)) = kept {
                    cache.keep(key, &found.as_ref().map(|found| found.written(spaces)));
                }
                found
            };
            parts.push(known.entry((unit.kind, whole)).or_insert_with(find).clone()?);
        }
        if whole { parts.pop() } else { Boundary::joined(&parts).map(Rc::new) }
    };
    layered.representatives.iter().map(&mut of_layer).collect()
}

/// Tables of the parts of layers, by kind and whether they are whole layers.
pub type Tables = BTreeMap<(usize, bool), Option<Rc<LayerTable>>>;

/// The table of layer `l`, put together from those of its parts where it has some. `known` are those of the same mesh and variant.
pub fn layer_table(
    layered: &Layered,
    request: &Request,
    spaces: &mut Spaces<'_>,
    variant: Variant,
    l: usize,
    known: &mut Tables,
) -> Option<Rc<LayerTable>> {
    let model = layered.model(request.trains().then_some(&request.optimizer));
    let units = layered.units_of(l);
    let whole = units.len() == 1;
    let mut parts = Vec::with_capacity(units.len());
    for unit in units {
        let solve = || solve_layer(&model, unit.range, spaces, variant).ok().map(Rc::new);
        parts.push(known.entry((unit.kind, whole)).or_insert_with(solve).clone()?);
    }
    if whole { parts.pop() } else { LayerTable::joined(parts).map(Rc::new) }
}
