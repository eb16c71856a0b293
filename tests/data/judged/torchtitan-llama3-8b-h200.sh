# Knobs of pytorch/torchtitan@bcdeaa37 benchmarks/llama3_8b_h200_2025-06_torchtitan.md.
torchrun --nnodes 4 --nproc_per_node 8 torchtitan/train.py \
    --training.local_batch_size=2 \
    --training.seq_len=8192 \
    --activation_checkpoint.mode=selective \
    --model.converters="float8" \
    --float8.enable_fsdp_float8_all_gather
