//! Options of clients and of compilations.

use super::sys::NamedValue;

/// An option that a plugin understands when it makes a client: `cpu_device_count`.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientOption {
    Text(String, String),
    Number(String, i64),
    Numbers(String, Vec<i64>),
    Flag(String, bool),
    Real(String, f32),
}

/// The devices that a program runs on: `replicas` times `partitions`.
///
/// Replicas run the program as it is. Partitions are made by XLA, by Shardy's shardings of a program for one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub replicas: u32,
    pub partitions: u32,
}

/// How XLA orders the ops of a program for GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// Communication starts early. XLA holds more values for it, as far as a device's whole memory permits.
    Overlap,
    /// As few bytes as possible are held.
    Memory,
}

impl Order {
    /// XLA's settings for the order, under its default of starting communication early.
    pub fn settings(self) -> Vec<ClientOption> {
        let pass = || ClientOption::Text("xla_disable_hlo_passes".into(), "latency-hiding-scheduler".into());
        (self == Order::Memory).then(pass).into_iter().collect()
    }
}

impl Default for Launch {
    fn default() -> Self {
        Launch { replicas: 1, partitions: 1 }
    }
}

impl Launch {
    /// `CompileOptionsProto` in the wire format of protocol buffers. Settings are XLA's own flags by name. `devices` are
    /// the ids of the devices of the replicas, of which each has one partition; XLA chooses them if there are none.
    pub(super) fn encoded(self, settings: &[ClientOption], devices: &[u64]) -> Vec<u8> {
        // `ExecutableBuildOptionsProto`: no device, replicas, partitions, SPMD, the device of each replica, and Shardy as
        // its partitioner.
        let mut build = Vec::new();
        field(&mut build, 1, u64::MAX);
        field(&mut build, 4, u64::from(self.replicas));
        field(&mut build, 5, u64::from(self.partitions));
        if self.partitions > 1 {
            field(&mut build, 6, 1);
            field(&mut build, 19, 1);
        }
        if !devices.is_empty() {
            // `DeviceAssignmentProto`: replicas, computations, and the devices of each computation as packed integers.
            let (mut packed, mut of_computation, mut assignment) = (Vec::new(), Vec::new(), Vec::new());
            devices.iter().for_each(|&device| varint(&mut packed, device));
            message(&mut of_computation, 1, &packed);
            field(&mut assignment, 1, devices.len() as u64);
            field(&mut assignment, 2, 1);
            message(&mut assignment, 3, &of_computation);
            message(&mut build, 9, &assignment);
        }
        let mut options = Vec::new();
        message(&mut options, 3, &build);
        // Field 7 is a map from names to values: a message for each entry, with the name as 1 and the value as 2.
        for setting in settings {
            let (name, mut value) = (setting.name(), Vec::new());
            match setting {
                ClientOption::Text(_, text) => message(&mut value, 1, text.as_bytes()),
                ClientOption::Flag(_, flag) => field(&mut value, 2, u64::from(*flag)),
                ClientOption::Number(_, number) => field(&mut value, 3, *number as u64),
                // XLA's settings have no lists.
                ClientOption::Numbers(..) => continue,
                ClientOption::Real(_, real) => {
                    varint(&mut value, 4 << 3 | 1);
                    value.extend(f64::from(*real).to_le_bytes());
                }
            }
            let mut entry = Vec::new();
            message(&mut entry, 1, name.as_bytes());
            message(&mut entry, 2, &value);
            message(&mut options, 7, &entry);
        }
        options
    }
}

impl ClientOption {
    fn name(&self) -> &str {
        match self {
            ClientOption::Text(name, _)
            | ClientOption::Number(name, _)
            | ClientOption::Numbers(name, _)
            | ClientOption::Flag(name, _)
            | ClientOption::Real(name, _) => name,
        }
    }
}

/// An option as the API takes it. It borrows from the option.
pub(super) fn named(option: &ClientOption) -> NamedValue {
    let name = option.name();
    let (kind, value, value_size) = match option {
        ClientOption::Text(_, value) => (0, value.as_ptr() as usize as u64, value.len()),
        ClientOption::Number(_, value) => (1, *value as u64, 1),
        ClientOption::Numbers(_, values) => (2, values.as_ptr() as usize as u64, values.len()),
        ClientOption::Real(_, value) => (3, u64::from(value.to_bits()), 1),
        ClientOption::Flag(_, value) => (4, u64::from(*value), 1),
    };
    NamedValue { name: name.as_ptr().cast(), name_size: name.len(), kind, value, value_size, ..Default::default() }
}

/// A field with a message or a text.
fn message(bytes: &mut Vec<u8>, number: u64, value: &[u8]) {
    varint(bytes, number << 3 | 2);
    varint(bytes, value.len() as u64);
    bytes.extend(value);
}

/// A field with an integer.
fn field(bytes: &mut Vec<u8>, number: u64, value: u64) {
    varint(bytes, number << 3);
    varint(bytes, value);
}

fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_encoded_as_protocol_buffers() {
        let minus_one = [0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        let one = [&[0x1a, 15][..], &minus_one, &[0x20, 1, 0x28, 1]].concat();
        assert_eq!(Launch::default().encoded(&[], &[]), one);
        let four = [&[0x1a, 21][..], &minus_one, &[0x20, 0x80, 2, 0x28, 4, 0x30, 1, 0x98, 1, 1]].concat();
        assert_eq!(Launch { replicas: 256, partitions: 4 }.encoded(&[], &[]), [&[0x1a, four[1]], &four[2..]].concat());
        assert_eq!(usize::from(four[1]), four.len() - 2);
        let assigned =
            [&[0x1a, 27][..], &minus_one, &[0x20, 2, 0x28, 1, 0x4a, 10, 8, 2, 16, 1, 26, 4, 10, 2, 3, 5]].concat();
        assert_eq!(Launch { replicas: 2, partitions: 1 }.encoded(&[], &[3, 5]), assigned);
    }
}
