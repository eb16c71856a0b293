"""Writes models of single ops with what they compute: NAME.onnx and NAME.safetensors.

    python onnx_ops.py DIRECTORY [SUBSTRING...]        only cases whose names have one of the substrings

Two sources: the cases that the standard itself publishes with the `onnx` package, whose expected results come with them, and
cases of our own, older forms and ONNX Runtime's additions among them, which ONNX Runtime computes.
"""

import sys
import warnings

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.backend.test.case.node import collect_testcases

from onnx_files import is_plain, model_of, write

warnings.filterwarnings("ignore")

# What a model to train has no use for: text, sequences, maps, optionals, randomness, image files, trees, signals.
OTHER = """Adagrad Adam AffineGrid ai.onnx.ml Bernoulli BitCast Col2Im DFT DeformConv Det GridSample ImageDecoder MatMulBnb4
    MaxRoiPool MaxUnpool MelWeightMatrix Momentum Multinomial NonMaxSuppression Optional OptionalGetElement
    OptionalHasElement RandomNormal RandomNormalLike RandomUniform RandomUniformLike RegexFullMatch RoiAlign STFT
    SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence
    ConcatFromSequence StringConcat StringNormalizer StringSplit TfIdfVectorizer Unique TensorScatter Gradient
    CausalConvWithState LinearAttention FlexAttention""".split()


def of_standard(wanted):
    for case in collect_testcases(None):
        ops = {n.op_type for n in case.model.graph.node}
        if ops & set(OTHER) or any(n.domain not in ("", "ai.onnx") for n in case.model.graph.node):
            continue
        if case.kind != "node" or (wanted and not any(w in case.name for w in wanted)):
            continue
        inputs, results = case.data_sets[0]
        arrays = [np.asarray(x) if not isinstance(x, (list, dict)) else x for x in list(inputs) + list(results)]
        opset = next((o.version for o in case.model.opset_import if o.domain in ("", "ai.onnx")), 1)
        if not all(is_plain(x) for x in arrays) or opset < 7:
            continue
        named = dict(zip([i.name for i in case.model.graph.input], [np.asarray(x) for x in inputs]))
        yield case.name, case.model, named, [np.asarray(x) for x in results]


class Draw:
    """Numbers that depend on the name of a case alone."""

    def __init__(self, name):
        self.random = np.random.default_rng(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**32)

    def normal(self, *shape):
        return self.random.standard_normal(shape).astype(np.float32)

    def ints(self, low, high, *shape, dtype=np.int64):
        return self.random.integers(low, high, shape).astype(dtype)


CASES = []


def case(name, op, inputs, opset=20, outputs=1, domain="", **attributes):
    CASES.append((name, op, inputs, opset, outputs, domain, attributes))


def i64(*values):
    return np.array(values, np.int64)


def f32(*values):
    return np.array(values, np.float32)


