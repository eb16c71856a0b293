//! Links between the devices of a node for collectives that are measured alone. Short messages take a quarter to a third
//! of what nccl-tests takes, as if no host started the calls one by one: as in a CUDA graph. The table itself does not say
//! how its calls were started.
//!
//! Source: 5,382 rows of the table of NCCL 2.23 to 2.29 inside a node published with NVIDIA's AIConfigurator (2025; 256
//! bytes to 512 MB over 2, 4 and 8 devices, of 8 or 16 bits). The constants are fitted to half of its rows, drawn at
//! random, by the mean absolute logarithm of the ratio, with those below 64 KiB at a weight of 0.4. The median errors
//! on the other half are 4 % on A100, H100 and B200; nine of ten are within 14, 16 and 13 %.

use crate::node_link::{Exchange, NodeLink, Protocol, ProtocolFigures, Sharp, constants, protocol};

const fn exchange(protocol: Protocol, start_s: f64, message_s: f64, efficiency: f64, exposed: f64) -> Exchange {
    // Fitted messages are in seconds; 3 us is the catalogue's latency of NVLink.
    Exchange { protocol, start_s, message: message_s / 3e-6, efficiency, exposed }
}

/// 8 x A100, 504 rows.
const AMPERE: [ProtocolFigures; 3] =
    [protocol(0, 8.0e-6, 0.95e-6, 0.0275), protocol(1, 10.8e-6, 1.04e-6, 0.398), protocol(2, 31.5e-6, 4.96e-6, 0.757)];

/// 8 x H100, 1,854 rows. In-switch reduction is that of calls which a host starts.
const HOPPER: [ProtocolFigures; 3] =
    [protocol(0, 4.8e-6, 0.775e-6, 0.0323), protocol(1, 5.6e-6, 0.86e-6, 0.383), protocol(2, 18.9e-6, 0.85e-6, 0.797)];

/// 8 x B200, 3,024 rows.
const BLACKWELL: [ProtocolFigures; 3] =
    [protocol(0, 13.5e-6, 0.88e-6, 0.0155), protocol(1, 7.6e-6, 1.37e-6, 0.312), protocol(2, 13.5e-6, 5.8e-6, 0.826)];

pub(crate) static SWITCH_3: NodeLink = NodeLink {
    name: "NVLink 3, switched, in a CUDA graph",
    exchanges: &[
        exchange(Protocol::LowLatency, 12.2e-6, 0.2e-6, 0.267, 0.585),
        exchange(Protocol::Simple, 23.1e-6, 2.4e-6, 0.669, 0.224),
    ],
    ..constants(&AMPERE, 0.527, None)
};

pub(crate) static SWITCH_4: NodeLink = NodeLink {
    name: "NVLink 4, switched, in a CUDA graph",
    exchanges: &[
        exchange(Protocol::LowLatency, 6.55e-6, 0.176e-6, 0.054, 1.0),
        exchange(Protocol::Simple, 13.2e-6, 0.02e-6, 0.678, 0.157),
    ],
    ..constants(&HOPPER, 0.546, Some(Sharp { start_s: 89.5e-6, efficiency: 0.679 }))
};

pub(crate) static SWITCH_5: NodeLink = NodeLink {
    name: "NVLink 5, switched, in a CUDA graph",
    exchanges: &[
        exchange(Protocol::LowLatency, 9.3e-6, 0.2e-6, 0.028, 1.0),
        exchange(Protocol::Simple, 14.8e-6, 0.5e-6, 0.658, 0.854),
    ],
    ..constants(&BLACKWELL, 0.775, Some(Sharp { start_s: 27e-6, efficiency: 0.29 }))
};
