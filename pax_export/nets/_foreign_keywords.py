"""Keywords of transformers' `from_pretrained`, and the equivalents here."""

from __future__ import annotations

_DTYPE = 'dtype="bfloat16"; that of the file by default'
_PLACE = (
    "jax.device_put(lm, device) afterwards; or pax.sharding.shard(lm, mesh, "
    "pax.sharding.tensor_parallel()) for several devices"
)
_FOLDER = "the path of a folder, which huggingface_hub.snapshot_download(...) gives"
_QUANTIZED = "Decoder.from_gguf(path) for quantized weights, which become numbers"
_ADAPTER = "pax.adapters.load(lm, folder)"
_READ = "nothing: files are read leaf by leaf, and no code in them is run"
_OWN = "config=DecoderConfig(...), with what is to be other than in config.json"

KEYWORDS = {
    "pretrained_model_name_or_path": _FOLDER,
    "path": "folder, the first argument",
    "torch_dtype": _DTYPE,
    "precision": _DTYPE,
    **dict.fromkeys(
        ("device_map", "device", "max_memory", "tp_plan", "tp_size", "device_mesh",
         "distributed_config", "offload_folder", "offload_buffers", "offload_state_dict"),
        _PLACE,
    ),
    **dict.fromkeys(
        ("cache_dir", "force_download", "local_files_only", "token", "use_auth_token", "revision",
         "proxies", "subfolder", "variant", "resume_download", "mirror", "tqdm_class"),
        _FOLDER,
    ),
    **dict.fromkeys(
        ("quantization_config", "load_in_8bit", "load_in_4bit", "gguf_file"), _QUANTIZED
    ),
    "attn_implementation": "config=dataclasses.replace(config, implementation=...), see "
    "dot_product_attention",
    **dict.fromkeys(("adapter_name", "adapter_kwargs"), _ADAPTER),
    **dict.fromkeys(("ignore_mismatched_sizes", "fusion_config"), _OWN),
    **dict.fromkeys(
        ("state_dict", "key_mapping"), "pax.weights.adopt(lm, source), which takes renames"
    ),
    "output_loading_info": "nothing: what is missing or too many is an error",
    "generation_config": "the arguments of generate; generation_config.json of the folder is read",
    **dict.fromkeys(
        ("trust_remote_code", "use_safetensors", "weights_only", "low_cpu_mem_usage",
         "disable_mmap", "experts_implementation", "use_kernels", "kernel_config",
         "allow_all_kernels", "from_tf", "from_flax"),
        _READ,
    ),
}  # fmt: skip