def define():
    d = Draw("own cases")
    x = d.normal(2, 3, 4)
    # Before opset 13: softmax over several dimensions, axes and limits as attributes.
    for opset in (11, 12, 13, 18):
        for axis in (0, 1, 2, -1):
            case(f"softmax_{opset}_{axis}", "Softmax", [x], opset, axis=axis)
            case(f"log_softmax_{opset}_{axis}", "LogSoftmax", [x], opset, axis=axis)
            case(f"hardmax_{opset}_{axis}", "Hardmax", [x], opset, axis=axis)
    for opset in (7, 10, 11):
        for op in "L1 L2 LogSumExp Max Mean Min Prod Sum SumSquare".split():
            case(f"reduce_{op}_{opset}", f"Reduce{op}", [x], opset, axes=[0, 2], keepdims=opset % 2)
    for op in "L1 L2 LogSumExp Max Mean Min Prod Sum SumSquare".split():
        case(f"reduce_{op}_18", f"Reduce{op}", [x, i64(1, -1)], 18, keepdims=0)
        case(f"reduce_{op}_18_nothing", f"Reduce{op}", [x, i64()], 18, noop_with_empty_axes=1)
    case("squeeze_11", "Squeeze", [d.normal(1, 3, 1, 2)], 11, axes=[0, -2])
    case("unsqueeze_11", "Unsqueeze", [x], 11, axes=[0, 3])
    case("split_11", "Split", [x], 11, outputs=2, axis=2, split=[1, 3])
    case("split_18_uneven", "Split", [d.normal(2, 7)], 18, outputs=3, axis=1, num_outputs=3)
    case("slice_9", "Slice", [x], 9, starts=[0, -3], ends=[2, 9223372036854775807], axes=[0, 2])
    case("slice_back", "Slice", [x, i64(-1, 2), i64(-9223372036854775807, 0), i64(1, 2), i64(-2, -1)])
    case("slice_none", "Slice", [x, i64(3), i64(1), i64(2)])
    case("clip_6", "Clip", [x], 10, min=-0.5, max=0.25)
    case("clip_only_max", "Clip", [x, None, f32(0.5).reshape(())], 13)
    case("pad_2", "Pad", [x], 10, pads=[0, 1, 0, 1, 0, 2], value=1.5)
    for mode in ("reflect", "edge", "wrap"):
        case(f"pad_{mode}", "Pad", [x, i64(0, 2, 1, 0, 1, 3)], 20, mode=mode)
        case(f"pad_{mode}_axes", "Pad", [x, i64(1, 2), None, i64(2)], 20, mode=mode)
    case("pad_crop", "Pad", [x, i64(0, -1, 1, 0, 2, -2), f32(3.0).reshape(())])
    case("top_k_9", "TopK", [d.normal(3, 6)], 9, outputs=2, k=2)
    for largest in (0, 1):
        case(f"top_k_{largest}", "TopK", [d.normal(3, 6), i64(4)], 11, outputs=2, largest=largest, axis=0 + 1)
    case("dropout_10", "Dropout", [x], 10, ratio=0.3)
    case("dropout_13", "Dropout", [x, f32(0.3).reshape(()), np.array(False)], 13, outputs=2)
    case("batch_norm_9", "BatchNormalization", [x, *(np.abs(d.normal(3)) for _ in range(4))], 9)
    case("batch_norm_15", "BatchNormalization", [x, *(np.abs(d.normal(3)) for _ in range(4))], 15, epsilon=0.1)
    case("batch_norm_training", "BatchNormalization", [x, *(np.abs(d.normal(3)) for _ in range(4))], 15, outputs=3,
         training_mode=1, momentum=0.7)
    case("layer_norm_outputs", "LayerNormalization", [x, d.normal(4), d.normal(4)], 17, outputs=3)
    case("layer_norm_axis", "LayerNormalization", [x, d.normal(3, 4)], 17, axis=1, epsilon=0.01)
    for axis in (0, 1, -1):
        for op in ("ArgMax", "ArgMin"):
            for last in (0, 1):
                case(f"{op}_{axis}_{last}", op, [np.round(x)], 13, axis=axis, keepdims=last, select_last_index=last)
    for exclusive in (0, 1):
        for reverse in (0, 1):
            case(f"cumsum_{exclusive}{reverse}", "CumSum", [x, np.array(1, np.int64)], 14, exclusive=exclusive, reverse=reverse)
    # Elementwise, with broadcasting and other types.
    pairs = {"f32": (d.normal(2, 1, 4), d.normal(3, 1)), "f64": (d.normal(4).astype(np.float64), d.normal(2, 4).astype(np.float64)),
             "i32": (d.ints(-9, 9, 3, 4, dtype=np.int32), d.ints(1, 5, 4, dtype=np.int32)),
             "i64": (d.ints(-9, 9, 2, 3), np.array(-4, np.int64))}
    for dtype, (a, b) in pairs.items():
        for op in "Add Sub Mul Div Equal Less Greater LessOrEqual GreaterOrEqual".split():
            case(f"{op}_{dtype}", op, [a, b], 17)
        for op in "Max Min".split():
            case(f"{op}_{dtype}", op, [a, b, a], 13)
        case(f"Mod_{dtype}", "Mod", [a, b], 13, fmod=int(dtype[0] == "f"))
        case(f"Where_{dtype}", "Where", [d.ints(0, 2, 4).astype(bool) if dtype != "i64" else d.ints(0, 2, 3).astype(bool), a, b], 16)
    case("Mod_i64_fmod", "Mod", [d.ints(-9, 9, 8), d.ints(-4, -1, 8)], 13, fmod=1)
    for exponent in (1.0, 2.0, 3.0, 0.5, -1.5):
        case(f"pow_{exponent}", "Pow", [np.abs(x) + 0.1, f32(exponent).reshape(())], 15)
    case("pow_int_exponent", "Pow", [x, np.array(2, np.int64)], 15)
    case("pow_ints", "Pow", [d.ints(1, 5, 3, dtype=np.int32), f32(2.0, 1.5, 0.5)], 15)
    for op in "Abs Ceil Cos Erf Exp Floor Neg Reciprocal Relu Sigmoid Sign Sin Softplus Softsign Tan Tanh Identity Round Atan Asinh Cosh Sinh Mish HardSwish Gelu Elu Selu Celu LeakyRelu HardSigmoid ThresholdedRelu IsNaN".split():
        case(f"unary_{op}", op, [x])
        case(f"unary_{op}_wide", op, [30 * x])
    for op in "Acos Asin Atanh".split():
        case(f"unary_{op}", op, [np.tanh(x)])
    for op in "Acosh Log Sqrt".split():
        case(f"unary_{op}", op, [np.abs(x) + 1])
    case("gelu_tanh", "Gelu", [x], approximate="tanh")
    case("prelu", "PRelu", [x, d.normal(3, 1)], 16)
    case("isinf", "IsInf", [np.where(x > 0, np.inf, -x * np.inf).astype(np.float32)], detect_negative=0)
    numbers = {"FLOAT": d.normal(6) * 9, "INT32": d.ints(-5, 5, 6, dtype=np.int32), "BOOL": d.ints(0, 2, 6).astype(bool),
               "FLOAT16": d.normal(6).astype(np.float16), "UINT8": d.ints(0, 200, 6, dtype=np.uint8)}
    for source, values in numbers.items():
        for to in ("FLOAT", "DOUBLE", "FLOAT16", "INT64", "INT32", "BOOL"):
            case(f"cast_{source}_{to}", "Cast", [values], 19, to=getattr(TensorProto, to))
    # Lookups and scatters.
    for axis in (0, 1, -1):
        case(f"gather_{axis}", "Gather", [x, d.ints(-2, 2, 2, 5)], 13, axis=axis)
        case(f"gather_elements_{axis}", "GatherElements", [x, d.ints(-2, 2, 2, 3, 2)], 13, axis=axis)
        case(f"scatter_elements_{axis}", "ScatterElements", [x, np.argsort(x, axis)[:1 if axis == 0 else 2, :2, :3] % 2, d.normal(1 if axis == 0 else 2, 2, 3)], 18, axis=axis,
             reduction="add")
        for reduction in ("none", "add", "mul", "min", "max"):
            size = x.shape[axis]
            order = np.argsort(d.normal(*x.shape), axis).astype(np.int64) - (size if reduction == "max" else 0)
            case(f"scatter_{reduction}_{axis}", "ScatterElements", [x, order, d.normal(*x.shape)], 18, axis=axis, reduction=reduction)
    case("gather_scalar", "Gather", [x, np.array(-1, np.int64)], 13, axis=2)
    case("gather_nd", "GatherND", [x, d.ints(-2, 2, 4, 2)], 13)
    case("gather_nd_batch", "GatherND", [x, d.ints(0, 3, 2, 5, 1)], 13, batch_dims=1)
    for reduction in ("none", "add", "mul", "min", "max"):
        case(f"scatter_nd_{reduction}", "ScatterND", [x, i64(1, 2, 0, -1).reshape(2, 2), d.normal(2, 4)], 18, reduction=reduction)
    case("one_hot_axis", "OneHot", [d.ints(-3, 3, 2, 3), np.array(3, np.int64), f32(2, 5)], 11, axis=1)
    # Matrix products.
    for left, right in (((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((5, 2, 3), (3, 4)), ((5, 1, 2, 3), (4, 3, 2))):
        case(f"matmul_{left}_{right}".replace(" ", ""), "MatMul", [d.normal(*left), d.normal(*right)], 13)
    for a in (0, 1):
        for b in (0, 1):
            left, right = d.normal(*((4, 3) if a else (3, 4))), d.normal(*((5, 4) if b else (4, 5)))
            case(f"gemm_{a}{b}", "Gemm", [left, right, d.normal(5)], 13, transA=a, transB=b, alpha=0.5, beta=2.0)
            case(f"fused_matmul_{a}{b}", "FusedMatMul", [left, right], domain="com.microsoft", transA=a, transB=b, alpha=0.25)
    for equation, shapes in {"bij,bjk->bik": [(2, 3, 4), (2, 4, 5)], "ij,jk": [(2, 3), (3, 4)], "...ij,...kj->...ik": [(2, 3, 4), (2, 5, 4)],
                             "bhsd,bthd->bhst": [(2, 3, 4, 5), (2, 6, 3, 5)], "i,j->ij": [(3,), (4,)], "ij->": [(3, 4)], "ij->ji": [(3, 4)],
                             "ij,jk,kl->il": [(2, 3), (3, 4), (4, 5)], "bnqd,bnkd->bnqk": [(2, 2, 3, 4), (2, 2, 5, 4)], "ijk,j->ik": [(2, 3, 4), (3,)]}.items():
        case(f"einsum_{equation}".replace(">", "").replace(".", "_").replace(",", "_"), "Einsum", [d.normal(*s) for s in shapes], 12, equation=equation)
    # Convolutions and pools.
    case("lrn", "LRN", [d.normal(2, 5, 3, 3)], 13, size=3, alpha=0.1, beta=0.6, bias=1.5)
    for dims in (1, 2, 3):
        image = d.normal(2, 4, *(7, 6, 5)[:dims])
        for auto in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
            for stride in (1, 2):
                how = {"pads": [1] * dims + [0] * dims} if auto == "NOTSET" else {}
                case(f"conv_{dims}_{auto}_{stride}", "Conv", [image, d.normal(6, 2, *(3, 2, 2)[:dims]), d.normal(6)], 11,
                     group=2, strides=[stride] * dims, auto_pad=auto, **how)
                case(f"max_pool_{dims}_{auto}_{stride}", "MaxPool", [image], 12, kernel_shape=[3] * dims, strides=[stride] * dims, auto_pad=auto, **how)
                case(f"average_pool_{dims}_{auto}_{stride}", "AveragePool", [image], 11, kernel_shape=[3] * dims, strides=[stride] * dims,
                     auto_pad=auto, count_include_pad=stride - 1, **how)
        for stride, dilation, group in ((1, 1, 1), (2, 1, 2), (3, 2, 1)):
            case(f"conv_dilated_{dims}_{stride}{dilation}{group}", "Conv", [d.normal(1, 4, *(9,) * dims), d.normal(4, 4 // group, *(2,) * dims)], 11,
                 strides=[stride] * dims, dilations=[dilation] * dims, group=group)
            if dims < 3:
                case(f"conv_transpose_{dims}_{stride}{dilation}{group}", "ConvTranspose", [image, d.normal(4, 3, *(3,) * dims), d.normal(3 * group)], 11,
                     strides=[stride] * dims, dilations=[dilation] * dims, group=group, pads=[1] * dims + [0] * dims, output_padding=[stride - 1] * dims)
        for ceil in (0, 1):
            case(f"max_pool_ceil_{dims}_{ceil}", "MaxPool", [image], 12, kernel_shape=[3] * dims, strides=[2] * dims, ceil_mode=ceil, pads=[1] * 2 * dims)
            case(f"average_pool_ceil_{dims}_{ceil}", "AveragePool", [image], 19, kernel_shape=[2] * dims, strides=[2] * dims, ceil_mode=ceil)
        for op in "GlobalAveragePool GlobalMaxPool GlobalLpPool".split():
            case(f"{op}_{dims}", op, [image], 18)
        case(f"instance_norm_{dims}", "InstanceNormalization", [image, d.normal(4), d.normal(4)], 18)
        case(f"group_norm_{dims}", "GroupNormalization", [image, d.normal(4), d.normal(4)], 21, num_groups=2)
    case("conv_transpose_shape", "ConvTranspose", [d.normal(1, 2, 3, 3), d.normal(2, 1, 3, 3)], 11, strides=[2, 2], output_shape=[7, 8])
    case("lp_pool", "LpPool", [d.normal(1, 2, 6, 6)], 18, kernel_shape=[2, 2], strides=[2, 2], p=2)
    # Resizing.
    image = d.normal(1, 2, 4, 6)
    for mode in ("nearest", "linear", "cubic"):
        for transform in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"):
            for sizes in ((8, 12), (6, 3), (5, 9)):
                case(f"resize_{mode}_{transform}_{sizes[0]}", "Resize", [image, None, None, i64(1, 2, *sizes)], 18, mode=mode,
                     coordinate_transformation_mode=transform)
    for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
        case(f"resize_{rounding}", "Resize", [image, None, f32(1, 1, 1.5, 0.7)], 18, nearest_mode=rounding)
    case("resize_10", "Resize", [image, f32(1, 1, 2, 3)], 10, mode="nearest")
    case("upsample_9", "Upsample", [image, f32(1, 1, 2, 3)], 9, mode="nearest")
    case("upsample_linear", "Upsample", [image, f32(1, 1, 2, 2)], 9, mode="linear")
    # Narrow integers.
    q = d.ints(0, 255, 2, 3, 4, dtype=np.uint8)
    case("dequantize", "DequantizeLinear", [q, np.float32(0.1), np.uint8(100)], 13)
    case("dequantize_axis", "DequantizeLinear", [q.view(np.int8), f32(0.1, 0.2, 0.3)], 13, axis=1)
    case("quantize", "QuantizeLinear", [x * 40, np.float32(0.3), np.uint8(120)], 13)
    case("quantize_axis", "QuantizeLinear", [x * 40, f32(0.3, 0.4, 0.5), np.array([1, 2, 3], np.int8)], 13, axis=1)
    case("mat_mul_integer", "MatMulInteger", [q[0], q[1].T.copy(), np.uint8(3), np.uint8(7)], 10)
    case("dynamic_quantize", "DynamicQuantizeLinear", [x], 11, outputs=3)
    # Recurrent layers.
    for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        for direction, n in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
            for extra in (False, True):
                inputs = [d.normal(5, 2, 3), d.normal(n, gates * 4, 3), d.normal(n, gates * 4, 4)]
                if extra:
                    inputs += [d.normal(n, gates * 8), None, d.normal(n, 2, 4)] + ([d.normal(n, 2, 4), d.normal(n, 12)] if op == "LSTM" else [])
                case(f"{op}_{direction}_{int(extra)}", op, inputs, 14, outputs=3 if op == "LSTM" else 2, hidden_size=4, direction=direction,
                     **({"linear_before_reset": int(extra)} if op == "GRU" else {}))
    # What ONNX Runtime adds.
    y = d.normal(2, 5, 8)
    contributed = lambda name, op, inputs, **how: case(name, op, inputs, domain="com.microsoft", **how)
    contributed("ms_gelu", "Gelu", [y])
    contributed("ms_fast_gelu", "FastGelu", [y, d.normal(8)])
    contributed("ms_bias_gelu", "BiasGelu", [y, d.normal(8)])
    contributed("ms_quick_gelu", "QuickGelu", [y], alpha=1.5)
    contributed("ms_skip_layer_norm", "SkipLayerNormalization", [y, d.normal(2, 5, 8), d.normal(8), d.normal(8), d.normal(8)], epsilon=1e-5)
    contributed("ms_skip_rms_norm", "SkipSimplifiedLayerNormalization", [y, d.normal(2, 5, 8), d.normal(8)], epsilon=1e-5)
    case("ms_rms_norm", "SimplifiedLayerNormalization", [y, d.normal(8)], 17, axis=-1, epsilon=1e-5)
    contributed("ms_attention", "MultiHeadAttention", [y, d.normal(2, 6, 8), d.normal(2, 6, 8)], num_heads=2)
    contributed("ms_attention_bias", "MultiHeadAttention", [y, y, y, d.normal(24), None, d.normal(1, 2, 5, 5)], num_heads=2, scale=0.3)
    contributed("ms_attention_causal", "MultiHeadAttention", [y, y, y], num_heads=4, unidirectional=1)
    angle = d.normal(9, 2)
    for interleaved in (0, 1):
        contributed(f"ms_rotary_{interleaved}", "RotaryEmbedding", [y, d.ints(0, 9, 2, 5), np.cos(angle), np.sin(angle)], interleaved=interleaved)
        contributed(f"ms_rotary_heads_{interleaved}", "RotaryEmbedding", [d.normal(2, 3, 5, 4), i64(2), np.cos(angle), np.sin(angle)], interleaved=interleaved)
    angle = d.normal(9, 8)
    lengths, total = np.full(2, 4, np.int32), np.array(5, np.int32)
    for rotary in (0, 1):
        tables = [np.cos(angle), np.sin(angle)] if rotary else []
        contributed(f"ms_grouped_{rotary}", "GroupQueryAttention", [d.normal(2, 5, 64), d.normal(2, 5, 32), d.normal(2, 5, 32), None, None, lengths, total, *tables],
                    num_heads=4, kv_num_heads=2, do_rotary=rotary, outputs=3)


def own(wanted):
    define()
    for name, op, inputs, opset, outputs, domain, attributes in CASES:
        if wanted and not any(w in name for w in wanted):
            continue
        names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
        arrays = {n: np.asarray(x) for n, x in zip(names, inputs) if n}
        results = [f"y{i}" for i in range(outputs)]
        node = helper.make_node(op, names, results, name=name, domain=domain, **attributes)
        model = model_of([node], arrays, results, opset=opset, domains=[domain] if domain else [])
        model.ir_version = min(model.ir_version, 10)
        yield f"own_{name}", model, arrays, None


def computed(model, inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def main(directory, wanted):
    onnxruntime.set_default_logger_severity(4)
    written, failed = 0, []
    for source in (of_standard, own):
        for name, model, inputs, results in source(wanted):
            try:
                write(f"{directory}/{name}", model, inputs, results or computed(model, inputs), (256, 64))
                written += 1
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
    print("\n".join([f"NOT WRITTEN  {line}" for line in failed] + [f"{written} cases"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
