"""Wrong weights are detected, whatever version they claim to be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny

from jaxrl_llm import digest, models, sync
from jaxrl_llm.errors import InputError


@functools.cache
def _transfer():
  fns = models.make_policy(
    tiny.tiny_config(), numerics=models.Numerics.all(jnp.bfloat16)
  )
  _, params = tiny.tiny_policy()
  shapes = jax.eval_shape(lambda: params)
  return sync.WeightTransfer(fns.for_sampling, shapes, max_bytes=5000)


def _send(change=lambda x: x):
  """Sends changed parameters; returns the weights and their checksums."""
  params = jax.tree.map(change, tiny.tiny_policy()[1])
  return _transfer().send(params, 5), _transfer().checksums(params)


def _other(x):
  return x * 1.01 + 0.01


def _flipped(params):
  scale = params["final_norm"]["scale"]
  return params | {"final_norm": {"scale": scale.at[3].multiply(-1)}}


def _missing(params):
  return {k: v for k, v in params.items() if k != "final_norm"}


def _deleted(params):
  params["embed"]["embedding"].delete()
  return params


class TestVerify:
  def test_passes_what_was_sent(self):
    weights, wanted = _send()
    sync.verify(weights, wanted, version=5)

  @pytest.mark.parametrize(
    ("change", "message"),
    [
      (_flipped, "^final_norm/scale .1 of 27"),
      (_missing, "^final_norm/scale .1 of 27"),
      (_deleted, "^embed/.* has been deleted"),
      (lambda _: _send(_other)[0].params, "every leaf. .* at version 5, and"),
    ],
  )
  def test_other_parameters_are_found(self, change, message):
    weights, wanted = _send()
    broken = dataclasses.replace(weights, params=change(weights.params))
    with pytest.raises(sync.SyncError, match=message):
      sync.verify(broken, wanted, version=5)

  @pytest.mark.parametrize("on_the_way", [False, True])
  def test_a_stale_leaf_is_found(self, on_the_way):
    """It does not arrive, or was never sent, so that the checksum matches."""
    (old, _), (new, wanted) = _send(), _send(_other)
    layers = list(new.params["layers"])
    mlp = layers[1]["mlp"] | {"up": old.params["layers"][1]["mlp"]["up"]}
    layers[1] = layers[1] | {"mlp": mlp}
    stale = new.params | {"layers": tuple(layers)}
    broken = dataclasses.replace(new, params=stale)
    if not on_the_way:
      broken = dataclasses.replace(broken, checksums=digest.checksums(stale))
    where = "^layers/1/mlp/up/kernel .1 of 27 leaves. .* at version 5"
    how = (
      ", and also differs from what was sent" if on_the_way else ": transfer"
    )
    with pytest.raises(sync.SyncError, match=where + how):
      sync.verify(broken, wanted, version=5)

  def test_a_version_from_the_future_is_found(self):
    weights, wanted = _send()
    with pytest.raises(sync.SyncError, match="holds version 5, .* version 4"):
      sync.verify(weights, wanted, version=4)

  def test_a_wrong_checksum_is_found(self):
    weights, wanted = _send()
    broken = dataclasses.replace(weights, checksums={})
    with pytest.raises(
      sync.SyncError, match="checksum of .* version 5 does not match"
    ):
      sync.verify(broken, wanted, version=5)

  def test_the_error_is_one_line_of_bad_input(self):
    assert issubclass(sync.SyncError, InputError)
