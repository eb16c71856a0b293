pub mod compose;
pub mod dynamic;
pub mod interleave;
mod ranking;
pub mod search;
pub mod submesh;
pub mod tables;
pub mod variants;
