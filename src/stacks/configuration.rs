//! The description of a parallel configuration that all stacks share. Each stack's table of knobs reads its files into
//! it and writes them from it, and the planner predicts it.

use altiplano_ir::dtype::DType;
use altiplano_ir::plan::{Offload, Schedule};
use altiplano_ir::recompute::{Modules, Recompute};
use altiplano_planner::search::fixed_degrees::Degrees;
use altiplano_planner::search::layout::Layout;
use altiplano_planner::search::stated::Stated;

/// A configuration as a stack states it. `None` is unstated: the stack's default or what follows from the rest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Configuration {
    /// Devices in all, or their factors.
    pub devices: Option<u32>,
    pub devices_per_node: Option<u32>,
    pub nodes: Option<u32>,
    /// Groups of replicas that each hold all that is sharded (the outer degree of hybrid sharding).
    pub replicate: Option<u32>,
    /// Replicas that shard among themselves.
    pub shard: Option<u32>,
    /// Replicas shard within a node.
    pub shards_by_node: bool,
    pub tp: Option<u32>,
    pub sequence_parallel: Option<bool>,
    pub cp: Option<u32>,
    pub pp: Option<u32>,
    /// Stages on the same devices.
    pub virtual_stages: Option<u32>,
    /// The layers of a stage on the same devices as others, from which their number follows.
    pub layers_per_virtual_stage: Option<u32>,
    /// Decoder layers of each stage in the order of the model, if they are not dealt out evenly.
    pub layout: Option<Vec<u32>>,
    /// Decoder layers of the first and the last stage; the others share the rest evenly.
    pub ends: [Option<u32>; 2],
    /// Embedding and loss count as a layer each where stages are dealt out.
    pub counted_ends: [bool; 2],
    pub ep: Option<u32>,
    pub etp: Option<u32>,
    pub schedule: Option<Schedule>,
    /// The schedule has several stages on the same devices.
    pub interleaves: bool,
    /// Embedding and loss count as layers where layers are dealt out, as far as these do not divide otherwise.
    pub deals_ends: bool,
    /// Samples per replica and microbatch.
    pub micro_batch: Option<u64>,
    /// Samples per replica in one pass through a pipeline, which cuts them into microbatches.
    pub local_batch: Option<u64>,
    /// Parts into which a pipeline cuts one pass.
    pub pipeline_microbatches: Option<u64>,
    /// Microbatches of a step.
    pub accumulation: Option<u32>,
    pub global_batch: Option<u64>,
    /// ZeRO level: 1 optimizer state, 2 gradients as well, 3 parameters as well.
    pub zero: Option<u8>,
    pub recompute: Option<Recompute>,
    /// Number of each stage's first layers that are recomputed fully. `None` is all of them.
    pub recomputed_layers: Option<u32>,
    /// True if [`Self::recomputed_layers`] counts the first layers of stages, not those of a group.
    pub recompute_block: Option<bool>,
    /// The modules that selective recomputation repeats.
    pub recompute_modules: Option<Modules>,
    pub precision: Option<DType>,
    /// True if products of weights are computed in 8 bits, and the rest in `precision`.
    pub eight_bit: bool,
    pub offload: Offload,
    /// An optimizer of this project's names.
    pub optimizer: Option<String>,
    pub clip_norm: Option<f64>,
    /// Tokens of a sample.
    pub sequence: Option<u64>,
    pub fused_attention: Option<bool>,
    /// True if reductions of gradients and gathering of parameters overlap with computing.
    pub overlap: Option<bool>,
    /// True if a forward pass runs beside the backward pass of another microbatch.
    pub pairs_passes: Option<bool>,
    /// True if tensor parallelism's gathers and reductions run in parts beside products.
    pub overlaps_tensor_parallel: Option<bool>,
    /// True if each token is sent once to a node, however many of its experts the node has.
    pub sends_tokens_once: Option<bool>,
    /// Samples of a pass over the number of all devices.
    pub device_batch: Option<f64>,
    pub model: ModelFacts,
    /// Choices that the prediction leaves out or rounds, in the stack's words.
    pub notes: Vec<String>,
}

