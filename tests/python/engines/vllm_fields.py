"""Every field of vLLM's configuration: the fact that reflects it, or the reason why it changes no byte of a block.

Facts are those of ``facts`` and ``option_facts``. A field that a release adds has to be put here; if it changes bytes,
it needs a fact.
"""

REFLECTED = {
    "ModelConfig": {
        "model": "weights_digest",
        "revision": "weights_digest",
        "model_weights": "weights_digest",
        "hf_config": "config_digest",
        "hf_text_config": "config_digest",
        "hf_config_path": "config_digest",
        "hf_overrides": "config_digest",
        "config_format": "config_digest",
        "dtype": "dtype",
        "max_model_len": "max_model_len",
        "generation_config": "generation",
        "override_generation_config": "generation",
        "quantization": "quantization",
        "quantization_config": "quantization_config",
        "model_class_overrides": "model_class_overrides",
        "model_impl": "options",
        "code_revision": "options",
        "disable_sliding_window": "spec",
        # These become fields of MultiModalConfig.
        "multimodal_config": "media",
        "media_io_kwargs": "media",
        "mm_device_do_normalize": "media",
        "mm_encoder_attn_backend": "media",
        "mm_encoder_attn_dtype": "media",
        "mm_encoder_fp8_scale_path": "media",
        "mm_processor_device": "media",
        "mm_processor_kwargs": "media",
        "video_pruning_method": "media",
        "video_pruning_rate": "media",
    },
    "MultiModalConfig": {
        "media_io_kwargs": "media",
        "mm_device_do_normalize": "media",
        "mm_encoder_attn_backend": "media",
        "mm_encoder_attn_dtype": "media",
        "mm_encoder_fp8_scale_path": "media",
        "mm_processor_kwargs": "media",
        "video_pruning_method": "media",
        "video_pruning_rate": "media",
    },
    "CacheConfig": {
        "block_size": "block_tokens",
        "user_specified_block_size": "block_tokens",
        "effective_attention_block_size": "block_tokens",
        "mamba_block_size": "block_tokens",
        "user_specified_mamba_block_size": "block_tokens",
        "cache_dtype": "cache_dtype",
        "kv_cache_layout": "layout",
        "prefix_caching_hash_algo": "hash",
        "kv_cache_dtype_skip_layers": "options",
        "mamba_cache_dtype": "options",
        "mamba_ssm_cache_dtype": "options",
        "use_replayssm": "options",
        "mamba_cache_mode": "spec",
        "replayssm_buffer_len": "spec",
        "sliding_window": "spec",
        "use_kda_recoverssm": "spec",
    },
    "ParallelConfig": {
        "tensor_parallel_size": "kv_shards",
        "pipeline_parallel_size": "layers",
        "decode_context_parallel_size": "dcp",
        "cp_kv_cache_interleave_size": "dcp_interleave",
        "dcp_kv_cache_interleave_size": "dcp_interleave",
        "_allow_auto_resolve_cp_interleave_size": "dcp_interleave",
    },
    "AttentionConfig": {
        "backend": "backend",
        "backend_per_kind": "backend",
        "disable_flashinfer_q_quantization": "options",
        "indexer_kv_dtype": "options",
        "indexer_sparse_logits": "options",
        "use_fp4_indexer_cache": "options",
        "use_non_causal": "options",
        "use_prefill_query_quantization": "options",
    },
    "KernelConfig": {
        "linear_backend": "options",
        "linear_backend_per_quant": "options",
        "moe_backend": "options",
    },
    "LoadConfig": {"load_format": "load_format", "download_dir": "weights_digest"},
    "SpeculativeConfig": {
        "draft_model_config": "draft",
        "model": "draft",
        "method": "draft",
        "revision": "draft",
        "code_revision": "draft",
        "quantization": "draft",
        "disable_eagle_block_drop": "draft",
        "kv_cache_dtype": "spec",
        "attention_backend": "backend",
    },
    "LoRAConfig": {"lora_dtype": "adapter", "target_modules": "adapter", "default_mm_loras": "adapter"},
    "QuantizationConfigArgs": dict.fromkeys(("ignore", "linear", "moe", "targets"), "quantization_config"),
    "QuantSpec": dict.fromkeys(("activation", "weight"), "quantization_config"),
    "DiffusionConfig": dict.fromkeys(("canvas_length", "max_denoising_steps"), "options"),
    "VllmConfig": {
        "additional_config": "options",
        "diffusion_config": "options",
        "quant_config": "quantization",
    },
}
"""Fields by class, each with the name of the fact; "adapter" is part of the keys of requests that have one."""

