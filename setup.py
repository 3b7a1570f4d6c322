"""Packaging of jaxrl_llm. Tool settings live in pyproject.toml."""

import re

import setuptools

# Both ends of every range were installed and tested (Python 3.11 with JAX
# 0.10.2, Python 3.13 with JAX 0.12.0.1); versions in between were not.
_INSTALL = [
  "jax>=0.10.0,<0.13",
  "numpy>=2.0,<3",
  "scipy>=1.13",  # JAX needs it too.
  "flax>=0.12.6,<0.13",
  "optax>=0.2.6,<0.3",
  "orbax-checkpoint>=0.12,<0.13",
  "chex>=0.1.90,<0.2",
  "grain>=0.2.15,<0.3",
  "array-record>=0.8.1,<0.9",
  "tensorflow-datasets>=4.9.9,<5",
  "importlib-resources>=6",  # tensorflow-datasets needs it undeclared.
  "ml-collections>=1.1,<2",
  "absl-py>=2.1",
  "safetensors>=0.6,<1",
  "tokenizers>=0.22,<0.24",
  "huggingface-hub>=0.34,<3",  # tokenizers needs it too.
  "jinja2>=3.1.6,<4",
  "rich>=13,<16",
  "tensorboardX>=2.6,<3",
]

_EXTRAS = {
  "plot": ["matplotlib>=3.8,<4"],
  "wandb": ["wandb>=0.19,<1"],
  "trackio": ["trackio>=0.5,<1"],
  "math": ["math-verify>=0.9,<0.10"],
  "parity": ["torch>=2.6", "transformers>=4.51"],
  "tpu": ["jax[tpu]>=0.10.0,<0.13"],
  "gpu": ["jax[cuda12]>=0.10.0,<0.13"],
}
_EXTRAS["docs"] = ["sphinx>=8,<10", "myst-parser>=4,<6", "furo>=2024.8"]
_EXTRAS["test"] = (
  _EXTRAS["plot"]
  + _EXTRAS["docs"]
  + [
    "pytest>=8",
    "pytest-xdist>=3.7",
    "nbclient>=0.10",
    "ipykernel>=6.29",
    "psutil>=5.9",
    "ruff>=0.8",
  ]
)

# Folders next to the package that are installed inside it: readers of the
# repository find configs, programs and pages at the top level, and the
# installed package contains them too.
_FOLDERS = {
  "jaxrl_llm.configs": "configs",
  "jaxrl_llm.docs": "docs",
  "jaxrl_llm.scripts": "scripts",
  "jaxrl_llm.scripts.benchmarks": "scripts/benchmarks",
  "jaxrl_llm.scripts.parts": "scripts/parts",
  "jaxrl_llm.scripts.studies": "scripts/studies",
}
# The command jaxrl-NAME is scripts/NAME.py.
_COMMANDS = (
  *("train", "evaluate", "generate", "convert"),
  *("report", "study", "simulate", "detect", "compile"),
  *("benchmark", "accelerator"),
)


def _read(path: str) -> str:
  with open(path, encoding="utf-8") as file:
    return file.read()


setuptools.setup(
  name="jaxrl_llm",
  version=re.search(
    r'^__version__ = "(.+)"$', _read("jaxrl_llm/__init__.py"), re.MULTILINE
  )[1],
  description="Functional RL for LLM reasoning in JAX: DAPO, VAPO, T-PPO",
  long_description=_read("README.md"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  classifiers=[
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
  packages=[
    *setuptools.find_packages(include=["jaxrl_llm", "jaxrl_llm.*"]),
    *_FOLDERS,
  ],
  package_dir=_FOLDERS,
  package_data={
    "jaxrl_llm": ["assets/**/*", "py.typed"],
    "jaxrl_llm.docs": ["settings.md"],  # Read by errors for unknown keys.
    "jaxrl_llm.scripts.studies": ["studies.ini"],
  },
  entry_points={
    "console_scripts": [
      f"jaxrl-{name} = jaxrl_llm.scripts:main" for name in _COMMANDS
    ]
  },
  python_requires=">=3.11",
  install_requires=_INSTALL,
  extras_require=_EXTRAS,
)
