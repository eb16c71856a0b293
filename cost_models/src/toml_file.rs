//! A cluster as a TOML file: written by users for machines that the catalogue does not have, and printed for any
//! cluster. Every mistake is reported with its line and column.

use crate::catalogue::{self, GPU_LAUNCH_S, MAX_DEVICES};
use crate::error::{ClusterError, Place, nearest};
use altiplano_ir::cluster::{
    Architecture, BetweenGroups, Cluster, Constants, DataStorage, Device, DeviceKind, Group, InterNode, IntraNode,
    NodeDisk, Reserved,
};
use altiplano_ir::dtype::DType;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use toml::Spanned;

/// The cluster of a TOML file.
///
/// ```
/// let cluster = altiplano_cost_models::parse(r#"
///     name = "two nodes"
///     [[group]]
///     nodes = 2
///     devices_per_node = 8
///     device = "A100-SXM-80GB"
///     intra_node = { kind = "nvswitch", bytes_per_s = 300e9, latency_s = 3e-6 }
///     inter_node = { bytes_per_s = 25e9, nics = 8, latency_s = 8e-6 }
/// "#)?;
/// assert_eq!(cluster.num_devices(), 16);
/// # Ok::<(), altiplano_cost_models::ClusterError>(())
/// ```
pub fn parse(text: &str) -> Result<Cluster, ClusterError> {
    let file: FileToml = toml::from_str(text).map_err(|e| ClusterError::Toml {
        place: Place::of(text, e.span().map_or(text.len(), |s| s.start)),
        message: e.message().to_string(),
    })?;
    let reader = Reader { text, devices: &file.device };
    // Check tables that no group uses as well, since they may be used next.
    for (name, figures) in &file.device {
        reader.device_table(name, figures)?;
    }
    let mut groups = Vec::new();
    let mut devices = 0;
    for group in &file.group {
        let read = reader.group(group.get_ref(), group.span().start)?;
        devices += u64::from(read.nodes) * u64::from(read.devices_per_node);
        if devices > MAX_DEVICES {
            return Err(ClusterError::TooManyDevices { place: reader.place(group), most: MAX_DEVICES });
        }
        groups.push(read);
    }
    if groups.is_empty() {
        return Err(ClusterError::NoGroup);
    }
    let between_groups = match &file.between_groups {
        Some(link) => Some(BetweenGroups {
            bytes_per_s: reader.positive("bytes_per_s", &link.bytes_per_s)?,
            latency_s: reader.not_negative("latency_s", &link.latency_s)?,
        }),
        None if groups.len() > 1 => return Err(ClusterError::NoLinkBetweenGroups),
        None => None,
    };
    let storage = file.storage.as_ref().map(|storage| reader.storage(storage)).transpose()?;
    Ok(Cluster { name: file.name, groups, between_groups, storage })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileToml {
    name: String,
    #[serde(default)]
    group: Vec<Spanned<GroupToml>>,
    #[serde(default)]
    device: BTreeMap<String, Spanned<DeviceToml>>,
    between_groups: Option<BetweenToml>,
    storage: Option<StorageToml>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupToml {
    nodes: Spanned<u64>,
    devices_per_node: Spanned<u64>,
    device: Spanned<String>,
    intra_node: Option<IntraToml>,
    inter_node: Option<InterToml>,
    host_memory_bytes: Option<Spanned<f64>>,
    price_per_hour: Option<Spanned<f64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceToml {
    /// A device of the catalogue that provides the figures missing in the table.
    like: Option<Spanned<String>>,
    kind: Option<DeviceKind>,
    memory_bytes: Option<Spanned<f64>>,
    memory_bytes_per_s: Option<Spanned<f64>>,
    peak_flops: Option<BTreeMap<DType, Spanned<f64>>>,
    launch_s: Option<Spanned<f64>>,
    l2_bytes: Option<Spanned<f64>>,
    multiprocessors: Option<Spanned<u64>>,
    watts: Option<Spanned<f64>>,
    power_limit_watts: Option<Spanned<f64>>,
    architecture: Option<Spanned<String>>,
    fused_attention: Option<bool>,
    reserved: Option<Reserved>,
    host_bytes_per_s: Option<Spanned<f64>>,
    #[serde(default)]
    constants: BTreeMap<String, Spanned<f64>>,
    /// Data that the constants were fitted to, for readers.
    #[serde(default, rename = "fit")]
    _fit: Vec<toml::Table>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct IntraToml {
    #[serde(default)]
    kind: String,
    bytes_per_s: Spanned<f64>,
    latency_s: Spanned<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InterToml {
    #[serde(default)]
    kind: String,
    bytes_per_s: Spanned<f64>,
    nics: Option<Spanned<u64>>,
    latency_s: Spanned<f64>,
    oversubscription: Option<Spanned<f64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BetweenToml {
    bytes_per_s: Spanned<f64>,
    latency_s: Spanned<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StorageToml {
    bytes_per_s: Spanned<f64>,
    /// Defaults to the rate of all nodes together.
    node_bytes_per_s: Option<Spanned<f64>>,
    metadata_ops_per_s: Option<Spanned<f64>>,
    node_disk: Option<DiskToml>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DiskToml {
    bytes: Spanned<f64>,
    bytes_per_s: Spanned<f64>,
}

/// Checks that the TOML parser cannot do.
struct Reader<'a> {
    text: &'a str,
    devices: &'a BTreeMap<String, Spanned<DeviceToml>>,
}

impl Reader<'_> {
    fn place<T>(&self, at: &Spanned<T>) -> Place {
        Place::of(self.text, at.span().start)
    }

    fn positive(&self, key: &'static str, at: &Spanned<f64>) -> Result<f64, ClusterError> {
        let value = *at.get_ref();
        if value.is_finite() && value > 0.0 {
            Ok(value)
        } else {
            Err(ClusterError::NotPositive { place: self.place(at), key, value })
        }
    }

    fn not_negative(&self, key: &'static str, at: &Spanned<f64>) -> Result<f64, ClusterError> {
        let value = *at.get_ref();
        if value.is_finite() && value >= 0.0 {
            Ok(value)
        } else {
            Err(ClusterError::Negative { place: self.place(at), key, value })
        }
    }

    /// A count of devices or of something that they hold, so at most [`MAX_DEVICES`].
    fn count(&self, key: &'static str, at: &Spanned<u64>) -> Result<u32, ClusterError> {
        match *at.get_ref() {
            0 => Err(ClusterError::Zero { place: self.place(at), key }),
            n if n > MAX_DEVICES => Err(ClusterError::TooManyDevices { place: self.place(at), most: MAX_DEVICES }),
            n => Ok(n as u32),
        }
    }

    /// A factor of 1 or more.
    fn oversubscription(&self, at: Option<&Spanned<f64>>) -> Result<f64, ClusterError> {
        match at.map(|a| (a, *a.get_ref())) {
            None => Ok(1.0),
            Some((_, factor)) if factor.is_finite() && factor >= 1.0 => Ok(factor),
            Some((at, value)) => Err(ClusterError::Oversubscription { place: self.place(at), value }),
        }
    }

    fn group(&self, group: &GroupToml, start: usize) -> Result<Group, ClusterError> {
        let nodes = self.count("nodes", &group.nodes)?;
        let devices_per_node = self.count("devices_per_node", &group.devices_per_node)?;
        let device = self.device(&group.device)?;
        let place = Place::of(self.text, start);
        let intra_node = match &group.intra_node {
            Some(link) => Some(IntraNode {
                kind: link.kind.clone(),
                bytes_per_s: self.positive("intra_node.bytes_per_s", &link.bytes_per_s)?,
                latency_s: self.not_negative("intra_node.latency_s", &link.latency_s)?,
            }),
            None if devices_per_node > 1 => {
                return Err(ClusterError::NoLink { place, of: "devices per node", key: "intra_node" });
            }
            None => None,
        };
        let inter_node = match &group.inter_node {
            Some(link) => Some(InterNode {
                kind: link.kind.clone(),
                bytes_per_s: self.positive("inter_node.bytes_per_s", &link.bytes_per_s)?,
                nics: link.nics.as_ref().map_or(Ok(1), |nics| self.count("inter_node.nics", nics))?,
                latency_s: self.not_negative("inter_node.latency_s", &link.latency_s)?,
                oversubscription: self.oversubscription(link.oversubscription.as_ref())?,
            }),
            None if nodes > 1 => return Err(ClusterError::NoLink { place, of: "nodes", key: "inter_node" }),
            None => None,
        };
        let price_per_hour =
            group.price_per_hour.as_ref().map(|p| self.not_negative("price_per_hour", p)).transpose()?;
        // A link that nothing crosses may be left out. It takes the figures of the other link, or of the memory.
        let memory_bytes_per_s = device.memory_bytes_per_s;
        let intra_node = intra_node.unwrap_or_else(|| {
            let (bytes_per_s, latency_s) = match &inter_node {
                Some(link) => (link.bytes_per_s * f64::from(link.nics), link.latency_s),
                None => (memory_bytes_per_s, 0.0),
            };
            IntraNode { kind: String::new(), bytes_per_s, latency_s }
        });
        let IntraNode { bytes_per_s, latency_s, .. } = intra_node;
        let same = InterNode { kind: String::new(), bytes_per_s, nics: 1, latency_s, oversubscription: 1.0 };
        let inter_node = inter_node.unwrap_or(same);
        let host = group.host_memory_bytes.as_ref().map(|b| self.positive("host_memory_bytes", b)).transpose()?;
        let host_memory_bytes = host.map(|bytes| bytes.ceil() as u64);
        Ok(Group {
            nodes,
            devices_per_node,
            device,
            intra_node,
            inter_node,
            host_memory_bytes,
            price_per_hour,
            dispatch: None,
        })
    }

    fn storage(&self, storage: &StorageToml) -> Result<DataStorage, ClusterError> {
        let bytes_per_s = self.positive("storage.bytes_per_s", &storage.bytes_per_s)?;
        let optional = |key, at: &Option<Spanned<f64>>| at.as_ref().map(|at| self.positive(key, at)).transpose();
        let disk = |disk: &DiskToml| {
            Ok(NodeDisk {
                bytes: self.positive("storage.node_disk.bytes", &disk.bytes)?.ceil() as u64,
                bytes_per_s: self.positive("storage.node_disk.bytes_per_s", &disk.bytes_per_s)?,
            })
        };
        Ok(DataStorage {
            bytes_per_s,
            node_bytes_per_s: optional("storage.node_bytes_per_s", &storage.node_bytes_per_s)?.unwrap_or(bytes_per_s),
            metadata_ops_per_s: optional("storage.metadata_ops_per_s", &storage.metadata_ops_per_s)?,
            node_disk: storage.node_disk.as_ref().map(disk).transpose()?,
        })
    }

    /// A device of the file, or else of the catalogue.
    fn device(&self, at: &Spanned<String>) -> Result<Device, ClusterError> {
        let name = at.get_ref();
        if let Some(figures) = self.devices.get(name) {
            return self.device_table(name, figures);
        }
        catalogue::device(name).ok_or_else(|| {
            let mut known: Vec<String> = self.devices.keys().cloned().collect();
            known.extend(catalogue::device_names());
            let nearest = nearest(name, &known);
            ClusterError::UnknownDevice { place: self.place(at), name: name.clone(), nearest, known }
        })
    }

    fn device_table(&self, name: &str, at: &Spanned<DeviceToml>) -> Result<Device, ClusterError> {
        let figures = at.get_ref();
        let like = figures.like.as_ref().map(|like| self.catalogued(like)).transpose()?;
        let missing = |key| ClusterError::NoFigure { place: self.place(at), name: name.to_string(), key };
        let figure = |key, stated: &Option<Spanned<f64>>, of: fn(&Device) -> f64| match (stated, &like) {
            (Some(stated), _) => self.positive(key, stated),
            (None, Some(like)) => Ok(of(like)),
            (None, None) => Err(missing(key)),
        };
        let peak_flops = match (&figures.peak_flops, &like) {
            (Some(stated), _) => {
                let peaks = stated.iter().map(|(&dtype, peak)| Ok((dtype, self.positive("peak_flops", peak)?)));
                peaks.collect::<Result<BTreeMap<_, _>, _>>()?
            }
            (None, Some(like)) => like.peak_flops.clone(),
            (None, None) => return Err(missing("peak_flops")),
        };
        // Every other type can be priced as f32, but f32 only as itself.
        if !peak_flops.contains_key(&DType::F32) {
            return Err(ClusterError::NoF32Peak { place: self.place(at), name: name.to_string() });
        }
        let launch_s = figures.launch_s.as_ref().map(|s| self.not_negative("launch_s", s)).transpose()?;
        let l2_bytes = figures.l2_bytes.as_ref().map(|b| self.positive("l2_bytes", b)).transpose()?;
        let multiprocessors = figures.multiprocessors.as_ref().map(|n| self.count("multiprocessors", n)).transpose()?;
        let watts = figures.watts.as_ref().map(|w| self.positive("watts", w)).transpose()?;
        let power_limit_watts =
            figures.power_limit_watts.as_ref().map(|w| self.positive("power_limit_watts", w)).transpose()?;
        let architecture = figures.architecture.as_ref().map(|at| {
            let wrong = |message| ClusterError::Toml { place: self.place(at), message };
            Architecture::try_from(at.get_ref().clone()).map_err(wrong)
        });
        let architecture = architecture.transpose()?;
        let known = like.as_ref();
        // The reserved memory is known only together with the device's own memory.
        let of_memory = known.filter(|_| figures.memory_bytes.is_none()).and_then(|d| d.reserved);
        let kind = figures.kind.or(known.map(|d| d.kind)).unwrap_or_default();
        let stated = figures.host_bytes_per_s.as_ref().map(|b| self.positive("host_bytes_per_s", b)).transpose()?;
        // The catalogue would not know it under another name.
        let of_like = known.filter(|d| d.name != name && (d.kind, kind) == (DeviceKind::Gpu, DeviceKind::Gpu));
        let host_bytes_per_s = stated.or(of_like.map(|d| catalogue::host_bytes_per_s(&d.name)));
        Ok(Device {
            name: name.to_string(),
            kind,
            memory_bytes: figure("memory_bytes", &figures.memory_bytes, |d| d.memory_bytes as f64)?.ceil() as u64,
            memory_bytes_per_s: figure("memory_bytes_per_s", &figures.memory_bytes_per_s, |d| d.memory_bytes_per_s)?,
            peak_flops,
            launch_s: launch_s.or(known.map(|d| d.launch_s)).unwrap_or(GPU_LAUNCH_S),
            l2_bytes: l2_bytes.map(|b| b.ceil() as u64).or(known.and_then(|d| d.l2_bytes)),
            multiprocessors: multiprocessors.or(known.and_then(|d| d.multiprocessors)),
            watts: watts.or(known.and_then(|d| d.watts)),
            power_limit_watts,
            architecture: architecture.or(known.and_then(|d| d.architecture)),
            fused_attention: figures.fused_attention,
            reserved: figures.reserved.or(of_memory),
            host_bytes_per_s,
            constants: self.constants(figures, known.map_or(name, |d| &d.name))?,
        })
    }

    /// The catalogue's device for a `like`.
    fn catalogued(&self, at: &Spanned<String>) -> Result<Device, ClusterError> {
        let name = at.get_ref();
        catalogue::device(name).ok_or_else(|| {
            let known = catalogue::device_names();
            let nearest = nearest(name, &known);
            ClusterError::UnknownLike { place: self.place(at), name: name.clone(), nearest, known }
        })
    }

    /// The constants of a table, if it has any or uses another device's figures under its own name. Constants that it
    /// does not state are the catalogue's for `like`.
    fn constants(&self, figures: &DeviceToml, like: &str) -> Result<Option<Constants>, ClusterError> {
        if figures.constants.is_empty() && figures.like.is_none() {
            return Ok(None);
        }
        let mut constants = catalogue::constants(like);
        // A rate that a file states without more is that in steps.
        if figures.constants.contains_key("matmul_efficiency") {
            constants.sustained_efficiency = 1.0;
        }
        for (name, stated) in &figures.constants {
            let (Some(constant), Some(&key)) =
                (constants.by_name(name), Constants::NAMES.iter().find(|known| *known == name))
            else {
                let known = Constants::NAMES.map(String::from).to_vec();
                return Err(ClusterError::UnknownConstant { place: self.place(stated), name: name.clone(), known });
            };
            // An efficiency must be above zero; all other constants may be zero.
            let most = match key {
                _ if key.ends_with("_efficiency") || key.ends_with("_loss") => 1.0,
                _ if key.ends_with("_s") => 1.0,
                "multiprocessors" => MAX_DEVICES as f64,
                _ => 1e18,
            };
            let value = match key.ends_with("_efficiency") {
                true => self.positive(key, stated)?,
                false => self.not_negative(key, stated)?,
            };
            if value > most {
                return Err(ClusterError::TooLarge { place: self.place(stated), key, value, most });
            }
            *constant = value;
        }
        Ok(Some(constants))
    }
}

/// Devices that replace the catalogue's devices of the same names.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Devices(BTreeMap<String, Device>);

impl Devices {
    /// Replaces devices of the cluster. Returns true if it has any of them.
    pub fn apply(&self, cluster: &mut Cluster) -> bool {
        let mut applies = false;
        for group in &mut cluster.groups {
            if let Some(device) = self.0.get(&group.device.name) {
                group.device = device.clone();
                applies = true;
            }
        }
        applies
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// The devices of a TOML file that has nothing else, as written by `altiplano calibrate`.
pub fn parse_devices(text: &str) -> Result<Devices, ClusterError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct DevicesToml {
        #[serde(default)]
        device: BTreeMap<String, Spanned<DeviceToml>>,
    }
    let file: DevicesToml = toml::from_str(text).map_err(|e| ClusterError::Toml {
        place: Place::of(text, e.span().map_or(text.len(), |s| s.start)),
        message: e.message().to_string(),
    })?;
    if file.device.is_empty() {
        return Err(ClusterError::NoDevice);
    }
    let reader = Reader { text, devices: &file.device };
    let devices = file.device.iter().map(|(name, at)| Ok((name.clone(), reader.device_table(name, at)?)));
    Ok(Devices(devices.collect::<Result<_, _>>()?))
}

/// The TOML text of a cluster, which [`parse`] reads back. Devices that are not the catalogue's get a table.
pub fn print(cluster: &Cluster) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_file(&mut out, cluster);
    out
}

fn write_file(out: &mut String, cluster: &Cluster) -> std::fmt::Result {
    writeln!(out, "name = {}", quoted(&cluster.name))?;
    cluster.groups.iter().try_for_each(|group| write_group(out, group))?;
    if let Some(link) = &cluster.between_groups {
        writeln!(out, "\n[between_groups]")?;
        writeln!(out, "bytes_per_s = {}", float(link.bytes_per_s))?;
        writeln!(out, "latency_s = {}", float(link.latency_s))?;
    }
    if let Some(storage) = &cluster.storage {
        write_storage(out, storage)?;
    }
    let mut written = BTreeSet::new();
    for device in cluster.groups.iter().map(|g| &g.device) {
        if catalogue::device(&device.name).as_ref() != Some(device) && written.insert(&device.name) {
            write_device(out, device)?;
        }
    }
    Ok(())
}

fn write_group(out: &mut String, group: &Group) -> std::fmt::Result {
    let (intra, inter) = (&group.intra_node, &group.inter_node);
    writeln!(out, "\n[[group]]")?;
    writeln!(out, "nodes = {}", group.nodes)?;
    writeln!(out, "devices_per_node = {}", group.devices_per_node)?;
    writeln!(out, "device = {}", quoted(&group.device.name))?;
    let (kind, rate, latency) = (quoted(&intra.kind), float(intra.bytes_per_s), float(intra.latency_s));
    writeln!(out, "intra_node = {{ kind = {kind}, bytes_per_s = {rate}, latency_s = {latency} }}")?;
    let (rate, latency) = (float(inter.bytes_per_s), float(inter.latency_s));
    let shared = match inter.oversubscription {
        1.0 => String::new(),
        factor => format!(", oversubscription = {}", float(factor)),
    };
    let kind = match inter.kind.as_str() {
        "" => String::new(),
        kind => format!("kind = {}, ", quoted(kind)),
    };
    let nics = inter.nics;
    writeln!(out, "inter_node = {{ {kind}bytes_per_s = {rate}, nics = {nics}, latency_s = {latency}{shared} }}")?;
    if let Some(bytes) = group.host_memory_bytes {
        writeln!(out, "host_memory_bytes = {}", float(bytes as f64))?;
    }
    if let Some(price) = group.price_per_hour {
        writeln!(out, "price_per_hour = {}", float(price))?;
    }
    Ok(())
}

fn write_storage(out: &mut String, storage: &DataStorage) -> std::fmt::Result {
    writeln!(out, "\n[storage]")?;
    writeln!(out, "bytes_per_s = {}", float(storage.bytes_per_s))?;
    writeln!(out, "node_bytes_per_s = {}", float(storage.node_bytes_per_s))?;
    if let Some(rate) = storage.metadata_ops_per_s {
        writeln!(out, "metadata_ops_per_s = {}", float(rate))?;
    }
    if let Some(NodeDisk { bytes, bytes_per_s }) = storage.node_disk {
        let (bytes, rate) = (float(bytes as f64), float(bytes_per_s));
        writeln!(out, "node_disk = {{ bytes = {bytes}, bytes_per_s = {rate} }}")?;
    }
    Ok(())
}

fn write_device(out: &mut String, device: &Device) -> std::fmt::Result {
    writeln!(out, "\n[device.{}]", quoted(&device.name))?;
    if device.kind == DeviceKind::Cpu {
        writeln!(out, "kind = \"cpu\"")?;
    }
    writeln!(out, "memory_bytes = {}", float(device.memory_bytes as f64))?;
    writeln!(out, "memory_bytes_per_s = {}", float(device.memory_bytes_per_s))?;
    let peaks: Vec<String> = device.peak_flops.iter().map(|(d, p)| format!("{d} = {}", float(*p))).collect();
    writeln!(out, "peak_flops = {{ {} }}", peaks.join(", "))?;
    writeln!(out, "launch_s = {}", float(device.launch_s))?;
    if let Some(bytes) = device.l2_bytes {
        writeln!(out, "l2_bytes = {}", float(bytes as f64))?;
    }
    if let Some(count) = device.multiprocessors {
        writeln!(out, "multiprocessors = {count}")?;
    }
    if let Some(watts) = device.watts {
        writeln!(out, "watts = {}", float(watts))?;
    }
    if let Some(watts) = device.power_limit_watts {
        writeln!(out, "power_limit_watts = {}", float(watts))?;
    }
    if let Some(architecture) = device.architecture {
        writeln!(out, "architecture = \"{architecture}\"")?;
    }
    if let Some(fused) = device.fused_attention {
        writeln!(out, "fused_attention = {fused}")?;
    }
    if let Some(Reserved { context_bytes, communication_bytes, allocator_bytes }) = device.reserved {
        let bytes = format!("context_bytes = {context_bytes}, communication_bytes = {communication_bytes}");
        writeln!(out, "reserved = {{ {bytes}, allocator_bytes = {allocator_bytes} }}")?;
    }
    if let Some(rate) = device.host_bytes_per_s {
        writeln!(out, "host_bytes_per_s = {}", float(rate))?;
    }
    if let Some(constants) = device.constants {
        write_constants(out, &device.name, constants)?;
    }
    Ok(())
}

/// The table of a device's constants.
pub fn write_constants(out: &mut String, device: &str, mut constants: Constants) -> std::fmt::Result {
    writeln!(out, "[device.{}.constants]", quoted(device))?;
    for name in Constants::NAMES {
        if let Some(value) = constants.by_name(name) {
            writeln!(out, "{name} = {}", float(*value))?;
        }
    }
    Ok(())
}

/// A TOML basic string, which may be a value or a key.
pub fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A number in scientific form, which TOML reads back as the same float.
pub fn float(value: f64) -> String {
    format!("{value:e}")
}

#[cfg(test)]
#[path = "toml_file_tests.rs"]
mod tests;