ROUNDING = "another kernel, order or fusion for the same arithmetic: rounding, which vLLM's own cache mixes too"
PLACEMENT = "where something is held or computed, or by how many"
PROCESS = "how processes start, find each other and wait"
STEPS = "which tokens share a step"
TOKENS = "which tokens a prompt or an answer has: the block's hash has them"
OUTPUT = "what is made of the hidden states after the last layer"
DERIVED = "found by vLLM from other fields"
POOLS = "how many blocks there are, and for how long they stay"
DRAFTING = "which drafts are proposed and accepted: rejected ones are not stored"
REFUSED = "engines that set it are refused"
EXPERTS = "where experts are, and that their weights move: then weights in memory are not compared"
MEDIA_HELD = "which media are accepted, and how they are held until they are embedded: the block's hash has them"
ELSEWHERE = "a field of the class that it names is classified there"

HARMLESS: dict[str, dict[str, str]] = {
    "ModelConfig": {
        ROUNDING: "disable_cascade_attn enforce_eager mm_encoder_tp_mode",
        PLACEMENT: (
            "enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode sleep_mode_backend "
            "sleep_mode_offload_cudagraph sleep_preserve_parameter_names"
        ),
        PROCESS: "hf_token renderer_num_workers served_model_name trust_remote_code allow_deprecated_quantization",
        TOKENS: (
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin "
            "interleave_mm_strings enable_prompt_embeds"
        ),
        OUTPUT: (
            "logits_processors logprobs_mode max_logprobs seed use_fp64_gumbel word_embeddings_untied_by_checkpoint "
            "return_sampling_mask enable_return_routed_experts enable_trace_replay"
        ),
        REFUSED: "convert pooler_config runner mm_encoder_only",
        DERIVED: "is_submodel_config spec_target_max_model_len",
        MEDIA_HELD: (
            "allowed_local_media_path allowed_media_domains enable_mm_embeds language_model_only limit_mm_per_prompt "
            "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_hasher_algorithm mm_ipc_gpu_memory_gb "
            "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc "
            "skip_mm_profiling"
        ),
    },
    "MultiModalConfig": {
        ROUNDING: "mm_encoder_tp_mode",
        TOKENS: "interleave_mm_strings",
        REFUSED: "mm_encoder_only",
        MEDIA_HELD: (
            "allow_missing_mm_embeddings enable_mm_embeds language_model_only limit_per_prompt "
            "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_hasher_algorithm mm_ipc_gpu_memory_gb "
            "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc "
            "skip_mm_profiling"
        ),
    },
    "CacheConfig": {
        POOLS: (
            "gpu_memory_utilization kv_cache_max_concurrency kv_cache_memory_bytes kv_cache_size_tokens "
            "kv_offloading_backend kv_offloading_size num_cpu_blocks num_gpu_blocks num_gpu_blocks_override "
            "simple_cpu_offload_num_blocks prefix_cache_retention_interval swa_bounded_replay"
        ),
        STEPS: (
            "enable_prefix_caching prefix_match_unit enable_mamba_fine_grained_prefix_cache "
            "enable_mamba_shared_prefix_checkpoint kv_sharing_fast_prefill"
        ),
        # Padding is left out of a block.
        DERIVED: (
            "_block_size_resolved cache_hit_alignment_tokens hash_block_size is_attention_free mamba_page_size_padded "
            "skip_page_size_padded"
        ),
    },
    "ParallelConfig": {
        ROUNDING: (
            "all2all_backend dcp_comm_backend dcp_q_replicate disable_custom_all_reduce enable_expert_parallel "
            "enable_hc_sp"
        ),
        STEPS: "dbo_decode_token_threshold dbo_prefill_token_threshold enable_dbo ubatch_size dp_sync_interval",
        REFUSED: "prefill_context_parallel_size",
        EXPERTS: (
            "elastic_ep_max_dp_size enable_elastic_ep enable_ep_weight_filter enable_eplb eplb_config "
            "expert_placement_strategy is_moe_model"
        ),
        OUTPUT: "enable_batch_sharded_sampling",
        PROCESS: (
            "_api_process_count _api_process_rank _coord_store_port _data_parallel_master_port_list "
            "assigned_physical_gpu_ids cpu_distributed_timeout_seconds data_parallel_backend data_parallel_external_lb "
            "data_parallel_hybrid_lb data_parallel_index data_parallel_master_ip data_parallel_master_port "
            "data_parallel_rank data_parallel_rank_local data_parallel_rpc_port data_parallel_size "
            "data_parallel_size_local disable_nccl_for_dp_synchronization distributed_executor_backend "
            "distributed_timeout_seconds enable_fault_tolerance enable_shm_tensor_arena fault_tolerance_config "
            "master_addr master_port max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus "
            "numa_bind_nodes placement_group rank ray_runtime_env ray_workers_use_nsight sd_worker_cls worker_cls "
            "worker_extension_cls world_size"
        ),
    },
    "AttentionConfig": {
        ROUNDING: (
            "flash_attn_max_num_splits_for_cuda_graph flash_attn_version flex_attn_block_m flex_attn_block_n "
            "flex_attn_kv_block_size flex_attn_q_block_size indexer_tp_shard_min_rows minimax_m3_indexer_cp "
            "minimax_m3_msa_decode_backend mla_prefill_backend sparse_mla_force_mqa "
            "sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph "
            "trtllm_ragged_backend use_trtllm_attention"
        ),
        PLACEMENT: "hisparse_config",
    },
    "KernelConfig": {
        ROUNDING: (
            "enable_bf16x3_router_gemm enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup "
            "enable_rocm_segmented_attn_autotune ir_op_priority monokernel sparse_indexer_topk_backend"
        ),
    },
    "LoadConfig": {
        PROCESS: (
            "device ignore_patterns model_loader_extra_config pt_load_map_location safetensors_load_strategy "
            "safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load"
        ),
    },
    "SpeculativeConfig": {
        DRAFTING: (
            "disable_lookahead_block_hashes disable_padded_drafter_batch draft_lm_head_quantization "
            "draft_sample_method dspark_draft_topk enable_adaptive_verification fly_entropy_threshold "
            "fly_entropy_top_k fly_window_size index_share_for_mtp_iteration num_speculative_tokens "
            "num_speculative_tokens_per_batch_size parallel_drafting prompt_lookup_max prompt_lookup_min "
            "rejection_sample_method suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
            "suffix_decoding_max_tree_depth suffix_decoding_min_token_prob synthetic_acceptance_length "
            "synthetic_acceptance_rates use_heterogeneous_vocab use_local_argmax_reduction xpress_topc max_model_len"
        ),
        ROUNDING: "draft_parallel_config draft_tensor_parallel_size enforce_eager moe_backend tensor_parallel_size",
        PROCESS: "draft_load_config",
        ELSEWHERE: "target_model_config target_parallel_config",
    },
    "LoRAConfig": {
        ROUNDING: ("enable_mixed_moe_lora_format enable_moe_shared_loras fully_sharded_loras specialize_active_lora"),
        POOLS: "max_cpu_loras max_lora_cls_labels max_lora_rank max_loras",
        # An adapter's name is then part of the media's hash too.
        MEDIA_HELD: "enable_tower_connector_lora",
    },
    "MambaConfig": {ROUNDING: "backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds"},
    "SchedulerConfig": {
        STEPS: (
            "async_scheduling disable_chunked_mm_input enable_chunked_prefill encoder_cache_size "
            "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_active_seqs "
            "max_num_batched_tokens max_num_encoder_input_tokens max_num_queued_reqs max_num_queued_tokens "
            "max_num_scheduled_tokens max_num_seqs policy prefill_schedule_interval scheduler_cls "
            "scheduler_reserve_full_isl stream_interval watermark"
        ),
        DERIVED: "is_encoder_decoder is_multimodal_model max_model_len runner_type",
        POOLS: "disable_hybrid_kv_cache_manager",
    },
    "VllmConfig": {
        ELSEWHERE: (
            "attention_config aux_output_config cache_config compilation_config device_config ec_manager_config "
            "ec_transfer_config engram_config kernel_config kv_events_config kv_transfer_config load_config "
            "logging_config lora_config mamba_config model_config observability_config offload_config parallel_config "
            "profiler_config reasoning_config scheduler_config speculative_config structured_outputs_config "
            "watchdog_config watermark_config weight_transfer_config"
        ),
        ROUNDING: "optimization_level performance_mode",
        PROCESS: "instance_id shutdown_timeout",
    },
}
"""Fields by class and reason."""

