# Knobs of AI-Hypercomputer/maxtext@232369cc MaxText/configs/a3/llama_3.1_405b/128vm.sh.
python3 -m MaxText.train llama3.1_405b.yml \
    hardware=gpu \
    model_name=llama3.1-405b \
    attention=cudnn_flash_te \
    remat_policy=full \
    scan_layers=True \
    per_device_batch_size=1.0 \
    max_target_length=8192 \
    dcn_fsdp_parallelism=128 \
    ici_fsdp_parallelism=8
