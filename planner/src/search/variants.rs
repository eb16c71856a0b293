//! Variants of a request that may have a better plan: other graphs of the same model, one group of devices alone, and
//! data in host memory. Each is searched like the request itself, and predictions decide.

use super::context::SearchContext;
use super::outcome::{Outcome, search_graph};
use super::space::SearchSpace;
use crate::features::padding::with_padding;
use crate::features::{chunked_loss, offload, rings};
use crate::layers::cache::LayeredAtBatch;
use crate::request::Request;
use altiplano_ir::padding::Padding;
use std::borrow::Cow;

/// A form of the request's model.
struct Variant<'a> {
    request: Cow<'a, Request>,
    /// The original model, to which plans of this form are brought back.
    padding: Option<&'a Padding>,
}

impl<'a> Variant<'a> {
    /// The same form with another graph.
    fn with_graph(&self, request: Request) -> Variant<'a> {
        Variant { request: Cow::Owned(request), padding: self.padding }
    }

    fn search(&self, cx: &SearchContext<'_>) -> Outcome {
        let layered = LayeredAtBatch::new(&self.request);
        let outcome = search_graph(&SearchContext { request: &self.request, layered: &layered, ..*cx });
        match self.padding {
            Some(padding) => Outcome { plan: outcome.plan.map(|plan| with_padding(plan, padding)), ..outcome },
            None => outcome,
        }
    }
}

/// Searches a request and its variants, and the same with data in host memory where that is worth trying.
pub fn search_with_offloading(cx: &SearchContext<'_>, padded: &[(Request, Padding)]) -> Outcome {
    let mut best = search(cx, padded);
    let mut tried: Vec<Outcome> = Vec::new();
    for what in offload::worth_trying(cx.request, &best.plan) {
        if cx.progress.stopped() {
            break;
        }
        let request = Request { offload: Some(what), baselines: false, ..cx.request.clone() };
        let mut offloaded = search(&SearchContext { request: &request, ..*cx }, padded);
        offloaded.plan = offloaded.plan.and_then(|plan| offload::only_where_needed(plan, cx.costs));
        tried.push(offloaded);
    }
    if !tried.is_empty() {
        let offloaded = Outcome::best(tried);
        if best.plan.is_err() || offloaded.step_s() < best.step_s() {
            (best.plan, best.others) = (offloaded.plan, offloaded.others);
        }
    }
    best
}

/// Searches a request, other graphs of its model, and each group of its cluster alone.
fn search(cx: &SearchContext<'_>, padded: &[(Request, Padding)]) -> Outcome {
    let mut tried = vec![search_graph(cx)];
    let mut forms = vec![Variant { request: Cow::Borrowed(cx.request), padding: None }];
    for (larger, padding) in padded {
        if cx.progress.stopped() {
            break;
        }
        let larger = Request { offload: cx.request.offload, ..larger.clone() };
        forms.push(Variant { request: Cow::Owned(larger), padding: Some(padding) });
        tried.extend(forms.last().map(|form| form.search(cx)));
    }
    // Try ring attention with the better of the graphs so far, all of which gather keys and values.
    let gathered = fastest(&tried);
    let mut ringed = None;
    if !cx.progress.stopped()
        && let Some(request) = rings::variant(&forms[gathered].request, &tried[gathered].plan, cx.costs)
    {
        ringed = Some(forms.len());
        forms.push(forms[gathered].with_graph(request));
        tried.extend(forms.last().map(|form| form.search(cx)));
    }
    // Try logits in chunks with the better of gathered and ringed attention; if all fail, with both.
    let better = fastest(&tried);
    let fails = tried.iter().all(|outcome| outcome.plan.is_err());
    let whole = [Some(gathered), ringed].into_iter().flatten().filter(|&at| fails || at == better);
    let chunked: Vec<Variant<'_>> = whole
        .filter_map(|at| Some(forms[at].with_graph(chunked_loss::variant(&forms[at].request, &tried[at].plan)?)))
        .collect();
    for form in chunked {
        if cx.progress.stopped() {
            break;
        }
        tried.push(form.search(cx));
    }
    // The search only estimates transfers between groups, so compare plans on several groups with plans on each group
    // alone.
    let several = cx.request.cluster.groups.len() > 1;
    for group in (0..cx.request.cluster.groups.len()).filter(|_| several) {
        if cx.progress.stopped() && tried[0].plan.is_ok() {
            break;
        }
        let alone = SearchSpace { only_group: Some(group), ..cx.space.clone() };
        tried.push(search_graph(&cx.within(&alone)));
    }
    Outcome::best(tried)
}

/// Index of the outcome with the fastest plan; 0 if none has a plan.
fn fastest(tried: &[Outcome]) -> usize {
    (0..tried.len()).min_by(|&a, &b| tried[a].step_s().total_cmp(&tried[b].step_s())).unwrap_or(0)
}
