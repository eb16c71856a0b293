# Knobs of Narayanan et al. 2021 (arXiv 2104.04473), table 1.
MEGATRON_ARGS=(
    --transformer-impl local
    --num-layers 96
    --hidden-size 16384
    --num-attention-heads 128
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 51200
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
    --micro-batch-size 1
    --global-batch-size 2160
    --num-virtual-stages-per-pipeline-rank 2
    --fp16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