/// The model as options of a stack describe it. Sizes are elements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelFacts {
    pub layers: Option<u32>,
    pub hidden: Option<u64>,
    pub heads: Option<u64>,
    pub kv_heads: Option<u64>,
    pub head_size: Option<u64>,
    pub inner: Option<u64>,
    pub vocabulary: Option<u64>,
    /// The vocabulary of the tokenizer that is named.
    pub assumed_vocabulary: Option<u64>,
    pub positions: Option<u64>,
    pub gated: bool,
    pub grouped_queries: bool,
    pub rms_norm: bool,
    pub rotary: bool,
    pub untied: bool,
    pub squared_relu: bool,
    pub no_bias: bool,
    pub qkv_bias: bool,
    pub qk_norm: bool,
    pub experts: Option<u64>,
    pub experts_per_token: Option<u64>,
    pub expert_inner: Option<u64>,
    pub shared_inner: Option<u64>,
    pub capacity_factor: Option<f64>,
    /// Layers with experts: every n-th, or a list with 1 for each.
    pub expert_layers: Option<Vec<bool>>,
    /// Latent attention: ranks of queries and of keys, and head sizes without and with positions, and of values.
    pub latent: bool,
    pub q_rank: Option<u64>,
    pub kv_rank: Option<u64>,
    pub qk_head: Option<u64>,
    pub qk_rope_head: Option<u64>,
    pub v_head: Option<u64>,
}

/// The reason why a configuration cannot be predicted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Misfit {
    #[error("the degrees take {asked} devices at a time, which do not divide the cluster's {devices}")]
    Devices { asked: u64, devices: u32 },
    #[error("{stated} replicas are stated, but {devices} devices have {found} with these degrees")]
    Replicas { stated: u64, found: u64, devices: u32 },
    #[error(
        "experts in {ep} parts on {etp} tensor-parallel devices each take {} devices, which do not divide the {devices} of a pipeline stage",
        u64::from(*.ep) * u64::from(*.etp)
    )]
    Experts { ep: u32, etp: u32, devices: u64 },
    #[error("the file states {stated} devices, but the cluster has {devices}")]
    Cluster { stated: u32, devices: u32 },
    #[error("a global batch of {global} samples cannot be cut into microbatches of {micro} on {dp} replicas")]
    Batch { global: u64, micro: u64, dp: u64 },
    #[error("the stages have {stated} layers, but the model has {layers}")]
    Layers { stated: u64, layers: u32 },
    #[error("{layers} layers cannot be dealt out to {stages} stages as stated")]
    Stages { layers: u32, stages: u64 },
    #[error(
        "virtual stages need the schedule 1f1b and a number of microbatches that {lanes} pipeline stages divide, not {microbatches}"
    )]
    Turns { microbatches: u32, lanes: u32 },
    #[error("DualPipeV needs at least as many microbatches as stages, but there are {microbatches} and {stages}")]
    Pairs { microbatches: u32, stages: u32 },
    #[error("{0} is 0")]
    Zero(&'static str),
}

impl Misfit {
    /// The option of `altiplano plan` that avoids it in a plan.
    pub fn option(&self) -> &'static str {
        match self {
            Misfit::Devices { .. } | Misfit::Replicas { .. } | Misfit::Cluster { .. } => "other --dp and --tp",
            Misfit::Experts { .. } => "another --ep",
            Misfit::Batch { .. } | Misfit::Zero(_) => "--micro-batch-size",
            Misfit::Layers { .. } | Misfit::Stages { .. } => "another --pp",
            Misfit::Turns { .. } => "--virtual-stages 1",
            Misfit::Pairs { .. } => "--schedule zb-v",
        }
    }
}

/// A configuration in which all numbers are known.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    pub stated: Stated,
    pub global_batch: u64,
    pub micro_batch: u64,
}

impl Configuration {
    /// Leaves out a layout that deals layers out evenly.
    pub fn drop_even_layout(&mut self) {
        if self.layout.as_ref().is_some_and(|layers| layers.windows(2).all(|pair| pair[0] == pair[1])) {
            self.layout = None;
        }
    }

    /// Takes the one Adam that a stack has, whose weight decay stands beside the gradient.
    pub fn round_adam(&mut self) {
        if self.optimizer.as_deref() == Some("adam") {
            self.optimizer = Some("adamw".into());
        }
    }

    /// Settles the norm to which gradients are clipped: this one if none is stated, and no clipping if 0 is.
    pub fn clip_by_default(&mut self, norm: f64) {
        self.clip_norm = Some(self.clip_norm.unwrap_or(norm)).filter(|norm| *norm > 0.0);
    }

    pub fn tp(&self) -> u32 {
        self.tp.unwrap_or(1)
    }

    pub fn cp(&self) -> u32 {
        self.cp.unwrap_or(1)
    }

    pub fn pp(&self) -> u32 {
        self.pp.unwrap_or(1)
    }

    pub fn ep(&self) -> u32 {
        self.ep.unwrap_or(1)
    }

