"""Compiles a policy's programs for GPUs without having any; prints JSON.

JAX_PLATFORMS=cpu PYTHONPATH=scripts python tests/lower_for_gpu.py
"""

import json
import re

import jax
import jax.numpy as jnp
import lower_for_tpu
from parts import topology

from jaxrl_llm import sharding
from jaxrl_llm.learner.lower import lower
from jaxrl_llm.models import backends
from jaxrl_llm.models.grouped import grouped_matmul

_KERNEL = re.compile(r" (?:fusion|custom-call|copy|scatter|sort)\(")


def _mesh(gpus, **axes):
  axes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | axes
  return sharding.make_mesh(**axes, devices=topology.devices_of(f"h100:{gpus}"))


def _report(lowered):
  compiled, text = topology.compiled("program", lowered, "h100:1")
  fused = set(re.findall(r"calls=%?([\w.\-]+)", text))
  parts = re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?^\}", text, re.M | re.S)
  bodies = re.findall(r"^(?:ENTRY )?%?[\w.\-]+ \((.*?)^\}", text, re.M | re.S)
  own = [body for part, body in zip(parts, bodies) if part not in fused]
  return {
    "attention": text.count("__gpu$xla.gpu.triton"),
    "kernels": sum(len(_KERNEL.findall(body)) for body in own),
    "branches": len(re.findall(r" conditional\(", text)),
    "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
  }


def _decode(layers):
  mesh = _mesh(1)
  _, fns = lower_for_tpu.make_fns(mesh, layers)
  lowered = lower_for_tpu.sampler(
    fns,
    jax.eval_shape(fns.init, jax.eval_shape(jax.random.key, 0)),
    mesh,
    slots=lower_for_tpu.SLOTS,
    max_prompt_length=256,
    max_response_length=1792,
  )
  return _report(lowered["sampler decode"])


def _packed():
  """Compiles attention of a row of 8,192 tokens, with gradients."""
  place = sharding.packed_kv_sharding(_mesh(1), 2)
  (kind,) = lower_for_tpu.MODEL.period
  backend = backends.choose("pallas", [kind.attention], place)
  attend = backend.make_packed_attention(kind.attention, sharding=place).attend

  def run(q, k, v, segments, prefixes):
    out, pull = jax.vjp(lambda *qkv: attend(*qkv, segments, prefixes), q, k, v)
    return pull(out)

  shape = lambda *sizes: jax.ShapeDtypeStruct(
    sizes, jnp.bfloat16 if len(sizes) > 2 else jnp.int32
  )
  kv, row = shape(1, 8192, 2, 128), shape(1, 8192)
  arguments = shape(1, 8192, 12, 128), kv, kv, row, row
  return _report(jax.jit(run).lower(*arguments))


def _experts():
  """Compiles products of 65,536 rows with their experts, with gradients."""
  mesh = _mesh(1)
  place = sharding.replicated(mesh)

  def run(x, kernel, sizes, g):
    multiply = lambda x, kernel: grouped_matmul(x, kernel, sizes)
    out, pull = jax.vjp(multiply, x, kernel)
    return out, pull(g)

  shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(
    sizes, dtype, sharding=place
  )
  sizes = (65_536, 2048), (128, 2048, 768), (65_536, 768)
  x, kernel, g = (shape(jnp.bfloat16, *each) for each in sizes)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return _report(jax.jit(run).lower(x, kernel, shape(jnp.int32, 128), g))


def main():
  mesh = _mesh(4, context=2, tensor=2)
  config, fns = lower_for_tpu.make_fns(mesh)
  learner = lower_for_tpu.learner(config, fns, mesh)
  report = {
    "packed": _packed(),
    "experts": _experts(),
    "decode 2": _decode(2),
    "decode 3": _decode(3),
    "update": _report(lower(learner)["update policy"]),
  }
  print(json.dumps(report))


if __name__ == "__main__":
  main()
