"""Parts of an engine's configuration, `jaxspec.config`.

`model_config` is a network's numbers, `quantization` which forms its matrices may be
asked for in, `speculation` how drafts are made and judged, `lookups` which are made of
matches, `trimming` which tokens a draft of a trimmed vocabulary keeps,
`structured_outputs` what holds for forms of texts, `kv_events` who is told of pages,
`hosts` who takes part where several processes run one target.
"""
