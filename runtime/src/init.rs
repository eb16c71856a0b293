//! Initial values of parameters, chosen by shape, use and name: gains are one, biases zero, matrices and embeddings
//! small normals, convolutions scaled by fan-in (He et al. 2015).

use crate::host::{HostData, HostTensor};
use crate::random::Stream;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Op};
use altiplano_ir::types::TensorType;

/// Standard deviation of matrices and embeddings, as in GPT-2.
const MATRIX_DEVIATION: f64 = 0.02;

/// The use of a one-dimensional parameter, as far as the graph shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Something is multiplied by it.
    Gain,
    /// It is added to something.
    Bias,
    /// The graph does not show it; the name decides.
    Unknown,
}

/// The role of a parameter by its first use. Broadcasts and conversions are looked through.
pub fn role(graph: &Graph, users: &[Vec<ValueId>], parameter: ValueId) -> Role {
    let mut v = parameter;
    while let [user, ..] = users[v.index()][..] {
        match &graph.node(user).op {
            Op::Binary(Binary::Multiply) => return Role::Gain,
            Op::Binary(Binary::Add | Binary::Subtract) => return Role::Bias,
            Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Convert(_) => v = user,
            _ => return Role::Unknown,
        }
    }
    Role::Unknown
}

/// The initial value of a parameter for `--init seed`. It depends on name, type, role and seed alone.
///
/// ```
/// use altiplano_ir::{dtype::DType, types::TensorType};
/// use altiplano_runtime::init::{Role, initial};
///
/// let gain = initial("params['layer_0']['norm']['scale']", &TensorType::new(DType::F32, [4]), Role::Unknown, 0);
/// assert_eq!(gain.to_f64(), [1.0; 4]);
/// ```
pub fn initial(name: &str, ty: &TensorType, role: Role, seed: u64) -> HostTensor {
    let constant = |value: f64| HostTensor::from_f64(ty.clone(), &vec![value; ty.elements() as usize]);
    if !ty.dtype.is_float() {
        return constant(0.0);
    }
    let deviation = match ty.rank() {
        0 | 1 => {
            let multiplies = match role {
                Role::Gain => true,
                Role::Bias => false,
                Role::Unknown => is_gain(name),
            };
            return constant(if multiplies { 1.0 } else { 0.0 });
        }
        2 | 3 => MATRIX_DEVIATION,
        _ => {
            // The output channels are the first or the last dimension, and kernels are small.
            let outputs = ty.shape[0].max(ty.shape[ty.rank() - 1]).max(1);
            (2.0 * outputs as f64 / ty.elements().max(1) as f64).sqrt()
        }
    };
    let values = Stream::new(seed, name).normals(ty.elements() as usize, deviation);
    HostTensor { ty: ty.with_dtype(DType::F32), data: HostData::F32(values) }.cast(ty.dtype)
}

/// Returns whether the name of a one-dimensional parameter marks a gain, by its last key. A one-dimensional `weight`
/// can only be that of a norm.
fn is_gain(name: &str) -> bool {
    let separators = |c: char| !c.is_alphanumeric() && c != '_';
    // Layer and row numbers carry no meaning.
    let says = |k: &&str| k.bytes().any(|b| !b.is_ascii_digit());
    let key = name.split(separators).rfind(says).unwrap_or("").to_lowercase();
    let names = ["g", "gain", "gamma", "scale", "weight", "w"];
    names.iter().any(|n| key == *n || key.strip_suffix(n).is_some_and(|rest| rest.ends_with('_')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::optimizer::leaf;

    #[test]
    fn names_and_shapes_choose_the_values() {
        let value =
            |name: &str, shape: &[u64]| initial(name, &TensorType::new(DType::F32, shape), Role::Unknown, 7).to_f64();
        for gain in [
            "g",
            "h.0.ln_1.weight",
            "params['ln']['scale']",
            "blocks[3]['ln_g']",
            "encoder/norm/gamma",
            "norms['scale'][3]",
        ] {
            assert_eq!(value(gain, &[3]), [1.0; 3], "{gain}");
        }
        for bias in ["b", "h.0.ln_1.bias", "params['ln']['beta']", "blocks[3]['ln_b']", "log"] {
            assert_eq!(value(bias, &[3]), [0.0; 3], "{bias}");
        }
        let deviation = |values: &[f64]| (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt();
        let matrix = value("w", &[100, 200]);
        assert!((deviation(&matrix) - 0.02).abs() < 1e-3);
        // Both common layouts of a convolution from 16 to 64 channels have fan-in 144.
        for shape in [[3, 3, 16, 64], [64, 16, 3, 3]] {
            assert!((deviation(&value("conv", &shape)) - (2.0f64 / 144.0).sqrt()).abs() < 5e-3);
        }
        assert_eq!(matrix, value("w", &[100, 200]));
        assert_ne!(matrix, value("v", &[100, 200]));
        let half = initial("w", &TensorType::new(DType::BF16, [100, 200]), Role::Unknown, 7);
        assert_eq!(half.ty.dtype, DType::BF16);
        assert!((half.to_f64()[5] - matrix[5]).abs() < 1e-3);
    }

    /// The role of an argument without a name follows from its use.
    #[test]
    fn uses_tell_gains_from_biases() {
        let mut graph = Graph::new("norm");
        let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
        let x = leaf(&mut graph, "x", ty(&[2, 3]));
        let [gain, bias, other] = ["arg1", "arg2", "arg3"].map(|name| leaf(&mut graph, name, ty(&[3])));
        let rows = graph.broadcast(gain, &[2, 3], &[1]);
        let scaled = graph.mul(x, rows);
        let rows = graph.broadcast(bias, &[2, 3], &[1]);
        graph.add(scaled, rows);
        graph.reduce(other, altiplano_ir::op::Reducer::Sum, &[0]);
        let users = graph.users();
        let roles = [gain, bias, other].map(|v| role(&graph, &users, v));
        assert_eq!(roles, [Role::Gain, Role::Bias, Role::Unknown]);
        assert_eq!(initial("arg1", &ty(&[3]), roles[0], 0).to_f64(), [1.0; 3]);
        assert_eq!(initial("arg2", &ty(&[3]), roles[1], 0).to_f64(), [0.0; 3]);
    }
}
