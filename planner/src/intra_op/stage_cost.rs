//! Costs of a choice of layouts: seconds of each stream of a device, and bytes.

use super::recompute_fraction::RecomputeFraction;
use serde::{Deserialize, Serialize};
use std::ops::{Add, AddAssign};

/// Cost of a choice or a pair of choices, by kind. Bytes are local.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "[f64; 14]", into = "[f64; 14]")]
pub struct StageCost {
    /// Seconds on the device, including communication that the next op waits for.
    pub forward_s: f64,
    pub backward_s: f64,
    /// Seconds of communication that overlaps computation: parameters before their use, gradients after it.
    pub forward_sent_s: f64,
    pub backward_sent_s: f64,
    /// Seconds of the host, which issues kernels ahead of the device.
    pub forward_issue_s: f64,
    pub backward_issue_s: f64,
    /// Seconds once per step.
    pub step_s: f64,
    /// Parameters, gradients and optimizer state.
    pub static_bytes: f64,
    /// Activations per microbatch, without recomputation.
    pub kept_bytes: f64,
    /// The part of `kept_bytes` that selective recomputation frees, and the seconds to recompute it.
    /// Zero on runtimes that never keep them.
    pub growing_bytes: f64,
    pub growing_s: f64,
    /// The part of `kept_bytes` that enters the run. It is kept even if everything is recomputed.
    pub entering_bytes: f64,
    /// The part of `forward_s` that full recomputation repeats. Nothing repeats what leads only to values that are kept.
    pub again_s: f64,
    /// Seconds of the backward pass to gather parameters and to reduce their gradients, where each gather queues behind
    /// the reduction of the previous gradient.
    pub queued_s: f64,
}

/// StageCost by position, since caches keep thousands of them.
impl From<[f64; 14]> for StageCost {
    fn from(all: [f64; 14]) -> StageCost {
        let [forward_s, backward_s, forward_sent_s, backward_sent_s, forward_issue_s, backward_issue_s, ..] = all;
        let [.., step_s, static_bytes, kept_bytes, growing_bytes, growing_s, entering_bytes, again_s, queued_s] = all;
        StageCost {
            forward_s,
            backward_s,
            forward_sent_s,
            backward_sent_s,
            forward_issue_s,
            backward_issue_s,
            step_s,
            static_bytes,
            kept_bytes,
            growing_bytes,
            growing_s,
            entering_bytes,
            again_s,
            queued_s,
        }
    }
}

impl From<StageCost> for [f64; 14] {
    fn from(terms: StageCost) -> [f64; 14] {
        let StageCost {
            forward_s, backward_s, forward_sent_s, backward_sent_s, forward_issue_s, backward_issue_s, ..
        } = terms;
        let StageCost { step_s, static_bytes, kept_bytes, growing_bytes, growing_s, entering_bytes, .. } = terms;
        let StageCost { again_s, queued_s, .. } = terms;
        let seconds = [forward_s, backward_s, forward_sent_s, backward_sent_s, forward_issue_s, backward_issue_s];
        let rest = [step_s, static_bytes, kept_bytes, growing_bytes, growing_s, entering_bytes, again_s, queued_s];
        std::array::from_fn(|i| if i < 6 { seconds[i] } else { rest[i - 6] })
    }
}

impl Add for StageCost {
    type Output = StageCost;
    fn add(self, o: StageCost) -> StageCost {
        StageCost {
            forward_s: self.forward_s + o.forward_s,
            backward_s: self.backward_s + o.backward_s,
            forward_sent_s: self.forward_sent_s + o.forward_sent_s,
            backward_sent_s: self.backward_sent_s + o.backward_sent_s,
            forward_issue_s: self.forward_issue_s + o.forward_issue_s,
            backward_issue_s: self.backward_issue_s + o.backward_issue_s,
            step_s: self.step_s + o.step_s,
            static_bytes: self.static_bytes + o.static_bytes,
            kept_bytes: self.kept_bytes + o.kept_bytes,
            growing_bytes: self.growing_bytes + o.growing_bytes,
            growing_s: self.growing_s + o.growing_s,
            entering_bytes: self.entering_bytes + o.entering_bytes,
            again_s: self.again_s + o.again_s,
            queued_s: self.queued_s + o.queued_s,
        }
    }
}

