"""Writes ONNX models with the values that belong to them: NAME.onnx and NAME.safetensors, as examples/evaluate reads them."""

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper
from safetensors.numpy import save_file

# Operands that must be known while a model is read, by op: sizes, axes and the like.
STATIC = {
    "CenterCropPad": [1], "Compress": [1], "ConstantOfShape": [0], "CumProd": [1], "CumSum": [1], "Expand": [1],
    "BlackmanWindow": [0], "HammingWindow": [0], "HannWindow": [0], "If": [0], "Loop": [0, 1], "NonZero": [0],
    "OneHot": [1], "Pad": [1, 3], "Range": [0, 1, 2], "Reshape": [1], "Resize": [1, 2, 3], "Slice": [1, 2, 3, 4],
    "Split": [1], "Squeeze": [1], "Tile": [1], "TopK": [1], "Trilu": [1], "Unsqueeze": [1], "Upsample": [1],
    "Dropout": [1, 2], "GRU": [4], "LSTM": [4], "RNN": [4],
}
for reduction in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split():
    STATIC["Reduce" + reduction] = [1]

EXACT = {np.float64: np.float64, np.float32: np.float32, np.float16: np.float16}


def storable(x):
    """What a .safetensors file has no type for, in one that holds the same values."""
    x = np.asarray(x)
    if x.dtype == ml_dtypes.bfloat16 or x.dtype.type in EXACT:
        pass
    elif x.dtype.kind == "V" or x.dtype.name.startswith("float"):
        x = x.astype(np.float32)
    elif x.dtype.name in ("int4", "int2"):
        x = x.astype(np.int8)
    elif x.dtype.name in ("uint4", "uint2"):
        x = x.astype(np.uint8)
    return np.ascontiguousarray(x).reshape(x.shape)


def is_plain(x):
    """Whether it is a tensor of numbers or booleans."""
    return isinstance(x, np.ndarray) and x.dtype.kind not in "OUSc" and x.dtype.name != "float4_e2m1fn"


def epsilon(x):
    """A unit of rounding; of what is exact, and of f64, in which nothing is computed, that of f32."""
    x = np.asarray(x)
    if x.dtype == np.float64:
        return 2.0**-23
    if x.dtype.kind in "iub" and x.dtype.name[:3] in ("int", "uin", "boo"):
        return 2.0**-23
    return float(ml_dtypes.finfo(x.dtype).eps)


def with_constants(model, values):
    """The model in which these inputs are initializers."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    kept = [i for i in model.graph.input if i.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name, value in values.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def bodies(graph):
    """The graph and the graphs inside it, innermost first."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from bodies(attribute.g)
    yield graph


def static_names(model):
    """Values that must be known, and what these are computed from, but for what only their sizes depend on."""
    names = set()
    for graph in bodies(model.graph):
        for node in reversed(graph.node):
            names |= {node.input[i] for i in STATIC.get(node.op_type, []) if i < len(node.input)}
            if names & set(node.output) and node.op_type not in ("Shape", "Size"):
                names |= set(node.input)
    return names - {""}


def write(path, model, inputs, results, tolerance, weights=()):
    """`inputs` by name; `tolerance` is (relative, absolute) in units of the result's rounding."""
    static = static_names(model)
    known = {name: x for name, x in inputs.items() if name in static}
    model = with_constants(model, known) if known else model
    tensors = {f"input/{name}": x for name, x in inputs.items() if name not in known}
    tensors |= dict(weights)
    for i, result in enumerate(results):
        coarse = max([epsilon(result)] + [epsilon(x) for x in inputs.values() if np.asarray(x).dtype.kind == "f"])
        tensors[f"result/{i}"] = result
        tensors[f"tolerance/{i}"] = np.array([t * coarse for t in tolerance], np.float32)
    onnx.save(model, f"{path}.onnx")
    save_file({name: storable(x) for name, x in tensors.items()}, f"{path}.safetensors")


def model_of(nodes, inputs, outputs, initializers=(), opset=20, functions=(), domains=()):
    """A model of nodes; `inputs` are arrays by name, `outputs` names whose types inference finds."""
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in inputs.items()]
    held = [numpy_helper.from_array(x, n) for n, x in dict(initializers).items()]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, "case", infos, results, held)
    opsets = [helper.make_opsetid("", opset)] + [helper.make_opsetid(d, 1) for d in domains]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=10)
