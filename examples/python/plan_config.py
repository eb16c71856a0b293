"""Plans a Hugging Face config, and compares the plan with others and with what runs today."""

import altiplano

config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 8, "n_head": 16}

plan = altiplano.plan(config, cluster="dgx-a100:1", seq=1024, precision="bf16", global_batch=64)
print(plan)
print(plan.why_not(tp=8))
print(plan.compare("tp=2 pp=2 mbs=4 recompute", measured="0.5s"))
try:
    altiplano.plan(config, cluster="dgx-a100:1", seq=1024, global_batch=64, tp=3)
except altiplano.OptionError as error:
    print(error)