impl StageCost {
    pub(super) const NONE: StageCost = StageCost {
        forward_s: 0.0,
        backward_s: 0.0,
        forward_sent_s: 0.0,
        backward_sent_s: 0.0,
        forward_issue_s: 0.0,
        backward_issue_s: 0.0,
        step_s: 0.0,
        static_bytes: 0.0,
        kept_bytes: 0.0,
        growing_bytes: 0.0,
        growing_s: 0.0,
        entering_bytes: 0.0,
        again_s: 0.0,
        queued_s: 0.0,
    };
    pub(super) const FORBIDDEN: StageCost = StageCost { forward_s: f64::INFINITY, ..StageCost::NONE };

    /// The terms without training: no gradients, no updates, and no activations.
    pub(super) fn forward_only(&self) -> StageCost {
        StageCost {
            forward_s: self.forward_s,
            forward_sent_s: self.forward_sent_s,
            forward_issue_s: self.forward_issue_s,
            static_bytes: self.static_bytes,
            ..StageCost::default()
        }
    }

    /// The objective of a problem, in seconds per microbatch. It is a sum, although the streams of a device run
    /// side by side and the longest determines the time. Overlapped communication counts half, as if it were
    /// hidden half of the time. The host does not count, since it issues as many kernels for one layout as for
    /// another.
    pub fn objective_s(&self, num_microbatches: u32) -> f64 {
        self.forward_s
            + self.backward_s
            + self.queued_s
            + 0.5 * (self.forward_sent_s + self.backward_sent_s)
            + self.step_s / num_microbatches as f64
    }

    /// Seconds of the forward pass of `layers` layers that the backward pass repeats.
    pub fn recompute_s(&self, fraction: RecomputeFraction, layers: usize) -> f64 {
        let (full, selective) = fraction.shares(layers);
        // A factor of zero would give NaN, since forbidden choices have infinite seconds.
        let share = |share: f64, seconds: f64| if share > 0.0 { share * seconds } else { 0.0 };
        share(full, self.again_s) + share(selective, self.growing_s)
    }

    /// Bytes of a microbatch that are held from its forward to its backward pass, for `layers` layers.
    pub fn in_flight_bytes(&self, fraction: RecomputeFraction, layers: usize) -> f64 {
        let (full, selective) = fraction.shares(layers);
        full * self.entering_bytes + (1.0 - full) * self.kept_bytes - selective * self.growing_bytes
    }

    /// The part of [`StageCost::queued_s`] that a backward pass waits for, which computes for `backward_s`. A gather that
    /// waits for a reduction hides behind computation only as far as that is longer.
    fn exposed(&self, in_order: bool, backward_s: f64) -> f64 {
        const SHORT: f64 = 0.5;
        if in_order || self.queued_s >= backward_s { 1.0 } else { SHORT + (1.0 - SHORT) * self.queued_s / backward_s }
    }

    /// Seconds of a microbatch's forward pass, and of its backward pass including recomputation, for `layers`
    /// layers. The time is that of the longest stream, or the sum of the streams on a runtime without overlap. Nothing
    /// hides what is sent before the first layer of a pass, or after its last.
    /// The host issues the backward pass right after the forward pass. It is ahead of the device by at most the
    /// kernels that it issues in `queue_s`.
    pub fn passes_s(&self, fraction: RecomputeFraction, layers: usize, in_order: bool, queue_s: f64) -> (f64, f64) {
        let full = fraction.shares(layers).0;
        let whole = |device_s: f64, sent_s: f64, issue_s: f64| match in_order {
            true => device_s + sent_s,
            false => (device_s.max(sent_s) + device_s.min(sent_s) / layers.max(1) as f64).max(issue_s),
        };
        let backward_s = self.backward_s + self.recompute_s(fraction, layers);
        let backward_issue_s = self.backward_issue_s + full * self.forward_issue_s;
        let pass_s = whole(self.forward_s, self.forward_sent_s, self.forward_issue_s);
        let queued_s = pass_s * queue_s / self.forward_issue_s;
        let ahead_s = (pass_s - self.forward_issue_s).min(queued_s);
        let computed_s = whole(backward_s, self.backward_sent_s, backward_issue_s - ahead_s);
        (pass_s, computed_s + self.queued_s * self.exposed(in_order, backward_s))
    }
}

impl AddAssign for StageCost {
    fn add_assign(&mut self, o: StageCost) {
        *self = *self + o;
    }
}
