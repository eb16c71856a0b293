# Knobs of NVIDIA/Megatron-LM@157006d6 examples/gpt3/train_gpt3_175b_distributed.sh.
GPUS_PER_NODE=8
# The script has 1 for the reader to change.
NUM_NODES=16
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --clip-grad 1.0
    --fp16
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
    --tokenizer-type GPT2BPETokenizer
)
