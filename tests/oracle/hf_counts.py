"""Counts the weights of the configs in benches/configs/huggingface.jsonl as Transformers does, and says where a count differs.

    python hf_counts.py [FILE]
"""

import json
import sys
from pathlib import Path

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

HEADS = {
    "bert": "BertForMaskedLM",
    "clip": "CLIPModel",
    "modernbert": "ModernBertForMaskedLM",
    "siglip": "SiglipModel",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
}
# Types that Transformers has no class for, or only one for images and text together.
SAME_AS = {
    "gemma3": "gemma3_text",
    "kimi_k2": "deepseek_v3",
    "llama4": "llama4_text",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}


def counted(config):
    kind = config["model_type"]
    fields = config.get("text_config", config) if kind not in ("clip", "siglip") else config
    fields = {key: value for key, value in fields.items() if key not in ("model_type", "vision_config")}
    if kind.endswith("_vl"):
        fields.pop("rope_scaling", None)
    if kind in ("clip", "siglip"):
        fields = {key: value for key, value in config.items() if key != "model_type"}
    kind = SAME_AS.get(kind, kind)
    settings = hf.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = getattr(hf, HEADS.get(kind) or CAUSAL[kind])(settings)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    here = Path(__file__).resolve().parent.parent.parent
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else here / "benches/configs/huggingface.jsonl"
    failed = False
    for line in file.read_text().splitlines():
        case = json.loads(line)
        count = counted(case["config"])
        if count != case["parameters"]:
            print(f"FAILED       {case['name']}: {count}, not {case['parameters']}")
            failed = True
    sys.exit(failed)
