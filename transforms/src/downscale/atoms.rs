//! The sizes of a graph as products of atoms, which must change together.
//!
//! Every dimension is a list of atoms, major first, whose sizes multiply to its own. Equating two dimensions merges
//! their atoms, and splits an atom if the other side has several. For example, 768 in one place and 12 heads of 64 in
//! another are two atoms in both. A size that is a sum of other sizes and a constant (the result of a slice or padding)
//! is a sum.

use std::collections::{BTreeMap, BTreeSet};

/// A factor of some dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Atom(u32);

#[derive(Clone, Debug, PartialEq)]
enum State {
    /// The size can be anything from `least` on. `weight` is the product of the fixed atoms beside it in some
    /// dimension.
    Free {
        least: u64,
        weight: u64,
    },
    Fixed,
    /// The product of these atoms, major first.
    Parts(Vec<Atom>),
    /// The sum of these products and `rest`.
    Sum {
        terms: Vec<Vec<Atom>>,
        rest: i64,
    },
}

const FREE: State = State::Free { least: 1, weight: 1 };

/// The largest depth of nested sums. A deeper size is left unchanged.
const DEEPEST: usize = 256;

/// All atoms of a graph.
#[derive(Default)]
pub(crate) struct Atoms {
    sizes: Vec<u64>,
    states: Vec<State>,
}

impl Atoms {
    /// The atoms of a new dimension without known relations.
    pub(crate) fn dimension(&mut self, size: u64) -> Vec<Atom> {
        match size {
            1 => Vec::new(),
            0 => vec![self.add(0, State::Fixed)],
            _ => vec![self.add(size, FREE)],
        }
    }

    fn add(&mut self, size: u64, state: State) -> Atom {
        self.sizes.push(size);
        self.states.push(state);
        Atom((self.sizes.len() - 1) as u32)
    }

    fn state(&self, atom: Atom) -> &State {
        &self.states[atom.0 as usize]
    }

    fn set(&mut self, atom: Atom, state: State) {
        self.states[atom.0 as usize] = state;
    }

    pub(crate) fn size(&self, atom: Atom) -> u64 {
        self.sizes[atom.0 as usize]
    }

    /// The leaf atoms that these consist of.
    pub(crate) fn leaves(&self, atoms: &[Atom]) -> Vec<Atom> {
        let mut leaves = Vec::new();
        let mut pending: Vec<Atom> = atoms.iter().rev().copied().collect();
        while let Some(atom) = pending.pop() {
            match self.state(atom) {
                State::Parts(parts) => pending.extend(parts.iter().rev()),
                _ => leaves.push(atom),
            }
        }
        leaves
    }

    /// Fixes the sizes of these atoms. Returns true if they could have changed.
    pub(crate) fn fix(&mut self, atoms: &[Atom]) -> bool {
        let mut changed = false;
        let mut pending = self.leaves(atoms);
        while let Some(atom) = pending.pop() {
            if *self.state(atom) == State::Fixed {
                continue;
            }
            changed = true;
            let before = std::mem::replace(&mut self.states[atom.0 as usize], State::Fixed);
            if let State::Sum { terms, .. } = before {
                pending.extend(terms.iter().flat_map(|term| self.leaves(term)));
            }
        }
        changed
    }

    /// Sets a lower bound for the size of a dimension.
    pub(crate) fn at_least(&mut self, atoms: &[Atom], size: u64) {
        match self.leaves(atoms).as_slice() {
            [only] => match &mut self.states[only.0 as usize] {
                State::Free { least, .. } => *least = size.max(*least),
                _ => {
                    self.fix(&[*only]);
                }
            },
            several => {
                self.fix(several);
            }
        }
    }

    /// Records that two dimensions have the same size.
    pub(crate) fn equate(&mut self, a: &[Atom], b: &[Atom]) {
        let (mut left, mut right) = (a.to_vec(), b.to_vec());
        left.reverse();
        right.reverse();
        loop {
            let (Some(x), Some(y)) = (self.next(&mut left), self.next(&mut right)) else {
                // Sizes that do not multiply to the same number cannot change.
                self.fix(&left);
                self.fix(&right);
                return;
            };
            let (m, n) = (self.size(x), self.size(y));
            if x == y {
            } else if m == n {
                self.join(x, y);
            } else if n > 0 && m > n && m.is_multiple_of(n) {
                left.push(self.split(x, n));
                self.equate(&[self.first(x)], &[y]);
            } else if m > 0 && n > m && n.is_multiple_of(m) {
                right.push(self.split(y, m));
                self.equate(&[x], &[self.first(y)]);
            } else {
                // There is no common refinement, so fix everything up to where the products meet again.
                self.fix(&[x, y]);
                let (mut m, mut n) = (u128::from(m), u128::from(n));
                while m != n {
                    let (side, product) = if m < n { (&mut left, &mut m) } else { (&mut right, &mut n) };
                    let Some(z) = self.next(side) else { break };
                    self.fix(&[z]);
                    *product *= u128::from(self.size(z));
                }
            }
        }
    }

