# Knobs of NVIDIA-NeMo/Megatron-Bridge@00b7660b docs/performance-summary.md, 25.11, DGX-H100.
def recipe(config):
    config.model.tensor_model_parallel_size = 4
    config.model.pipeline_model_parallel_size = 8
    config.model.virtual_pipeline_model_parallel_size = 5
    config.model.context_parallel_size = 1
    config.model.expert_model_parallel_size = 1
    config.model.sequence_parallel = True
    config.model.seq_length = 8192
    config.train.micro_batch_size = 1
    config.train.global_batch_size = 128
    config.ddp.use_distributed_optimizer = True
    config.ddp.overlap_grad_reduce = True
    config.ddp.overlap_param_gather = True
    config.mixed_precision = "bf16_with_fp8_current_scaling_mixed"
    return config
