//! Importers: from the formats that users have to a [`crate::graph::Graph`].

pub mod json;
pub mod stablehlo;
