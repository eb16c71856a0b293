//! Options of clients and of compilations.

/// An option that a plugin understands when it makes a client: `cpu_device_count`.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientOption {
    Text(String, String),
    Number(String, i64),
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

impl Default for Launch {
    fn default() -> Self {
        Launch { replicas: 1, partitions: 1 }
    }
}

impl Launch {
    /// `CompileOptionsProto` in the wire format of protocol buffers.
    pub(super) fn encoded(self) -> Vec<u8> {
        // `ExecutableBuildOptionsProto`: no device, replicas, partitions, SPMD, and Shardy as its partitioner.
        let mut build = Vec::new();
        field(&mut build, 1, u64::MAX);
        field(&mut build, 4, u64::from(self.replicas));
        field(&mut build, 5, u64::from(self.partitions));
        if self.partitions > 1 {
            field(&mut build, 6, 1);
            field(&mut build, 19, 1);
        }
        // Its place in `CompileOptionsProto` is field 3, of a length.
        let mut options = vec![3 << 3 | 2];
        varint(&mut options, build.len() as u64);
        options.extend(build);
        options
    }
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
        assert_eq!(Launch::default().encoded(), one);
        let four = [&[0x1a, 21][..], &minus_one, &[0x20, 0x80, 2, 0x28, 4, 0x30, 1, 0x98, 1, 1]].concat();
        assert_eq!(Launch { replicas: 256, partitions: 4 }.encoded(), [&[0x1a, four[1]], &four[2..]].concat());
        assert_eq!(usize::from(four[1]), four.len() - 2);
    }
}
