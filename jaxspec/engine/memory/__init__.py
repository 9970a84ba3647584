"""How devices are divided: plain numbers, of devices that are here or not.

`memory_plan` says what weights, programs and pages take; `draft_sharding` over how many
devices a draft model is spread, by `device_speeds`. What they are told of devices finds
`jaxspec.engine.device_memory`.
"""
