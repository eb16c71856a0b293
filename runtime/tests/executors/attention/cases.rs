// Attention in many shapes, with and without gradients.

/// Synthetic values around zero; booleans are mostly true.
fn values(ty: &TensorType, seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    Tensor::from_fn(ty.clone(), |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let unit = (state >> 40) as f64 / (1u64 << 24) as f64;
        match ty.dtype {
            DType::Bool => f64::from(u8::from(unit > 0.2)),
            dtype => dtype.round(2.0 * unit - 1.0),
        }
    })
}

#[derive(Clone, Copy, PartialEq)]
enum Mask {
    None,
    Causal,
    /// Keys at least ten positions back. The first ten queries see none, and weigh all alike.
    Late,
    /// A bias that is added, for each head.
    Bias,
    /// A boolean mask for each sample.
    Seen,
}

/// Attention of `[batch, queries, heads, depth]` on `[batch, keys, kv, depth]`, with values of `width`.
struct Case {
    name: &'static str,
    dtype: DType,
    batch: u64,
    heads: [u64; 2],
    lengths: [u64; 2],
    sizes: [u64; 2],
    mask: Mask,
    backward: bool,
}

fn cases(dtype: DType) -> Vec<Case> {
    let case = |name, heads, lengths, sizes, mask, backward| {
        Case { name, dtype, batch: 2, heads, lengths, sizes, mask, backward }
    };
    vec![
        case("plain", [2, 2], [70, 70], [16, 16], Mask::None, false),
        case("causal", [2, 2], [70, 70], [16, 16], Mask::Causal, false),
        case("grouped", [4, 2], [50, 50], [8, 8], Mask::Causal, false),
        case("crossed with a bias", [2, 2], [40, 130], [24, 8], Mask::Bias, false),
        case("hidden keys", [2, 1], [65, 64], [16, 32], Mask::Seen, false),
        case("one query", [2, 2], [3, 90], [1, 3], Mask::None, false),
        case("wide heads", [1, 1], [300, 280], [128, 128], Mask::Causal, false),
        case("gradients", [2, 2], [70, 70], [16, 16], Mask::None, true),
        case("causal gradients", [2, 2], [70, 70], [20, 20], Mask::Causal, true),
        case("gradients in groups", [4, 2], [50, 50], [8, 8], Mask::Causal, true),
        case("gradients across", [2, 1], [40, 130], [24, 8], Mask::Seen, true),
        case("gradients where rows see nothing", [1, 1], [70, 200], [16, 16], Mask::Late, true),
        case("gradients of wide heads", [1, 1], [290, 300], [128, 128], Mask::Causal, true),
    ]
}

impl Case {
    /// The graph of the case, and the values that a kernel must write.
    fn graph(&self) -> (Graph, BTreeSet<ValueId>) {
        let Case { dtype, batch, heads: [heads, kv], lengths: [queries, keys], sizes: [depth, width], .. } = *self;
        let mut g = Graph::new(self.name);
        let parameter = |g: &mut Graph, name: &str, shape: &[u64]| {
            let ty = TensorType::new(dtype, shape);
            g.emit(Op::Parameter(Parameter::new(name, ty)), &[])
        };
        let q = parameter(&mut g, "q", &[batch, queries, heads, depth]);
        let k = parameter(&mut g, "k", &[batch, keys, kv, depth]);
        let v = parameter(&mut g, "v", &[batch, keys, kv, width]);
        let of_mask = |g: &mut Graph, dtype: DType, shape: &[u64]| {
            Some(g.emit(Op::Input(Input { name: "mask".into(), ty: TensorType::new(dtype, shape) }), &[]))
        };
        let mask = match self.mask {
            Mask::None | Mask::Causal => None,
            Mask::Late => Some(causal_mask(&mut g, queries, keys, -10).expect("a mask")),
            Mask::Bias => of_mask(&mut g, DType::F32, &[1, heads, queries, keys]),
            Mask::Seen => of_mask(&mut g, DType::Bool, &[batch, 1, 1, keys]),
        };
        let scale = 1.0 / (depth as f64).sqrt();
        let causal = self.mask == Mask::Causal;
        let mixed = attention_of_heads(&mut g, q, k, v, mask, scale, causal).expect("attention of these shapes");
        if !self.backward {
            return (expand(&g).graph, BTreeSet::from([expand(&g).values[mixed.index()]]));
        }
        // The loss is not linear in the result, so its gradient depends on the result.
        let mixed = g.convert(mixed, DType::F32);
        let square = g.mul(mixed, mixed);
        let weights = g.emit(Op::Input(Input { name: "weights".into(), ty: g.ty(square).clone() }), &[]);
        let weighted = g.mul(square, weights);
        let loss = g.reduce(weighted, Reducer::Sum, &[0, 1, 2, 3]);
        g.outputs = vec![loss];
        let mut with = differentiate(&g, &[]).expect("a loss");
        let gradients = [q, k, v].map(|p| with.contributions[p.index()][0].1);
        with.graph.outputs = gradients.into_iter().chain([loss]).collect();
        let expanded = expand(&with.graph);
        let written = with.graph.outputs.iter().map(|o| expanded.values[o.index()]).collect();
        (expanded.graph, written)
    }
}
