"""Writes a tiny model with random weights and a word-level tokenizer: ``make_model.py OUT llama|gemma3|mla``."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2048, 4, 4, 2, 64, 256
WINDOW = 96


def write_tokenizer(out: str) -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, **{f"w{i}": i for i in range(4, VOCABULARY)}}
    words_to_ids = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    words_to_ids.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words_to_ids, **names).save_pretrained(out)


def configuration(kind: str):
    common = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=65536,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    if kind == "llama":
        return AutoConfig.for_model("llama", **common, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM)
    if kind == "gemma3":
        layers = ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(LAYERS)]
        own = dict(num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, sliding_window=WINDOW, layer_types=layers)
        return AutoConfig.for_model("gemma3_text", **common, **own)
    if kind == "mla":
        latent = dict(kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
        experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=256)
        plain = dict(first_k_dense_replace=LAYERS, topk_method="greedy", n_group=1, topk_group=1)
        return AutoConfig.for_model("deepseek_v2", **common, num_key_value_heads=HEADS, **latent, **experts, **plain)
    raise SystemExit(f"unknown kind {kind}")


def main(out: str, kind: str) -> None:
    write_tokenizer(out)
    config = configuration(kind)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:3])
