"""What else runs Gemma 2 on a CPU, beside this engine: `python -m benchmarks.peers`.

In the order to read: `answer` (a child's side, in every peer's own environment), the
children `ours`, `hf`, `ov`, `llama` and `vllm_cpu`; `child` (their parent's side);
`found` (which peers there are, and what they need); `cells` (what is measured, and the
rows made of it); `__main__` (the run); `table` (Markdown for the README).
"""
