# Knobs of Narayanan et al. 2021 (arXiv 2104.04473), table 1.
MEGATRON_ARGS=(
    --transformer-impl local
    --num-layers 40
    --hidden-size 6144
    --num-attention-heads 48
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 51200
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 1
    --micro-batch-size 8
    --global-batch-size 1024
    --fp16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
