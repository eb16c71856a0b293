# Knobs of deepspeedai/Megatron-DeepSpeed@dd16deb1 examples_deepspeed/MoE/ds_pretrain_gpt_1.3B_MoE128.sh.
EP_PARALLEL_SIZE=1
megatron_options=" \
    --tensor-model-parallel-size 1 \
    --moe-expert-parallel-size ${EP_PARALLEL_SIZE} \
    --num-experts 1 \
    --moe-loss-coeff 0.01 \
    --moe-train-capacity-factor 1.0 \
    --moe-min-capacity 4 \
    --micro-batch-size 8 \
    --global-batch-size 256 \
    --num-layers 24 \
    --hidden-size 1536 \
    --num-attention-heads 16 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --fp16 \
    --no-pipeline-parallel \
    --checkpoint-activations"
