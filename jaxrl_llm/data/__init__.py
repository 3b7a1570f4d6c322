"""Text in: tokenizers, tasks, data sources and the stream of prompts."""
