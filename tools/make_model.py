"""Makes a tiny model of random weights on disk, with a tokenizer of one token a word; no hub is asked.

The same arguments give the same weights. Words are ``w4`` … ``w2047``, so a prompt of n words has n tokens.
Needs torch and transformers: run it with .venv-vllm/bin/python. vLLM's latent attention on a CPU with AMX takes
bfloat16 only; the other architectures run in float32, too.
"""

import argparse
import copy
import json
import os
from collections.abc import Sequence
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
ARCHITECTURES = ("llama", "mla", "gemma3", "cohere2", "granite", "llava", "eagle", "mimo")
"""``eagle`` is a draft for ``llama``; ``mimo`` predicts a token more by a layer of its own (MTP)."""
IMAGE_PIXELS, PATCH_PIXELS = 56, 14
IMAGE_TOKEN = "<image>"
IMAGE_TOKEN_ID = VOCABULARY - 1
"""An image is one such token in a prompt of tokens, and 16 in the model, one for each patch."""


def save_tokenizer(directory: Path, last_words: Sequence[str] = ()) -> Any:
    """Writes the tokenizer, which splits words at spaces, and returns it; these words are the last ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = range(len(SPECIAL), VOCABULARY - len(last_words))
    words = [*SPECIAL, *(f"w{number}" for number in numbers), *last_words]
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
    return fast


def make_llava(size: argparse.Namespace) -> int:
    """Writes a llama that sees images through a tiny CLIP, with its processor. Returns the number of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": IMAGE_PIXELS, "patch_size": PATCH_PIXELS, "projection_dim": 64}
    config = AutoConfig.for_model(
        "llava",
        text_config=model_config(argparse.Namespace(**{**vars(size), "architecture": "llama"})).to_dict(),
        vision_config={"model_type": "clip_vision_model", **vision},
        image_token_index=IMAGE_TOKEN_ID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(IMAGE_PIXELS // PATCH_PIXELS) ** 2,
    )
    torch.manual_seed(size.seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        # Features of different images have to differ as much as words do.
        if "vision" in name or "projector" in name:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(size.directory)
    # vLLM knows these weights by their earlier names.
    tensors = {
        name.replace("model.vision_tower.", "vision_tower.vision_model.")
        .replace("model.multi_modal_projector.", "multi_modal_projector.")
        .replace("model.language_model.", "language_model.model."): tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, size.directory / "model.safetensors", metadata={"format": "pt"})
    edge = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    images = CLIPImageProcessorPil(size={"shortest_edge": IMAGE_PIXELS}, crop_size=edge)
    LlavaProcessor(
        images,
        save_tokenizer(size.directory, [IMAGE_TOKEN]),
        patch_size=PATCH_PIXELS,
        vision_feature_select_strategy="default",
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=1,
    ).save_pretrained(size.directory)
    return sum(parameter.numel() for parameter in model.parameters())


def model_config(size: argparse.Namespace) -> Any:
    """Returns the architecture's configuration.

    Plain or latent attention, three sliding layers per full one, or a Mamba layer before each layer of attention.
    """
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
    if size.architecture in ("gemma3", "cohere2"):
        kinds = [
            "full_attention" if layer % FULL_ATTENTION_EVERY == 0 else "sliding_attention"
            for layer in range(1, size.layers + 1)
        ]
        extra = {"sliding_window": size.sliding_window, "layer_types": kinds}
        if size.architecture == "cohere2":
            return AutoConfig.for_model("cohere2", **{**common, "tie_word_embeddings": True}, **grouped, **extra)
        return AutoConfig.for_model("gemma3_text", **common, **grouped, **extra)
    if size.architecture == "granite":
        return AutoConfig.for_model(
            "granitemoehybrid",
            **common,
            num_key_value_heads=size.kv_heads,
            shared_intermediate_size=size.intermediate,
            layer_types=["mamba", "attention"] * (size.layers // 2),
            position_embedding_type="rope",
            num_local_experts=0,
            num_experts_per_tok=0,
            mamba_n_heads=8,
            mamba_d_head=size.hidden * 2 // 8,
            mamba_n_groups=1,
            mamba_d_state=64,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=32,
        )
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


def make_mimo(size: argparse.Namespace, dtype: Any) -> Any:
    """Returns a Qwen 2 with one layer more, which predicts the token after the next one; transformers ignores it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = model_config(argparse.Namespace(**{**vars(size), "architecture": "llama"})).to_dict()
    for name in ("model_type", "architectures", "layer_types"):
        config.pop(name, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **config), dtype=dtype)
    layer = copy.deepcopy(model.model.layers[0])
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        layer.register_module(name, copy.deepcopy(model.model.norm))
    layer.register_module("input_proj", torch.nn.Linear(2 * size.hidden, size.hidden, bias=False, dtype=dtype))
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=size.initializer_range)
    model.model.register_module("mtp_layers", torch.nn.ModuleList([layer]))
    return model


def make_eagle(size: argparse.Namespace, dtype: Any) -> Any:
    """Returns the layers of a draft that reads a model's hidden states; it has the model's embedding and head."""
    import torch
    from transformers import AutoModelForCausalLM

    one = argparse.Namespace(**{**vars(size), "architecture": "llama", "layers": 1})
    draft = AutoModelForCausalLM.from_config(model_config(one), dtype=dtype).model
    del draft.embed_tokens, draft.norm, draft.layers[0].input_layernorm
    draft.register_module("fc", torch.nn.Linear(2 * size.hidden, size.hidden, bias=False, dtype=dtype))
    torch.nn.init.normal_(draft.fc.weight, std=size.initializer_range)
    return draft


def patch_config(directory: Path, **values: object) -> None:
    """Sets values in a saved model's configuration."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}, indent=1), encoding="utf-8")


def make_model(size: argparse.Namespace) -> int:
    """Writes model and tokenizer to ``size.directory``. Returns the number of parameters."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM

    if size.architecture == "llava":
        return make_llava(size)
    dtype = getattr(torch, size.dtype)
    save_tokenizer(size.directory)
    torch.manual_seed(size.seed)
    if size.architecture == "eagle":
        model = make_eagle(size, dtype)
        model.save_pretrained(size.directory)
        patch_config(size.directory, architectures=["LlamaForCausalLM"])
        return sum(parameter.numel() for parameter in model.parameters())
    if size.architecture == "mimo":
        model = make_mimo(size, dtype)
    else:
        model = AutoModelForCausalLM.from_config(model_config(size), dtype=dtype)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(size.directory)
    if size.architecture == "mimo":
        patch_config(size.directory, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
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
