"""Judges every split of a model over two nodes, and plans around the best."""

import itertools

import altiplano

config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 8, "n_head": 16}

with altiplano.Oracle(config, "dgx-a100:2", seq=1024, precision="bf16", global_batch=64) as oracle:
    judged = {
        (tp, pp, zero): oracle.judge(tp=tp, pp=pp, zero=zero)
        for tp, pp, zero in itertools.product((1, 2, 4, 8), (1, 2, 4), (0, 1))
    }
    for (tp, pp, zero), judgement in sorted(judged.items()):
        verdict = f"{judgement.step_seconds:.3g} s" if judgement else judgement.reason
        print(f"tp {tp} pp {pp} zero {zero}: {verdict}")
    (tp, pp, _), best = min(((k, j) for k, j in judged.items() if j), key=lambda of: of[1].step_seconds)
    plan = oracle.plan(tp=tp, pp=pp)
    print(f"best as given: tp {tp} pp {pp}, {best.step_seconds:.3g} s; with layouts searched: {plan.step_seconds:.3g} s")
