pub(crate) mod compose;
pub mod dynamic;
pub(crate) mod interleave;
mod ranking;
pub mod search;
pub mod submesh;
pub(crate) mod tables;
pub(crate) mod variants;
