"""jaxrl_llm: functional RL for LLM reasoning in JAX.

`from jaxrl_llm import estimators, losses` gives pure functions that need only
JAX and chex; nothing heavier is imported until it is asked for by name.
"""

__version__ = "0.1.0"
