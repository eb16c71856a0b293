//! Costs of a model's layers on one mesh. Each kind and each part of a layer is solved once, or read from the cache.

use crate::cache::Digest;
use crate::intra_op::ilp::Model;
use crate::intra_op::layer::{Boundary, BoundaryRecord, LayerTable, Variant, solve_layer};
use crate::intra_op::space::Spaces;
use crate::layers::graph::{LayeredGraph, Unit};
use crate::request::Request;
use crate::timings::{Phase, timed};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Results for parts of layers on one mesh and variant, by kind and by whether the part is a whole layer; `None` if no
/// strategy runs it.
pub type Known<T> = BTreeMap<(usize, bool), Option<Rc<T>>>;

fn model<'a>(layered: &'a LayeredGraph, request: &'a Request) -> Model<'a> {
    let offload = request.offload.unwrap_or_default();
    Model { offload, ..layered.model(request.trains().then_some(&request.training.optimizer)) }
}

/// Returns the costs of all layer kinds on one mesh.
pub fn boundaries(
    layered: &LayeredGraph,
    request: &Request,
    spaces: &mut Spaces<'_>,
    variant: Variant,
) -> Option<Vec<Rc<Boundary>>> {
    let model = model(layered, request);
    let cache = request.cache.as_deref();
    let of_mesh = cache.and_then(|_| spaces.prices.identity());
    let mut solve = |unit: &Unit<'_>, whole: bool| {
        let key = || {
            let of_layer = Digest::new("layer").shown((of_mesh?, layered.content(unit.kind, whole)?));
            of_layer.shown((spaces.roles, variant, model.optimizer, model.offload)).key()
        };
        let kept = cache.zip(key());
        if let Some(record) = kept.and_then(|(cache, key)| cache.get::<Option<BoundaryRecord>>(key)) {
            return record.map(|record| Rc::new(Boundary::read(record, spaces)));
        }
        let solve = || solve_layer(&model, unit.range.clone(), spaces, variant);
        let found = timed(Phase::Tables, solve).ok().map(|table| table.boundary);
        if let Some((cache, key)) = kept {
            cache.keep(key, &found.as_ref().map(|found| found.written(spaces)));
        }
        found
    };
    let mut known = Known::default();
    let layers = layered.representatives.iter();
    layers.map(|&l| put_together(layered, l, &mut known, &mut solve, |parts| Boundary::joined(&parts))).collect()
}

/// Returns the table of layer `l`. `known` holds those of the same mesh and variant.
pub fn layer_table(
    layered: &LayeredGraph,
    request: &Request,
    spaces: &mut Spaces<'_>,
    variant: Variant,
    l: usize,
    known: &mut Known<LayerTable>,
) -> Option<Rc<LayerTable>> {
    let model = model(layered, request);
    let mut solve = |unit: &Unit<'_>, _| {
        timed(Phase::Tables, || solve_layer(&model, unit.range.clone(), spaces, variant)).ok().map(Rc::new)
    };
    put_together(layered, l, known, &mut solve, LayerTable::joined)
}

/// Returns the result for layer `l`. If the layer has parts, each is solved once and the results are joined.
fn put_together<T>(
    layered: &LayeredGraph,
    l: usize,
    known: &mut Known<T>,
    solve: &mut impl FnMut(&Unit<'_>, bool) -> Option<Rc<T>>,
    join: impl FnOnce(Vec<Rc<T>>) -> Option<T>,
) -> Option<Rc<T>> {
    let units = layered.units_of(l);
    let whole = units.len() == 1;
    let mut parts = Vec::with_capacity(units.len());
    for unit in units {
        parts.push(known.entry((unit.kind, whole)).or_insert_with(|| solve(&unit, whole)).clone()?);
    }
    if whole { parts.pop() } else { join(parts).map(Rc::new) }
}