    /// Takes the next atom from the end of a list.
    fn next(&self, list: &mut Vec<Atom>) -> Option<Atom> {
        loop {
            let atom = list.pop()?;
            match self.state(atom) {
                State::Parts(parts) => list.extend(parts.iter().rev()),
                _ => return Some(atom),
            }
        }
    }

    /// The major part of an atom that was split.
    fn first(&self, atom: Atom) -> Atom {
        match self.state(atom) {
            State::Parts(parts) => parts[0],
            _ => atom,
        }
    }

    /// Splits an atom into a major part of this size and a minor part. Returns the minor part.
    fn split(&mut self, atom: Atom, major: u64) -> Atom {
        if *self.state(atom) != FREE {
            self.fix(&[atom]);
        }
        let state = self.state(atom).clone();
        let minor = self.size(atom) / major;
        let parts = [self.add(major, state.clone()), self.add(minor, state)];
        self.set(atom, State::Parts(parts.to_vec()));
        parts[1]
    }

    /// Merges two leaves of the same size.
    fn join(&mut self, x: Atom, y: Atom) {
        match (self.state(x).clone(), self.state(y).clone()) {
            (State::Fixed, _) | (_, State::Fixed) => {
                self.fix(&[x, y]);
            }
            (State::Free { least, weight }, State::Free { least: other, .. }) => {
                // Keep the older one, or each op of a long model would lead to the next.
                let (x, y) = (x.min(y), x.max(y));
                self.set(x, State::Free { least: least.max(other), weight });
                self.set(y, State::Parts(vec![x]));
            }
            (State::Free { .. }, State::Sum { .. }) if !self.depends(y, x) => self.set(x, State::Parts(vec![y])),
            (State::Sum { .. }, State::Free { .. }) if !self.depends(x, y) => self.set(y, State::Parts(vec![x])),
            (State::Sum { terms, rest }, State::Sum { terms: others, rest: other })
                if terms.len() == 1 && others.len() == 1 && rest == other =>
            {
                self.equate(&terms[0], &others[0]);
                if !self.depends(x, y) {
                    self.set(y, State::Parts(vec![x]));
                }
            }
            _ => {
                self.fix(&[x, y]);
            }
        }
    }

    /// Returns true if the size of an atom follows from that of another.
    fn depends(&self, atom: Atom, on: Atom) -> bool {
        let mut pending = vec![atom];
        let mut seen = BTreeSet::new();
        while let Some(atom) = pending.pop() {
            if atom == on {
                return true;
            }
            if let State::Sum { terms, .. } = self.state(atom)
                && seen.insert(atom)
            {
                pending.extend(terms.iter().flat_map(|term| self.leaves(term)));
            }
        }
        false
    }

    /// Records that the size of `whole` is the sum of the products `terms` and of a constant, which is today's
    /// difference.
    pub(crate) fn sum(&mut self, whole: &[Atom], terms: &[Vec<Atom>]) {
        let product = |atoms: &[Atom]| atoms.iter().map(|&a| self.size(a)).product::<u64>() as i64;
        let size = product(whole);
        let rest = size - terms.iter().map(|t| product(t)).sum::<i64>();
        match terms {
            [only] if rest == 0 => self.equate(whole, only),
            _ => {
                if let [only] = terms
                    && rest < 0
                {
                    self.at_least(only, 1 + rest.unsigned_abs());
                }
                let sum = self.add(size as u64, State::Sum { terms: terms.to_vec(), rest });
                self.equate(whole, &[sum]);
            }
        }
    }

    /// Records the weights of a dimension's free atoms, after all relations are known.
    pub(crate) fn weigh(&mut self, atoms: &[Atom]) {
        let leaves = self.leaves(atoms);
        let is_fixed = |a: &&Atom| *self.state(**a) == State::Fixed;
        let fixed: u64 = leaves.iter().filter(is_fixed).map(|&a| self.size(a)).product();
        for atom in leaves {
            if let State::Free { weight, .. } = &mut self.states[atom.0 as usize] {
                *weight = fixed.max(*weight);
            }
        }
    }

    /// The atoms that are part of sums. If these change, no index tells where the elements of other terms go.
    pub(crate) fn in_sums(&self) -> BTreeSet<Atom> {
        let terms = |state: &State| match state {
            State::Sum { terms, .. } => terms.concat(),
            _ => Vec::new(),
        };
        self.states.iter().flat_map(|state| self.leaves(&terms(state))).collect()
    }

    /// Returns true if an atom may have another size.
    pub(crate) fn is_free(&self, atom: Atom) -> bool {
        matches!(self.state(atom), State::Free { .. })
    }

    /// All sizes if free atoms have the sizes of `goal`.
    pub(crate) fn resized<'a>(&'a self, goal: &'a Sizing) -> Resized<'a> {
        Resized { atoms: self, goal, sums: BTreeMap::new() }
    }
}

