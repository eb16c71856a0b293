//! The one error type of this crate: mistakes in the description of a cluster. Each names the place of the mistake and
//! what to write instead.

/// A place in a TOML file, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub line: usize,
    /// Characters, not bytes.
    pub column: usize,
}

impl Place {
    /// The place of a byte offset. An offset beyond the text gives the last place.
    pub fn of(text: &str, offset: usize) -> Place {
        let before: &[u8] = &text.as_bytes()[..offset.min(text.len())];
        let line_start = before.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
        Place {
            line: before.iter().filter(|&&b| b == b'\n').count() + 1,
            // Bytes that continue a UTF-8 character do not start one.
            column: before[line_start..].iter().filter(|&&b| b & 0xC0 != 0x80).count() + 1,
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// A preset or a cluster file that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClusterError {
    #[error("there is no preset `{name}`; {}", choose(nearest, known))]
    UnknownPreset { name: String, nearest: Option<String>, known: Vec<String> },
    #[error("there is no device `{name}` for a count of devices; {}", choose(nearest, known))]
    UnknownCounted { name: String, nearest: Option<String>, known: Vec<String> },
    #[error("`{text}`: a count must be from 1 to {most}; after `:` may stand `1/n` for the first n devices of a node")]
    Count { text: String, most: u64 },
    #[error("`{text}`: `/n` takes devices of one node, so write `:1/n`")]
    PartOfSeveralNodes { text: String },
    #[error("`{text}`: `/n` must be from 1 to {devices}, the devices of a node")]
    PartOfNode { text: String, devices: u32 },
    #[error("{place}: {message}")]
    Toml { place: Place, message: String },
    #[error(
        "{place}: there is no device `{name}` in the catalogue and no [device.\"{name}\"] table; {}",
        choose(nearest, known)
    )]
    UnknownDevice { place: Place, name: String, nearest: Option<String>, known: Vec<String> },
    #[error("{place}: `{key}` is {value}, but must be a finite number above 0")]
    NotPositive { place: Place, key: &'static str, value: f64 },
    #[error("{place}: `{key}` is {value}, but must be a finite number, 0 or more")]
    Negative { place: Place, key: &'static str, value: f64 },
    #[error("{place}: `{key}` is {value}, but must be at most {most}")]
    TooLarge { place: Place, key: &'static str, value: f64, most: f64 },
    #[error("{place}: `inter_node.oversubscription` is {value}, but must be a finite number, 1 or more")]
    Oversubscription { place: Place, value: f64 },
    #[error("{place}: `{key}` must be at least 1")]
    Zero { place: Place, key: &'static str },
    #[error("{place}: more than {most} devices")]
    TooManyDevices { place: Place, most: u64 },
    #[error("{place}: device `{name}` needs `f32` among its peak_flops")]
    NoF32Peak { place: Place, name: String },
    #[error("{place}: device `{name}` needs `{key}`, or `like` with a device that it takes the rest from")]
    NoFigure { place: Place, name: String, key: &'static str },
    #[error("{place}: there is no device `{name}` to be like; {}", choose(nearest, known))]
    UnknownLike { place: Place, name: String, nearest: Option<String>, known: Vec<String> },
    #[error("{place}: there is no constant `{name}`; known: {}", known.join(", "))]
    UnknownConstant { place: Place, name: String, known: Vec<String> },
    #[error("a file of devices needs at least one [device] table")]
    NoDevice,
    #[error("{place}: a group of several {of} needs `{key}`")]
    NoLink { place: Place, of: &'static str, key: &'static str },
    #[error("a cluster needs at least one [[group]]")]
    NoGroup,
    #[error("a cluster of several [[group]] needs [between_groups] with bytes_per_s and latency_s")]
    NoLinkBetweenGroups,
    #[error("line {line}: expected a GPU's name and memory, as in `NVIDIA A100-SXM4-80GB, 81920 MiB`")]
    GpuLine { line: usize },
    #[error("no GPU is listed; give what `nvidia-smi --query-gpu=name,memory.total --format=csv,noheader` prints")]
    NoGpus,
    #[error("there is no matrix of GPUs; give what `nvidia-smi topo -m` prints")]
    NoMatrix,
    #[error("line {line}: {found} connections where the heading has {expected} GPUs")]
    MatrixRow { line: usize, found: usize, expected: usize },
    #[error("the matrix has {found} rows of GPUs where the heading has {expected}")]
    MatrixRows { found: usize, expected: usize },
    #[error("line {line}: `{text}` is no connection; known are X, NV1, NV2 and so on, PIX, PXB, PHB, NODE and SYS")]
    Connection { line: usize, text: String },
    #[error("the matrix of connections has {matrix} GPUs, the list of names {listed}; they are of different machines")]
    GpuCount { matrix: usize, listed: usize },
    #[error("the GPUs are not alike, `{first}` and `{other}`; a group of nodes has one kind of device")]
    MixedGpus { first: String, other: String },
    #[error(
        "the GPU `{name}` is not in the catalogue; write a cluster file with a [device] table for it. Known: {}",
        known.join(", ")
    )]
    UnknownGpu { name: String, known: Vec<String> },
    #[error("no network card was found that could join {nodes} nodes; state the link in the file's `inter_node`")]
    NoNics { nodes: u32 },
    #[error("there is no row of measurements with two devices or more; give what a test of nccl-tests prints")]
    NoMeasurements,
    #[error("the log is of {devices} devices on {nodes} nodes, which nodes of {devices_per_node} devices cannot be")]
    OtherDevices { devices: u32, nodes: u32, devices_per_node: u32 },
    #[error("the log has {bytes} bytes in {seconds:.3e} s, less than starts and latencies alone take here")]
    TooFast { bytes: u64, seconds: f64 },
}

/// "did you mean `x`? known: `x`, `y`".
fn choose(nearest: &Option<String>, known: &[String]) -> String {
    let known = known.join(", ");
    match nearest {
        Some(name) => format!("did you mean `{name}`? Known: {known}"),
        None => format!("known: {known}"),
    }
}

/// The first known name that starts with `name`, else the nearest by edit distance if it is near enough to be a typing
/// error.
pub(crate) fn nearest(name: &str, known: &[String]) -> Option<String> {
    let wanted: Vec<char> = name.to_lowercase().chars().take(64).collect();
    if let Some(begun) = known.iter().find(|k| wanted.len() > 1 && k.to_lowercase().starts_with(&name.to_lowercase())) {
        return Some(begun.clone());
    }
    let near = known.iter().map(|k| (edit_distance(&wanted, &k.to_lowercase().chars().collect::<Vec<_>>()), k));
    let (distance, best) = near.min()?;
    (distance * 2 <= best.chars().count()).then(|| best.clone())
}

/// Number of insertions, deletions and substitutions that turn `a` into `b`.
fn edit_distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_lines_and_characters() {
        let text = "a = 1\nbé = 2\n";
        let place = |offset| {
            let p = Place::of(text, offset);
            (p.line, p.column)
        };
        assert_eq!(place(0), (1, 1));
        assert_eq!(place(4), (1, 5));
        assert_eq!(place(6), (2, 1));
        assert_eq!(place(9), (2, 3), "é is one character of two bytes");
        assert_eq!(place(1000), (3, 1));
    }

    #[test]
    fn nearest_names() {
        let known: Vec<String> = ["dgx-a100", "dgx-h100", "local"].map(String::from).to_vec();
        for (name, expect) in
            [("dgx_a100", Some("dgx-a100")), ("DGX-H100", Some("dgx-h100")), ("dgx", Some("dgx-a100")), ("tpu", None)]
        {
            assert_eq!(nearest(name, &known).as_deref(), expect, "{name}");
        }
    }
}