WHOLE_CLASSES = {
    "AuxOutputConfig": OUTPUT,
    "CompilationConfig": ROUNDING,
    "DynamicShapesConfig": ROUNDING,
    "IrOpPriorityConfig": ROUNDING,
    "PassConfig": ROUNDING,
    "DeviceConfig": PLACEMENT,
    "EngramConfig": PLACEMENT,
    "HiSparseConfig": PLACEMENT,
    "OffloadConfig": PLACEMENT,
    "PrefetchOffloadConfig": PLACEMENT,
    "UVAOffloadConfig": PLACEMENT,
    "EPLBConfig": EXPERTS,
    "ECTransferConfig": MEDIA_HELD,
    "EncoderCacheManagerConfig": MEDIA_HELD,
    "KVTransferConfig": PROCESS,
    "FaultToleranceConfig": PROCESS,
    "KVEventsConfig": PROCESS,
    "LoggingConfig": PROCESS,
    "ObservabilityConfig": PROCESS,
    "ProfilerConfig": PROCESS,
    "WatchdogConfig": PROCESS,
    "WeightTransferConfig": PROCESS,
    "PoolerConfig": REFUSED,
    "ReasoningConfig": TOKENS,
    "StructuredOutputsConfig": TOKENS,
    "WatermarkConfig": TOKENS,
}
"""Classes of which no field can change a byte, by what they are for."""