    /// Stages that share devices.
    pub fn virtual_stages(&self) -> u32 {
        self.virtual_stages.unwrap_or(1)
    }

    /// The order of a pipeline's calls. Without a pipeline, each microbatch goes forward and backward before the next.
    pub fn order(&self) -> Schedule {
        match self.schedule {
            Some(schedule) if self.pp() > 1 || !schedule.trains() => schedule,
            _ => Schedule::OneFOneB,
        }
    }

    /// Devices that the file states.
    pub fn stated_devices(&self) -> Option<u32> {
        let of_nodes = || self.devices_per_node?.checked_mul(self.nodes.unwrap_or(1));
        self.devices.or_else(of_nodes)
    }

    /// Devices that hold one replica.
    pub fn devices_of_replica(&self) -> u64 {
        [self.cp(), self.pp()].iter().fold(u64::from(self.tp()), |product, &d| product.saturating_mul(d.into()))
    }

    /// Replicas on so many devices.
    pub fn replicas(&self, devices: u32) -> Result<u32, Misfit> {
        let each = self.devices_of_replica();
        if each == 0 {
            return Err(Misfit::Zero("a degree"));
        }
        if !u64::from(devices).is_multiple_of(each) || u64::from(devices) < each {
            return Err(Misfit::Devices { asked: each, devices });
        }
        let found = u64::from(devices) / each;
        let outer = u64::from(self.replicate.unwrap_or(1));
        let stated = self.shard.map(|shard| outer.saturating_mul(shard.into()));
        match stated {
            Some(stated) if stated != found => Err(Misfit::Replicas { stated, found, devices }),
            None if outer == 0 || !found.is_multiple_of(outer) => {
                Err(Misfit::Replicas { stated: outer, found, devices })
            }
            _ => Ok(found as u32),
        }
    }

