# Knobs of AI-Hypercomputer/maxtext@0a09954a MaxText/configs/a3/llama_2_7b/16vm.sh.
python MaxText/train.py llama2_7b.yml \
    dcn_data_parallelism=16 ici_fsdp_parallelism=8 profiler=xplane
