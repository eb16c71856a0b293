//! Bytes that training keeps for each parameter: the parameter, its gradient and its optimizer state. Activations depend
//! on the plan and are counted in the planner.

use altiplano_ir::dtype::DType;
use altiplano_ir::optimizer::Optimizer;

/// Bytes of one element's parameter.
pub fn parameter_bytes_per_element(parameter: DType) -> u64 {
    parameter.bytes()
}

/// Bytes of one element's gradient: the parameter's type.
pub fn gradient_bytes_per_element(parameter: DType) -> u64 {
    parameter.bytes()
}

/// Bytes of one element's optimizer state, all of it f32: momentum for sgd, `m` and `v` for adam and adamw, and a master
/// copy where the parameter is of half precision.
///
/// Example: adamw keeps 8 bytes an f32 parameter and 12 bytes a bf16 parameter, as in Rajbhandari et al. 2020 ("ZeRO",
/// section 3.1, where K = 12).
pub fn optimizer_bytes_per_element(optimizer: &Optimizer, parameter: DType) -> u64 {
    optimizer.slots(parameter).len() as u64 * DType::F32.bytes()
}

/// Bytes of all three for a tensor of `elements`; saturates.
pub fn training_bytes(optimizer: &Optimizer, parameter: DType, elements: u64) -> u64 {
    let per_element = parameter_bytes_per_element(parameter)
        + gradient_bytes_per_element(parameter)
        + optimizer_bytes_per_element(optimizer, parameter);
    elements.saturating_mul(per_element)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_each_optimizer() {
        let plain_sgd = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let table = [
            // (optimizer, parameter, state, in all)
            (plain_sgd, DType::F32, 0, 8),
            (plain_sgd, DType::BF16, 4, 8),
            (Optimizer::sgd(), DType::F32, 4, 12),
            (Optimizer::sgd(), DType::F16, 8, 12),
            (Optimizer::adam(), DType::F32, 8, 16),
            (Optimizer::adam(), DType::F16, 12, 16),
            (Optimizer::adamw(), DType::F32, 8, 16),
            (Optimizer::adamw(), DType::BF16, 12, 16),
        ];
        for (optimizer, dtype, state, all) in table {
            let name = optimizer.name();
            assert_eq!(optimizer_bytes_per_element(&optimizer, dtype), state, "{name} {dtype}");
            assert_eq!(training_bytes(&optimizer, dtype, 10), 10 * all, "{name} {dtype}");
        }
        assert_eq!(training_bytes(&Optimizer::adamw(), DType::F32, u64::MAX), u64::MAX);
    }
}
