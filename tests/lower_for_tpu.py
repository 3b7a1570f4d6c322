"""Compiles a policy's programs for TPUs without having any; prints JSON.

TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu PYTHONPATH=scripts \\
    python tests/lower_for_tpu.py
"""

import dataclasses
import json
import re

import jax
from helpers import configs
from jax.experimental import topologies

from jaxrl_llm import sharding
from jaxrl_llm.learner import core
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.lower import lower
from jaxrl_llm.learner.members import make_member, policy_training
from jaxrl_llm.learner.state import LearnerSettings
from jaxrl_llm.sampling import Engine, EngineConfig
from jaxrl_llm.tools.simulate import hlo
from jaxrl_llm.tools.simulate.models import MODELS
from jaxrl_llm.trainer import build, model_fns
from jaxrl_llm.trainer.meshes import Meshes

TOPOLOGY = "v5e:2x4"
SLOTS = 64
# The heads of Qwen2.5-7B; all other sizes are reduced.
MODEL = dataclasses.replace(
  MODELS["qwen2.5-7b"],
  vocab_size=2048,
  hidden_size=512,
  intermediate_size=1024,
  num_layers=2,
  max_position_embeddings=4096,
)
# 2 of the 64 layers: all compile to the same code, so more would only take
# longer.
LARGE = dataclasses.replace(MODELS["qwen2.5-32b"], num_layers=2)
# Collectives that send pages of 128 positions between devices.
_GATHERED = re.compile(r"128,[48],128\]\S* all-(?:gather|to-all)")


def make_fns(mesh, layers=2):
  """Returns the settings of a policy without a critic, and its functions."""
  config = configs.load("vapo")
  config.model.dtype = "bfloat16"
  config.estimator.name = "group"
  config.optimizer.policy.mini_batch = 16  # Two micro-batches.
  model = dataclasses.replace(MODEL, num_layers=layers)
  return config, model_fns.make_policy_fns(config, model, Meshes(mesh, mesh))


def sampler(fns, shapes, mesh, **sizes):
  engine = Engine(fns, EngineConfig(stop_tokens=[1], **sizes))
  placed = sharding.tree_shardings(
    jax.eval_shape(fns.for_sampling, shapes), mesh
  )
  params = jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    jax.eval_shape(fns.for_sampling, shapes),
    placed,
  )
  return engine.lower(params, prompts=5)


def learner(config, fns, mesh):
  algorithm = core.make_algorithm(config)
  settings = build.update_settings(config, "policy")
  training = policy_training(fns, algorithm)
  return Learner(
    algorithm,
    {"policy": make_member(fns, training, settings, mesh)},
    settings=LearnerSettings(
      seed=0, max_tokens_per_row=512, max_skipped=1, temperature=1.0
    ),
    mesh=mesh,
    initial_params=lambda: None,
  )


def _decode_at_scale():
  """Compiles the decode step of the largest preset for 64 sampler chips."""
  topology = topologies.get_topology_desc(
    platform="tpu", topology_name="v5p:4x4x4"
  )
  config = configs.load("vapo", "qwen2.5-32b")
  mesh = sharding.make_mesh(**config.sampler.mesh, devices=topology.devices)
  fns = model_fns.make_policy_fns(config, LARGE, Meshes(mesh, mesh))
  shapes = jax.eval_shape(fns.init, jax.eval_shape(jax.random.key, 0))
  lowered = sampler(
    fns,
    shapes,
    mesh,
    slots=config.sampler.slots,
    max_prompt_length=config.data.max_prompt_length,
    max_response_length=config.sampler.max_response_length,
    kv_pages=config.sampler.kv_pages,
  )
  memory = lowered["sampler decode"].compile().memory_analysis()
  return {
    "argument_bytes": memory.argument_size_in_bytes,
    "temporary_bytes": memory.temp_size_in_bytes,
    "in_place_bytes": memory.alias_size_in_bytes,
  }


def main():
  # In a third of the time, with the same partitions, kernels and buffers;
  # compile_test.py compiles as users do.
  jax.config.update("jax_optimization_level", "O0")
  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGY
  )
  mesh = sharding.make_mesh(
    data=1, fsdp=2, context=2, tensor=2, devices=topology.devices
  )
  config, fns = make_fns(mesh)
  own = learner(config, fns, mesh)
  shapes = own.policy.shapes
  lowered = sampler(
    fns,
    shapes.trained,
    mesh,
    slots=SLOTS,
    max_prompt_length=256,
    max_response_length=1792,
  )
  lowered["update"] = lower(own)["update policy"]
  sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)]
  report = {"state_bytes": sum(sizes)}
  for name, program in lowered.items():
    compiled = program.compile()
    text = compiled.as_text()
    report[name] = {
      "kernels": text.count('"tpu_custom_call"'),
      "gathered_caches": len(_GATHERED.findall(text)),
      "argument_bytes": compiled.memory_analysis().argument_size_in_bytes,
      "sent": hlo.collectives(text, mesh.shape, [1, 1]),
    }
  report["decode at scale"] = _decode_at_scale()
  print(json.dumps(report))


if __name__ == "__main__":
  main()
