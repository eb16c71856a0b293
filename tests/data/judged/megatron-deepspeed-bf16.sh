# Knobs of deepspeedai/Megatron-DeepSpeed@d71f2ad7 examples_deepspeed/universal_checkpointing/megatron_gpt/run_bf16.sh.
TP=${TP:-1}
PP=${PP:-1}
DP=${DP:-1}
SP=${SP:-1}
WORLD_SIZE=$((TP*PP*DP*SP))
MICRO_BATCH=${MICRO_BATCH:-4}
GLOBAL_BATCH=$((MICRO_BATCH*WORLD_SIZE))
options=" \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP \
    --ds-sequence-parallel-size $SP \
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 32 \
    --seq-length 1024 \
    --loss-scale 12 \
    --max-position-embeddings 1024 \
    --micro-batch-size $MICRO_BATCH \
    --global-batch-size $GLOBAL_BATCH \
    --tokenizer-type GPT2BPETokenizer \
    --bf16 \
    --checkpoint-activations \
    --zero-stage=1 \
    --deepspeed-activation-checkpointing \
"
deepspeed --num_nodes 1 --num_gpus $WORLD_SIZE pretrain_gpt.py ${options}
