"""Input data: tokenizers, tasks, data sources and prompt sources."""
