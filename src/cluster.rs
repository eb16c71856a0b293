//! Loads the cluster that `--cluster` names: a preset with a count, or a TOML file.

use crate::error::Error;
use altiplano_cost_models::{Devices, parse, parse_devices, preset};
use altiplano_ir::cluster::Cluster;
use std::path::Path;

/// Loads a preset (`local:4`, `p3.16xlarge:8`) or a TOML file.
///
/// ```
/// let cluster = altiplano::load_cluster("dgx-a100:4")?;
/// assert_eq!(cluster.num_devices(), 32);
/// # Ok::<(), altiplano::Error>(())
/// ```
pub fn load_cluster(text: &str) -> Result<Cluster, Error> {
    let path = Path::new(text);
    let is_file = path.exists() && !path.is_dir() || path.extension().is_some_and(|e| e == "toml");
    if is_file {
        return load_cluster_file(path);
    }
    match preset(text) {
        Ok(cluster) => Ok(cluster),
        // No preset has a slash in its name (`local:1/2` has one in its count), so the text must be a wrong path.
        Err(_) if path.is_dir() || text.split(':').next().is_some_and(|name| name.contains('/')) => {
            load_cluster_file(path)
        }
        Err(error) => Err(Error::Cluster { text: text.to_string(), error: Box::new(error) }),
    }
}

/// Loads a cluster from a TOML file.
pub(crate) fn load_cluster_file(file: &Path) -> Result<Cluster, Error> {
    let text =
        altiplano_runtime::files::read_text(file).map_err(|error| Error::Read { file: file.to_path_buf(), error })?;
    cluster_of(file, &text)
}

/// As `load_cluster_file`, for a file that is already in memory; a pipe can be read only once.
pub fn cluster_of(file: &Path, text: &str) -> Result<Cluster, Error> {
    parse(text).map_err(|error| Error::Cluster { text: file.display().to_string(), error: Box::new(error) })
}

/// Loads devices from a TOML file. They replace those of the catalogue with the same names.
pub fn load_devices(file: &Path) -> Result<Devices, Error> {
    let text =
        altiplano_runtime::files::read_text(file).map_err(|error| Error::Read { file: file.to_path_buf(), error })?;
    parse_devices(&text).map_err(|error| Error::Cluster { text: file.display().to_string(), error: Box::new(error) })
}