/// The sizes that free atoms get.
pub(crate) enum Sizing {
    /// No free atom, times its weight, is larger. Atoms of two or more elements keep at least two.
    AtMost(u64),
    /// These atoms get these sizes, and the others keep theirs.
    Exactly(BTreeMap<Atom, u64>),
}

/// The sizes of atoms after free ones have changed.
pub(crate) struct Resized<'a> {
    atoms: &'a Atoms,
    goal: &'a Sizing,
    /// The sums that were asked for, each computed once.
    sums: BTreeMap<Atom, Option<u64>>,
}

impl Resized<'_> {
    /// The size of a dimension. `None` if a sum becomes empty.
    pub(crate) fn size(&mut self, dimension: &[Atom]) -> Option<u64> {
        self.size_at(dimension, 0)
    }

    fn size_at(&mut self, dimension: &[Atom], depth: usize) -> Option<u64> {
        let atoms = self.atoms;
        let mut product = 1u64;
        for atom in atoms.leaves(dimension) {
            let size = atoms.size(atom);
            let resized = match atoms.state(atom) {
                State::Free { least, weight } => match self.goal {
                    Sizing::AtMost(most) => size.min((most / weight).max(*least).max(2)),
                    Sizing::Exactly(sizes) => sizes.get(&atom).copied().unwrap_or(size),
                },
                State::Sum { terms, rest } => match self.sums.get(&atom) {
                    Some(&known) => known?,
                    None => {
                        let sum = self.sum(terms, *rest, depth);
                        self.sums.insert(atom, sum);
                        sum?
                    }
                },
                _ => size,
            };
            product = product.checked_mul(resized)?;
        }
        Some(product)
    }

    fn sum(&mut self, terms: &[Vec<Atom>], rest: i64, depth: usize) -> Option<u64> {
        let mut sum = rest;
        for term in terms {
            let size = (depth < DEEPEST).then(|| self.size_at(term, depth + 1))??;
            sum = sum.checked_add(i64::try_from(size).ok()?)?;
        }
        u64::try_from(sum).ok().filter(|&s| s > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capped(atoms: &Atoms, most: u64, dimension: &[Atom]) -> Option<u64> {
        atoms.resized(&Sizing::AtMost(most)).size(dimension)
    }

    #[test]
    fn dimensions_share_their_finest_parts() {
        let mut atoms = Atoms::default();
        let [fused, heads, head, whole] = [2304, 12, 64, 768].map(|n| atoms.dimension(n));
        let three = atoms.dimension(3);
        atoms.fix(&three);
        atoms.equate(&fused, &[three, whole.clone()].concat());
        atoms.equate(&whole, &[heads.clone(), head].concat());
        assert_eq!([&fused, &whole, &heads].map(|d| capped(&atoms, 8, d)), [Some(3 * 64), Some(64), Some(8)]);
        // As a part of 2304, each has a weight of three.
        atoms.weigh(&fused);
        assert_eq!([&fused, &whole, &heads].map(|d| capped(&atoms, 24, d)), [Some(3 * 64), Some(64), Some(8)]);
        assert_eq!(capped(&atoms, 1000, &fused), Some(2304));
        // An atom that is fixed in one place is fixed in all.
        atoms.fix(&heads);
        assert_eq!(capped(&atoms, 2, &fused), Some(3 * 12 * 2));
    }

    #[test]
    fn what_has_no_common_parts_keeps_its_size() {
        let mut atoms = Atoms::default();
        let [a, b, c, d, e] = [4, 6, 6, 4, 5].map(|n| atoms.dimension(n));
        atoms.equate(&[a.clone(), b, e.clone()].concat(), &[c, d, e.clone()].concat());
        assert_eq!([a, e].map(|d| capped(&atoms, 2, &d)), [Some(4), Some(2)]);
    }

    #[test]
    fn sums_follow_their_terms() {
        let mut atoms = Atoms::default();
        let [tokens, shifted, patches, all] = [1024, 1023, 196, 197].map(|n| atoms.dimension(n));
        atoms.sum(&shifted, std::slice::from_ref(&tokens));
        assert_eq!([&tokens, &shifted].map(|d| capped(&atoms, 8, d)), [Some(8), Some(7)]);
        assert_eq!([&tokens, &shifted].map(|d| capped(&atoms, 1, d)), [Some(2), Some(1)]);
        let [rows, columns] = [14, 14].map(|n| atoms.dimension(n));
        atoms.sum(&all, std::slice::from_ref(&patches));
        atoms.equate(&patches, &[rows, columns].concat());
        assert_eq!(capped(&atoms, 4, &all), Some(17));
        // A size that would follow from itself stays.
        let [a, b, c] = [8, 6, 8].map(|n| atoms.dimension(n));
        atoms.sum(&b, std::slice::from_ref(&a));
        atoms.sum(&c, std::slice::from_ref(&b));
        atoms.equate(&a, &c);
        assert_eq!([a, b, c].map(|d| capped(&atoms, 2, &d)), [Some(8), Some(6), Some(8)]);
    }
}
