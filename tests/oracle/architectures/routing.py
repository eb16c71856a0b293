"""Models in which indices that were computed decide what goes where."""

import jax
import jax.numpy as jnp
from jax import lax

from . import Weights, block, block_weights, causal, cross_entropy, ids, layer_norm

SIZE, WIDE, EXPERTS, VOCABULARY = 12, 24, 4, 30


def experts_weights(w):
    return {
        "router": w(SIZE, EXPERTS),
        "up": w(EXPERTS, SIZE, WIDE, fan_in=SIZE),
        "down": w(EXPERTS, WIDE, SIZE, fan_in=WIDE),
        "norm": w.norm(SIZE),
    }


def language_model(numbers, mixture, per_sample=False):
    """Experts choose among the tokens of the batch, or among those of each sample."""
    w = Weights(numbers)

    def loss(params, tokens, labels):
        x, extra = params["embedding"][tokens], 0.0
        for p in params["blocks"]:
            x = block(x, p["dense"], 2, causal(x.shape[1]))
            normed = layer_norm(x, p["experts"]["norm"])
            y, balance = mixture(normed if per_sample else normed.reshape(-1, SIZE), p["experts"])
            x, extra = x + y.reshape(x.shape), extra + 0.01 * balance
        return cross_entropy(x @ params["head"], labels) + extra

    blocks = [{"dense": block_weights(w, SIZE, WIDE), "experts": experts_weights(w)} for _ in range(2)]
    params = {"embedding": w(VOCABULARY, SIZE, fan_in=2), "blocks": blocks, "head": w(SIZE, VOCABULARY)}
    return loss, params, {"tokens": ids(numbers, VOCABULARY, 4, 6), "labels": ids(numbers, VOCABULARY, 4, 6)}, "f32"


def run_experts(inputs, p):
    return jnp.einsum("ecw,ews->ecs", jax.nn.silu(jnp.einsum("ecs,esw->ecw", inputs, p["up"])), p["down"])


def sorted_mixture(x, p, chosen=2):
    """Tokens are sorted by expert and scattered into the experts' slots; what finds no slot is dropped."""
    tokens, capacity = x.shape[0], x.shape[0] * chosen // EXPERTS
    probabilities = jax.nn.softmax(x @ p["router"], axis=-1)
    weights, experts = lax.top_k(probabilities, chosen)
    weights = weights / weights.sum(-1, keepdims=True)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    expert = experts.reshape(-1)[order]
    source = order // chosen
    first = jnp.searchsorted(expert, jnp.arange(EXPERTS), side="left")
    slot = jnp.arange(tokens * chosen) - first[expert]
    inputs = jnp.zeros((EXPERTS, capacity, SIZE)).at[expert, slot].set(x[source], mode="drop")
    outputs = run_experts(inputs, p)
    results = outputs.at[expert, slot].get(mode="fill", fill_value=0) * weights.reshape(-1)[order][:, None]
    used = jax.nn.one_hot(experts, EXPERTS).mean((0, 1))
    return jnp.zeros_like(x).at[source].add(results), (used * probabilities.mean(0)).sum() * EXPERTS


def gshard_mixture(x, p):
    """Two experts for each token, slots counted by cumulative sums of one-hot rows, dispatch by products."""
    capacity = x.shape[0] // EXPERTS
    probabilities = jax.nn.softmax(x @ p["router"], axis=-1)
    first = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), EXPERTS)
    rest = probabilities * (1 - first)
    second = jax.nn.one_hot(jnp.argmax(rest, axis=-1), EXPERTS)
    place1 = jnp.cumsum(first, axis=0) * first - first
    place2 = (jnp.cumsum(second, axis=0) - second + first.sum(0)) * second
    gate1, gate2 = (probabilities * first).sum(-1), (probabilities * second).sum(-1)
    total = gate1 + gate2 + 1e-9
    combine = 0
    for chosen, place, gate in [(first, place1, gate1 / total), (second, place2, gate2 / total)]:
        kept = chosen * (place < capacity)
        slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
        combine = combine + (gate[:, None] * kept)[:, :, None] * slot[:, None, :]
    inputs = jnp.einsum("tec,ts->ecs", (combine > 0).astype(x.dtype), x)
    balance = (first.mean(0) * probabilities.mean(0)).sum() * EXPERTS
    return jnp.einsum("tec,ecs->ts", combine, run_experts(inputs, p)), balance