    /// All numbers of the configuration on so many devices. `blocks` is the model's number of repeated layers.
    ///
    /// # Errors
    /// [`Misfit`] if degrees, samples or layers do not divide as stated.
    pub fn settled(&self, devices: u32, blocks: u32) -> Result<Settled, Misfit> {
        if let Some(stated) = self.stated_devices().filter(|&stated| stated != devices) {
            return Err(Misfit::Cluster { stated, devices });
        }
        let dp = self.replicas(devices)?;
        let (ep, etp) = (self.ep(), self.etp.unwrap_or(1).max(1));
        let of_stage = u64::from(dp) * u64::from(self.tp()) * u64::from(self.cp());
        if ep > 1 && !of_stage.is_multiple_of(u64::from(ep) * u64::from(etp)) {
            return Err(Misfit::Experts { ep, etp, devices: of_stage });
        }
        let [micro_batch, global_batch] = self.samples(u64::from(dp))?;
        let together = micro_batch.checked_mul(u64::from(dp)).filter(|&t| t > 0);
        let refused = Misfit::Batch { global: global_batch, micro: micro_batch, dp: dp.into() };
        let count = together.filter(|t| global_batch.is_multiple_of(*t)).map(|t| global_batch / t);
        let num_microbatches = count.and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0).ok_or(refused)?;
        let layers = self.model.layers.unwrap_or(blocks);
        let virtual_stages = self.shared_stages(layers)?;
        let stages = self.pp().checked_mul(virtual_stages).filter(|&s| s > 0).ok_or(Misfit::Zero("a degree"))?;
        // Embedding and loss may have stages of their own.
        if stages > layers.saturating_add(2) || virtual_stages > 1 && self.pp() == 1 {
            return Err(Misfit::Stages { layers, stages: stages.into() });
        }
        if !self.order().can_share(virtual_stages, num_microbatches.into(), self.pp()) {
            let of_schedule = self.order().virtual_stages();
            return Err(match of_schedule.filter(|&count| count != virtual_stages) {
                Some(_) => Misfit::Stages { layers, stages: stages.into() },
                None if of_schedule.is_some() => Misfit::Pairs { microbatches: num_microbatches, stages },
                None => Misfit::Turns { microbatches: num_microbatches, lanes: self.pp() },
            });
        }
        let groups = self.replicate.unwrap_or(1).clamp(1, dp);
        let degrees = Degrees {
            dp,
            tp: self.tp(),
            cp: self.cp(),
            stages,
            virtual_stages,
            num_microbatches,
            zero: if dp > 1 || self.cp() > 1 { self.zero.unwrap_or(0) } else { 0 },
            recompute: match self.recomputed_layers {
                Some(_) => Recompute::None,
                None => self.recompute.unwrap_or_default(),
            },
            layout: Layout::Even,
            experts: 1,
            groups: if dp.is_multiple_of(groups) { groups } else { 1 },
            sequence: self.tp() > 1 && self.sequence_parallel == Some(true),
        };
        let stated = Stated {
            degrees,
            ep: self.ep(),
            etp: self.etp,
            blocks: self.blocks(layers, stages)?,
            full_blocks: self.recomputed_layers,
            splits_positions: self.sequence_parallel != Some(false),
        };
        Ok(Settled { stated, global_batch, micro_batch })
    }

    /// Samples of a microbatch on one replica, and of a step.
    fn samples(&self, dp: u64) -> Result<[u64; 2], Misfit> {
        let count = self.accumulation.map(u64::from);
        let of_device = || {
            let samples = self.device_batch? * self.devices_of_replica() as f64;
            (samples >= 1.0 && samples.fract() == 0.0).then_some(samples as u64)
        };
        let micro = self.micro_batch.or(self.local_batch).or_else(of_device);
        let of_count = || {
            let of_replica = self.global_batch? / dp.max(1);
            Some(of_replica / count.unwrap_or(1).max(1))
        };
        let micro = micro.or_else(of_count).unwrap_or(1).max(1);
        // A local batch is one pass, which a pipeline cuts further.
        let pass = self.local_batch.filter(|_| self.pp() > 1).unwrap_or(micro).max(micro);
        let all = pass.checked_mul(dp).and_then(|t| t.checked_mul(count.unwrap_or(1).max(1)));
        let global = self.global_batch.or(all).ok_or(Misfit::Batch { global: 0, micro, dp })?;
        Ok([micro, global])
    }

    /// Number of stages on the same devices.
    fn shared_stages(&self, layers: u32) -> Result<u32, Misfit> {
        let pp = u64::from(self.pp().max(1));
        if let Some(layout) = &self.layout {
            let stages = layout.len() as u64;
            return match stages.is_multiple_of(pp) && stages > 0 {
                true => Ok((stages / pp) as u32),
                false => Err(Misfit::Stages { layers, stages }),
            };
        }
        match self.layers_per_virtual_stage {
            Some(each) if self.virtual_stages.is_none() => {
                let ends = u32::from(self.counted_ends[0]) + u32::from(self.counted_ends[1]);
                let stages = u64::from(layers.saturating_add(ends).checked_div(each).unwrap_or(0));
                match stages > 0 && stages.is_multiple_of(pp) {
                    true => Ok((stages / pp) as u32),
                    false => Err(Misfit::Stages { layers, stages }),
                }
            }
            _ => Ok(self.virtual_stages()),
        }
    }

    /// Decoder layers by stage, if they are not dealt out evenly.
    fn blocks(&self, layers: u32, stages: u32) -> Result<Option<Vec<u32>>, Misfit> {
        if let Some(layout) = &self.layout {
            let stated: u64 = layout.iter().map(|&n| u64::from(n)).sum();
            // Without a stated number, a model may have layers of another kind besides the repeated ones.
            let fits = match self.model.layers {
                Some(layers) => stated == u64::from(layers),
                None => stated >= u64::from(layers),
            };
            return if fits { Ok(Some(layout.clone())) } else { Err(Misfit::Layers { stated, layers }) };
        }
        let misfit = || Misfit::Stages { layers, stages: stages.into() };
        if self.counted_ends != [false; 2] {
            let ends = self.counted_ends.map(u32::from);
            let all = layers.saturating_add(ends[0] + ends[1]);
            let each = all / stages;
            let mut counts = vec![each; stages as usize];
            if each * stages != all {
                return Err(misfit());
            }
            for (at, less) in [(0, ends[0]), (counts.len() - 1, ends[1])] {
                counts[at] = counts[at].checked_sub(less).ok_or_else(misfit)?;
            }
            return Ok(Some(counts));
        }
        if self.deals_ends && self.ends == [None; 2] {
            return Ok(Some(with_ends(layers, stages).ok_or_else(misfit)?));
        }
        if self.ends == [None; 2] {
            return Ok(None);
        }
        // The ends are of devices: their stages share them, and so do the others.
        let [virtual_stages, pp] = [self.virtual_stages().max(1), self.pp()];
        let given = self.ends.iter().flatten().count() as u32;
        let ends = self.ends.iter().flatten().fold(0_u32, |sum, &n| sum.saturating_add(n));
        let rest = layers.checked_sub(ends).ok_or_else(misfit)?;
        let others = pp.checked_sub(given).ok_or_else(misfit)?;
        let each = rest.checked_div(others).unwrap_or(0);
        if each * others != rest {
            return Err(misfit());
        }
        let of_lane = |lane: u32| match lane {
            0 => self.ends[0].unwrap_or(each),
            last if last + 1 == pp => self.ends[1].unwrap_or(each),
            _ => each,
        };
        let counts: Vec<u32> = (0..pp).map(of_lane).collect();
        if counts.iter().any(|n| n % virtual_stages != 0) {
            return Err(misfit());
        }
        Ok(Some((0..stages).map(|s| counts[(s % pp) as usize] / virtual_stages).collect()))
    }
}

