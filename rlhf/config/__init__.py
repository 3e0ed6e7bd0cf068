"""The typed specs of every configuration group. Importing this package imports no torch, ray, vllm or megatron.

A dataclass owns the types, defaults and docs of an option; the YAML in `conf/` selects it and states deliberate
deviations. Keys are checked one by one in each `__post_init__`, and across groups in `rlhf.config.checks`.
"""
