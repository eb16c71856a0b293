# Knobs of Narayanan et al. 2021 (arXiv 2104.04473), table 1.
MEGATRON_ARGS=(
    --transformer-impl local
    --num-layers 60
    --hidden-size 10240
    --num-attention-heads 80
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 51200
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 4
    --micro-batch-size 2
    --global-batch-size 1792
    --num-virtual-stages-per-pipeline-rank 3
    --fp16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
