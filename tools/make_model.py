"""Makes a tiny model of random weights on disk, with a tokenizer of one token a word; no hub is asked.

The same arguments give the same weights. Words are ``w4`` … ``w2047``, so a prompt of n words has n tokens.
Needs torch and transformers: run it with .venv-vllm/bin/python. vLLM's latent attention on a CPU with AMX takes
bfloat16 only; the other architectures run in float32, too.
"""

import argparse
import os
from pathlib import Path
from typing import Any

VOCABULARY = 2048
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
POSITIONS_MAX = 65_536
SLIDING_WINDOW = 512
LATENT_RANK, ROPE_DIM = 512, 64
LATENT_VALUES = LATENT_RANK + ROPE_DIM
"""Values that latent attention keeps per token in each layer."""
FULL_ATTENTION_EVERY = 4
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
ARCHITECTURES = ("llama", "mla", "gemma3")


def save_tokenizer(directory: Path) -> None:
    """Writes the tokenizer, which splits words at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[3],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def model_config(size: argparse.Namespace) -> Any:
    """Returns the architecture's configuration: plain or latent attention, or three sliding layers per full one."""
    from transformers import AutoConfig

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": POSITIONS_MAX,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
        "initializer_range": size.initializer_range,
    }
    grouped = {"num_key_value_heads": size.kv_heads, "head_dim": size.head_dim}
    if size.architecture == "llama":
        return AutoConfig.for_model("llama", **common, **grouped)
    if size.architecture == "gemma3":
        kinds = [
            "full_attention" if layer % FULL_ATTENTION_EVERY == 0 else "sliding_attention"
            for layer in range(1, size.layers + 1)
        ]
        extra = {"sliding_window": size.sliding_window, "layer_types": kinds}
        return AutoConfig.for_model("gemma3_text", **common, **grouped, **extra)
    return AutoConfig.for_model(
        "deepseek_v2",
        **common,
        num_key_value_heads=size.heads,
        kv_lora_rank=LATENT_RANK,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=ROPE_DIM,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=256,
        first_k_dense_replace=size.layers,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    )


def make_model(size: argparse.Namespace) -> int:
    """Writes model and tokenizer to ``size.directory``. Returns the number of parameters."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, size.dtype)
    save_tokenizer(size.directory)
    torch.manual_seed(size.seed)
    model = AutoModelForCausalLM.from_config(model_config(size), dtype=dtype)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(size.directory)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Parses the command line. The defaults make a model that answers within a second on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama")
    for name, default in {
        "layers": 8,
        "hidden": 256,
        "heads": 4,
        "kv-heads": 2,
        "head-dim": 64,
        "intermediate": 512,
        "sliding-window": SLIDING_WINDOW,
        "seed": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    spread = "spread of the weights, default 0.06; with half of it a rounding error stays small"
    parser.add_argument("--initializer-range", type=float, default=0.06, help=spread)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    size = parser.parse_args()
    parameters = make_model(size)
    print(f"{size.architecture}: {parameters / 1e6:.1f} M parameters in {size.directory}")


if __name__ == "__main__":
    main()
