# Knobs of NVIDIA/Megatron-LM@157006d6 examples/llama/train_llama3_8b_h100_fp8.sh.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --swiglu
    --attention-backend fused
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --micro-batch-size 1
    --global-batch-size 128
    --bf16
    --grad-reduce-in-bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --vocab-size 128256
    "--fp8-format hybrid"
)
