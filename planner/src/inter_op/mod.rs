pub mod dynamic;
pub mod submesh;
