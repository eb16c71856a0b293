//! Lowers ops inside `torch.vmap`. Exports contain them as written, on values without the mapped dimension.
//!
//! Such a value has the dimensions of all enclosing maps in front, of size one where it does not vary. After
//! its other dimensions are aligned, elementwise ops broadcast as usual. That suffices for masks, which models
//! write this way; other ops are refused.

use super::call::{Call, Item, Out};
use super::memory::Tensor;
use super::ops;
use super::report::{Reject, other};
use super::table::Lowering;
use altiplano_ir::array as a;
use altiplano_ir::graph::ValueId;

/// Non-elementwise ops that accept additional leading dimensions.
const IN_FRONT: &[&str] =
    &["to", "_to_copy", "type_as", "clone", "contiguous", "alias", "lift_fresh_copy", "detach", "relu", "gelu", "silu"];

/// Ops over some or all dimensions.
const OF_DIMS: &[&str] = &["sum", "mean", "amax", "amin", "any", "all", "prod", "softmax", "log_softmax"];

impl Item {
    fn is_mapped(&self) -> bool {
        match self {
            Item::Mapped(..) => true,
            Item::List(items) => items.iter().any(Item::is_mapped),
            _ => false,
        }
    }
}

/// The numbers of dimensions that maps and functions see.
#[derive(Clone, Copy)]
struct Extent {
    levels: usize,
    rank: usize,
}

