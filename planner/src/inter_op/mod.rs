pub mod compose;
pub mod dynamic;
pub mod interleave;
pub mod search;
pub mod submesh;
pub mod tables;
pub mod variants;
