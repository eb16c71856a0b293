# Knobs of Narayanan et al. 2021 (arXiv 2104.04473), table 1.
MEGATRON_ARGS=(
    --transformer-impl local
    --num-layers 30
    --hidden-size 3072
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 51200
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 1
    --micro-batch-size 16
    --global-batch-size 512
    --fp16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
