"""vLLM's import path for data sets of benchmarks."""
