"""Wrong weights are found, whatever version they claim to be."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny

from jaxrl_llm import digest, models, sharding, sync
from jaxrl_llm.errors import InputError

STEPS = 4
WRONG = 2  # The step whose transfer goes wrong.


@functools.cache
def _transfer(reshard):
  fns = models.make_policy(
    tiny.tiny_config(), numerics=models.Numerics.all(jnp.bfloat16)
  )
  _, params = tiny.tiny_policy()
  shapes = jax.eval_shape(lambda: params)
  target = None
  if reshard:
    mesh = sharding.make_mesh(
      data=1, fsdp=1, tensor=2, devices=jax.devices()[4:6]
    )
    target = sharding.tree_shardings(
      jax.eval_shape(fns.for_sampling, shapes), mesh
    )
  return sync.WeightTransfer(
    fns.for_sampling, shapes, target=target, max_bytes=5000
  )


@jax.jit
def _update(params):
  return jax.tree.map(lambda x: x * 1.01 + 0.01, params)


def _run(send, *, reshard=False):
  """A loop in small; returns the step at which weights are refused, and why.

  Args:
    send: (transfer, policy, reference, old weights, version) -> weights, the
      transfer of step WRONG; the others send the policy.
    reshard: the sampler has a mesh of its own.
  """
  transfer = _transfer(reshard)
  reference = policy = tiny.tiny_policy()[1]
  weights, step = transfer.send(policy, 0), 0
  try:
    while step < STEPS:
      sync.verify(weights, transfer.checksums(policy), version=step)
      policy = _update(policy)
      if step + 1 == WRONG:
        weights = send(transfer, policy, reference, weights, step + 1)
      else:
        weights = transfer.send(policy, step + 1, replaces=weights)
      step += 1
  except sync.SyncError as error:
    return step, str(error)
  return None, ""


def _skipped(transfer, policy, reference, old, version):
  return old


def _reference(transfer, policy, reference, old, version):
  return transfer.send(reference, version)


def _bumped(transfer, policy, reference, old, version):
  return dataclasses.replace(old, version=version)


def _stale_on_the_way(transfer, policy, reference, old, version):
  """One leaf does not arrive; the checksum is of what was sent."""
  new = transfer.send(policy, version)
  layers = list(new.params["layers"])
  mlp = layers[1]["mlp"] | {"up": old.params["layers"][1]["mlp"]["up"]}
  layers[1] = layers[1] | {"mlp": mlp}
  params = new.params | {"layers": tuple(layers)}
  return dataclasses.replace(new, params=params)


def _stale_at_the_start(transfer, policy, reference, old, version):
  """One leaf was never sent; the checksum fits what is there."""
  stale = _stale_on_the_way(transfer, policy, reference, old, version)
  checksums = digest.checksums(stale.params)
  return dataclasses.replace(stale, checksums=checksums)


class TestMutations:
  """Each goes wrong in the transfer after step 1, and must show in step 2."""

  @pytest.mark.parametrize("reshard", [False, True])
  def test_none_passes(self, reshard):
    send = lambda transfer, policy, reference, old, version: transfer.send(
      policy, version
    )
    assert _run(send, reshard=reshard) == (None, "")

  @pytest.mark.parametrize("reshard", [False, True])
  @pytest.mark.parametrize(
    ("mutation", "message"),
    [
      (_skipped, "holds version 1, but the trainer is at version 2"),
      (_reference, "\\(every leaf\\) .* at version 2: transfer"),
      (_bumped, "\\(every leaf\\) .* at version 2: transfer"),
      (
        _stale_on_the_way,
        "^layers/1/mlp/up/kernel \\(1 of 27 leaves\\) .* at version 2, and not"
        " what was sent: transfer",
      ),
      (
        _stale_at_the_start,
        "^layers/1/mlp/up/kernel \\(1 of 27 leaves\\) .* at version 2: tra",
      ),
    ],
  )
  def test_each_is_found_within_a_step(self, mutation, message, reshard):
    step, error = _run(mutation, reshard=reshard)
    assert step == WRONG
    assert "\n" not in error
    assert re.search(message, error), error


class TestVerify:
  def _weights(self):
    transfer = _transfer(False)
    _, params = tiny.tiny_policy()
    return transfer.send(params, 5), transfer.checksums(params)

  def test_passes_what_was_sent(self):
    weights, wanted = self._weights()
    sync.verify(weights, wanted, version=5)

  def test_a_flipped_bit_is_found(self):
    weights, wanted = self._weights()
    scale = weights.params["final_norm"]["scale"]
    params = weights.params | {
      "final_norm": {"scale": scale.at[3].multiply(-1)}
    }
    broken = dataclasses.replace(weights, params=params)
    with pytest.raises(sync.SyncError, match="^final_norm/scale .1 of 27"):
      sync.verify(broken, wanted, version=5)

  def test_a_version_from_the_future_is_found(self):
    weights, wanted = self._weights()
    with pytest.raises(sync.SyncError, match="holds version 5, .* version 4"):
      sync.verify(weights, wanted, version=4)

  def test_a_wrong_checksum_is_found(self):
    weights, wanted = self._weights()
    broken = dataclasses.replace(weights, checksums={})
    with pytest.raises(
      sync.SyncError, match="checksum of .* version 5 does not match"
    ):
      sync.verify(broken, wanted, version=5)

  def test_a_missing_leaf_is_found(self):
    weights, wanted = self._weights()
    params = {k: v for k, v in weights.params.items() if k != "final_norm"}
    broken = dataclasses.replace(weights, params=params)
    with pytest.raises(sync.SyncError, match="^final_norm/scale .1 of 27"):
      sync.verify(broken, wanted, version=5)

  def test_a_buffer_that_was_given_away_is_found(self):
    weights, wanted = self._weights()
    weights.params["embed"]["embedding"].delete()
    with pytest.raises(sync.SyncError, match="^embed/.* has been deleted"):
      sync.verify(weights, wanted, version=5)

  def test_the_error_is_one_line_of_bad_input(self):
    assert issubclass(sync.SyncError, InputError)
