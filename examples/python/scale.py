"""Recommends a number of nodes, and shows the page of its plan."""

import tempfile
from pathlib import Path

import altiplano

config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 8, "n_head": 16}
options = {"seq": 1024, "precision": "bf16", "global_batch": 256}

print(altiplano.scale(config, cluster="dgx-a100:1", nodes=[1, 2, 4], tokens=10e9, **options))
plan = altiplano.plan(config, cluster="dgx-a100:2", **options)
print(plan.advise(within=20))
with tempfile.TemporaryDirectory() as folder:
    page = Path(folder) / "plan.html"
    plan.to_html(page)
    print(f"the page has {page.stat().st_size} bytes")