/// Layers of each stage if embedding and loss count as one layer each. Of uneven shares, the first stages get more.
fn with_ends(layers: u32, stages: u32) -> Option<Vec<u32>> {
    if stages <= 1 {
        return Some(vec![layers]);
    }
    let all = layers.checked_add(2)?;
    let share = |s: u32| all / stages + u32::from(s < all % stages);
    let of_ends = |s: u32| u32::from(s == 0) + u32::from(s + 1 == stages);
    (0..stages).map(|s| share(s).checked_sub(of_ends(s))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(change: impl Fn(&mut Configuration)) -> Configuration {
        let mut configuration = Configuration::default();
        change(&mut configuration);
        configuration
    }

    #[test]
    fn numbers_follow_from_each_other() {
        let given = of(|c| {
            (c.tp, c.pp, c.global_batch, c.micro_batch) = (Some(2), Some(4), Some(64), Some(2));
            (c.model.layers, c.layers_per_virtual_stage) = (Some(16), Some(2));
        });
        let settled = given.settled(32, 16).unwrap();
        let degrees = settled.stated.degrees;
        assert_eq!((degrees.dp, degrees.stages, degrees.virtual_stages, degrees.num_microbatches), (4, 8, 2, 8));
        assert_eq!(given.settled(12, 16), Err(Misfit::Devices { asked: 8, devices: 12 }));
        let odd = of(|c| (c.global_batch, c.micro_batch) = (Some(10), Some(4)));
        assert_eq!(odd.settled(2, 4), Err(Misfit::Batch { global: 10, micro: 4, dp: 2 }));
        assert_eq!(of(|c| c.tp = Some(0)).settled(2, 4), Err(Misfit::Zero("a degree")));
        let outer = of(|c| (c.replicate, c.shard) = (Some(2), Some(2)));
        assert_eq!(outer.settled(4, 4).unwrap().stated.degrees.groups, 2);
        assert_eq!(outer.settled(8, 4), Err(Misfit::Replicas { stated: 4, found: 8, devices: 8 }));
    }

    #[test]
    fn stages_may_have_more_or_fewer_layers() {
        let blocks = |c: &Configuration, devices| c.settled(devices, 0).map(|s| s.stated.blocks);
        let ends = of(|c| (c.pp, c.model.layers, c.ends) = (Some(4), Some(14), [Some(3), Some(3)]));
        assert_eq!(blocks(&ends, 4), Ok(Some(vec![3, 4, 4, 3])));
        let counted = of(|c| (c.pp, c.model.layers, c.counted_ends) = (Some(4), Some(14), [true; 2]));
        assert_eq!(blocks(&counted, 4), Ok(Some(vec![3, 4, 4, 3])));
        let layout = of(|c| {
            (c.pp, c.model.layers, c.layout) = (Some(2), Some(9), Some(vec![2, 3, 3, 1]));
            c.global_batch = Some(4);
            c.micro_batch = Some(1);
        });
        assert_eq!(layout.settled(2, 0).unwrap().stated.degrees.virtual_stages, 2);
        let short = of(|c| c.layout = Some(vec![4]));
        assert_eq!(short.settled(1, 5), Err(Misfit::Layers { stated: 4, layers: 5 }));
    }

    #[test]
    fn batches_follow_from_their_parts() {
        let samples = |change: fn(&mut Configuration)| of(change).samples(4);
        assert_eq!(samples(|c| (c.micro_batch, c.accumulation) = (Some(2), Some(3))), Ok([2, 24]));
        assert_eq!(samples(|c| (c.global_batch, c.accumulation) = (Some(24), Some(3))), Ok([2, 24]));
        let pipeline = |c: &mut Configuration| (c.pp, c.micro_batch, c.local_batch) = (Some(2), Some(1), Some(8));
        assert_eq!(of(pipeline).samples(4), Ok([1, 32]));
    }
}
