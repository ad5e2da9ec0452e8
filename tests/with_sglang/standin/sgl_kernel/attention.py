"""The kernels of SGLang's attention on CPUs with AMX (``intel_amx``), in torch: ``torch_native`` has no latent one.

Arguments are those that SGLang 0.5.23 passes. Sinks, windows, caps and token trees are refused.
"""

import torch


def _attended(query, keys, values, scale):
    """Returns the attention of the last tokens of a sequence, each over the tokens up to itself."""
    mask = torch.ones(len(query), len(keys), dtype=torch.bool).tril(len(keys) - len(query))
    query, keys, values = (one.transpose(0, 1).unsqueeze(0) for one in (query, keys, values))
    found = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return found.squeeze(0).transpose(0, 1)


def _refuse(*given):
    if any(one is not None and bool(one) for one in given):
        raise NotImplementedError("the stand-in has plain causal attention only")


def _places(req_to_token, requests, seq_lens):
    """Yields where the tokens of each sequence lie."""
    for request, count in zip(requests.tolist(), seq_lens.tolist(), strict=True):
        yield req_to_token[request, :count]


def decode_attention_cpu(
    query,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    output,
    key,
    value,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    scale,
    logit_cap,
    is_cross_attention,
    sliding_window,
    encoder_lens,
    sinks,
):
    """Stores keys and values of one token of each sequence, and attends."""
    _refuse(logit_cap, is_cross_attention, sliding_window, encoder_lens, sinks, k_scale != 1, v_scale != 1)
    k_buffer[loc] = key.reshape(-1, *k_buffer.shape[1:])
    # The values of latent attention are a part of its keys.
    if v_buffer.data_ptr() != k_buffer.data_ptr():
        v_buffer[loc] = value.reshape(-1, *v_buffer.shape[1:])
    for row, places in enumerate(_places(req_to_token, req_pool_indices, seq_lens)):
        output[row] = _attended(query[row : row + 1], k_buffer[places], v_buffer[places], scale)[0]


def extend_attention_cpu(
    query,
    key,
    value,
    output,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_extend_len,
    scale,
    logit_cap,
    is_cross_attention,
    sliding_window,
    encoder_lens,
    sinks,
    tree_mask,
    is_causal,
):
    """Attends for the new tokens of each sequence, whose keys and values are given; those before lie in the buffers."""
    _refuse(logit_cap, is_cross_attention, sliding_window, encoder_lens, sinks, tree_mask, not is_causal)
    _refuse(k_scale != 1, v_scale != 1)
    sequences = zip(
        _places(req_to_token, req_pool_indices, seq_lens),
        extend_start_loc.tolist(),
        extend_seq_lens.tolist(),
        strict=True,
    )
    for places, start, count in sequences:
        keys, values = key[start : start + count], value[start : start + count]
        before = places[: len(places) - count]
        # Without a prefix, latent attention passes heads that are no rows of the buffers.
        if len(before):
            keys, values = torch.cat([k_buffer[before], keys]), torch.cat([v_buffer[before], values])
        output[start : start + count] = _attended(query[start : start + count], keys, values, scale)


def install():
    """Adds the kernels where SGLang looks for them."""
    for kernel in (decode_attention_cpu, extend_attention_cpu):
        setattr(torch.ops.sgl_kernel, kernel.__name__, kernel)