impl Call<'_> {
    pub(crate) fn is_mapped(&self) -> bool {
        self.name.starts_with("_functorch.") || self.arguments.iter().any(|(_, item)| item.is_mapped())
    }

    /// The results of an op inside a map, or at its boundary.
    pub(crate) fn mapped_results(&mut self, lowering: Option<Lowering>) -> Result<Vec<Item>, Reject> {
        match self.name {
            "_functorch.predispatch._add_batch_dim" => return self.enter(),
            "_functorch.predispatch._remove_batch_dim" => return self.leave(),
            name if name.starts_with("_functorch.") => return Ok(vec![Item::None]),
            _ => {}
        }
        let lowering = lowering.ok_or(Reject::Unsupported(""))?;
        let elementwise = ops::elementwise::TABLE.iter().any(|(name, _)| *name == self.name);
        let of_dims = OF_DIMS.contains(&self.name);
        let most = Extent { levels: 0, rank: 0 };
        let Extent { levels, rank } = self.arguments.iter().fold(most, |most, (_, item)| self.extent(item, most));
        let linear = self.name == "linear";
        let known = elementwise || of_dims || linear || IN_FRONT.contains(&self.name) || self.name == "index";
        // The table of a lookup and the weights of a layer do not vary over the maps.
        let shared = |name: &str, at: usize| match self.name {
            "index" => at == 0,
            "linear" => matches!(name, "weight" | "bias"),
            _ => false,
        };
        let varies = self.arguments.iter().enumerate().any(|(at, (name, item))| shared(name, at) && item.is_mapped());
        let shared: Vec<bool> = self.arguments.iter().enumerate().map(|(at, (name, _))| shared(name, at)).collect();
        if !known || self.in_place() || varies {
            return Err(Reject::Unsupported("inside vmap"));
        }
        let mut arguments = Vec::with_capacity(self.arguments.len());
        for (at, (name, item)) in self.arguments.clone().into_iter().enumerate() {
            let item = match (name, &item) {
                _ if shared[at] => item,
                // The features of a layer are last, for any rank of its weights.
                _ if linear => self.aligned(&item, levels, 0)?,
                ("dim", item) if of_dims => behind(item, levels),
                (_, item) => self.aligned(item, levels, rank)?,
            };
            arguments.push((name, item));
        }
        if of_dims && !self.has("dim") {
            let dims = (levels..levels + rank).map(|d| Item::Int(d as i64)).collect();
            arguments.push(("dim", Item::List(dims)));
        }
        let declared = vec![None; self.declared.len()];
        let mut call = Call { to: self.to, name: self.name, arguments, declared, number: None, row_major: false };
        let value = match lowering.apply(&mut call)? {
            Out::Value(v) | Out::Maybe(v) => v,
            Out::Same => call.first()?,
            _ => return Err(Reject::Unsupported("inside vmap")),
        };
        Ok(vec![Item::Mapped(self.to.memory.fresh(value), levels)])
    }

    /// The maximum number of maps and of own dimensions, of items of which one extent is given.
    fn extent(&self, item: &Item, most: Extent) -> Extent {
        let own = |tensor: Tensor| self.to.graph.shape(self.to.memory.last_value(tensor)).len();
        let Extent { levels, rank } = most;
        match item {
            Item::Mapped(tensor, of) => Extent { levels: levels.max(*of), rank: rank.max(own(*tensor) - of) },
            // The table of a lookup has dimensions of its own.
            Item::Tensor(tensor) if self.name != "index" => Extent { rank: rank.max(own(*tensor)), ..most },
            Item::List(items) => items.iter().fold(most, |most, item| self.extent(item, most)),
            _ => most,
        }
    }

    /// Pads an item to `levels` map dimensions in front and `rank` dimensions of its own.
    fn aligned(&mut self, item: &Item, levels: usize, rank: usize) -> Result<Item, Reject> {
        let (tensor, of) = match item {
            Item::Mapped(tensor, of) => (*tensor, *of),
            Item::Tensor(tensor) => (*tensor, 0),
            Item::List(items) => {
                let items = items.iter().map(|item| self.aligned(item, levels, rank)).collect::<Result<_, _>>()?;
                return Ok(Item::List(items));
            }
            item => return Ok(item.clone()),
        };
        let value = self.read(tensor)?;
        let shape = self.shape_of(value);
        let ones = (levels - of) + (rank + of).saturating_sub(shape.len());
        let spread = [&shape[..of], &vec![1; ones], &shape[of..]].concat();
        let value = a::reshape(self.g(), value, &spread)?;
        Ok(Item::Tensor(self.to.memory.fresh(value)))
    }

    fn number_at(&self, at: usize) -> Result<i64, Reject> {
        match self.arguments.get(at) {
            Some((_, Item::Int(n))) => Ok(*n),
            _ => Err(other("maps over no dimension")),
        }
    }

    fn mapped_at(&mut self, at: usize) -> Result<(ValueId, usize), Reject> {
        let (tensor, of) = match self.arguments.get(at) {
            Some((_, Item::Mapped(tensor, of))) => (*tensor, *of),
            Some((_, Item::Tensor(tensor))) => (*tensor, 0),
            _ => return Err(other("maps over what is no tensor")),
        };
        Ok((self.read(tensor)?, of))
    }

    /// Begins a map. The arguments are a tensor, the dimension to map over, and the number of maps including
    /// this one.
    fn enter(&mut self) -> Result<Vec<Item>, Reject> {
        let ((value, of), dim, level) = (self.mapped_at(0)?, self.number_at(1)?, self.number_at(2)?);
        let shape = self.shape_of(value);
        let level = usize::try_from(level).ok().filter(|&level| level > of && level <= 16);
        let level = level.ok_or_else(|| other("maps at a level that is none"))?;
        let dim = of + a::axis(dim, shape.len() - of)?;
        let value = a::move_dim(self.g(), value, dim, of)?;
        let shape = self.shape_of(value);
        let spread = [&shape[..of], &vec![1; level - 1 - of], &shape[of..]].concat();
        let value = a::reshape(self.g(), value, &spread)?;
        Ok(vec![Item::Mapped(self.to.memory.fresh(value), level)])
    }

    /// Ends a map. The arguments are a tensor, the level of the map, its size, and the dimension that it
    /// becomes.
    fn leave(&mut self) -> Result<Vec<Item>, Reject> {
        let ((value, of), level) = (self.mapped_at(0)?, self.number_at(1)?);
        let (size, dim) = (self.number_at(2)?, self.number_at(3)?);
        let (Ok(level), Ok(size)) = (usize::try_from(level), u64::try_from(size)) else {
            return Err(other("maps at a level that is none"));
        };
        if level == 0 || of > level || level > 16 {
            return Err(other("maps at a level that is none"));
        }
        let shape = self.shape_of(value);
        let mut wide = [&shape[..of], &vec![1; level - of], &shape[of..]].concat();
        let value = a::reshape(self.g(), value, &wide)?;
        wide[level - 1] = size;
        let value = a::broadcast_to(self.g(), value, &wide)?;
        let dim = level - 1 + a::axis(dim, wide.len() - (level - 1))?;
        let value = a::move_dim(self.g(), value, level - 1, dim)?;
        let tensor = self.to.memory.fresh(value);
        Ok(vec![if level == 1 { Item::Tensor(tensor) } else { Item::Mapped(tensor, level - 1) }])
    }
}

/// Shifts dimensions that count from the front by the number of maps.
fn behind(item: &Item, levels: usize) -> Item {
    match item {
        Item::Int(d) if *d >= 0 => Item::Int(d + levels as i64),
        Item::List(items) => Item::List(items.iter().map(|item| behind(item, levels)).collect()),
        item => item.clone(),
    }
}