def switch_mixture(x, p, chosen=2):
    """Slots of each sample by cumulative sums, boolean dispatch tensors, and experts before samples, as in T5X."""
    samples, tokens, _ = x.shape
    capacity = 5 * tokens * chosen // (4 * EXPERTS)
    probabilities = jax.nn.softmax(x @ p["router"], axis=-1)
    _, experts = lax.top_k(probabilities, chosen)
    # First choices of all tokens come before second ones.
    ordered = jnp.swapaxes(experts, 1, 2).reshape(samples, -1)
    mask = jax.nn.one_hot(ordered, EXPERTS, dtype=jnp.int32)
    place = (jnp.cumsum(mask, axis=1) * mask - 1).reshape(samples, chosen, tokens, EXPERTS).max(axis=1)
    dispatch = jax.nn.one_hot(place, capacity, dtype=jnp.bool_)
    combine = jnp.einsum("gse,gsec->gsec", probabilities, dispatch)
    inputs = jnp.swapaxes(jnp.einsum("gsm,gsec->gecm", x, dispatch), 0, 1)
    h = jax.nn.silu(jnp.einsum("egcm,emh->egch", inputs, p["up"]))
    outputs = jnp.swapaxes(jnp.einsum("egch,ehm->egcm", h, p["down"]), 0, 1)
    used = jax.nn.one_hot(experts, EXPERTS).mean((1, 2))
    balance = (used * probabilities.mean(1)).sum(-1).mean() * EXPERTS
    return jnp.einsum("gecm,gsec->gsm", outputs, combine), balance


def ragged_mixture(x, p):
    """One expert for each token; products of groups of rows that are as long as the experts' shares."""
    probabilities = jax.nn.softmax(x @ p["router"], axis=-1)
    expert = jnp.argmax(probabilities, axis=-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=EXPERTS).astype(jnp.int32)
    h = jax.nn.silu(lax.ragged_dot(x[order], p["up"], sizes))
    y = lax.ragged_dot(h, p["down"], sizes)[jnp.argsort(order)]
    gate = jnp.take_along_axis(probabilities, expert[:, None], axis=-1)
    return y * gate, (probabilities.mean(0) ** 2).sum()


def graph_network(numbers):
    """Messages along the edges of a graph, summed at their targets."""
    w, nodes, edges = Weights(numbers), 10, 24

    def loss(params, x, y, data):
        h = x @ params["in"]
        for p in params["layers"]:
            source, target = data[:, 0], data[:, 1]
            messages = jax.nn.relu(jnp.concatenate([h[source], h[target]], axis=-1) @ p["message"])
            summed = jax.ops.segment_sum(messages, target, num_segments=nodes)
            greatest = jax.ops.segment_max(messages, target, num_segments=nodes)
            greatest = jnp.where(jnp.isfinite(greatest), greatest, 0)
            h = h + jnp.tanh(jnp.concatenate([summed, greatest], axis=-1) @ p["update"])
        return ((h @ params["out"] - y) ** 2).mean()

    layers = [{"message": w(16, 8), "update": w(16, 8)} for _ in range(2)]
    params = {"in": w(5, 8), "layers": layers, "out": w(8, 2)}
    inputs = {"x": w(nodes, 5, fan_in=1), "y": w(nodes, 2, fan_in=1), "data": ids(numbers, nodes, edges, 2)}
    return loss, params, inputs, "f32"


MODELS = {
    "moe-sorted": lambda numbers: language_model(numbers, sorted_mixture),
    "moe-gshard": lambda numbers: language_model(numbers, gshard_mixture),
    "moe-switch": lambda numbers: language_model(numbers, switch_mixture, per_sample=True),
    "moe-ragged": lambda numbers: language_model(numbers, ragged_mixture),
    "graph-network": graph_network,
}
