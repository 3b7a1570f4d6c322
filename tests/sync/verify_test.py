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


class TestVerify:
  def _weights(self):
    transfer = _transfer()
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

  @pytest.mark.parametrize("on_the_way", [False, True])
  def test_a_stale_leaf_is_found(self, on_the_way):
    """It does not arrive, or was never sent, so that the checksum matches."""
    old, _ = self._weights()
    transfer, (_, params) = _transfer(), tiny.tiny_policy()
    params = jax.tree.map(lambda x: x * 1.01 + 0.01, params)
    new = transfer.send(params, 6)
    layers = list(new.params["layers"])
    mlp = layers[1]["mlp"] | {"up": old.params["layers"][1]["mlp"]["up"]}
    layers[1] = layers[1] | {"mlp": mlp}
    stale = new.params | {"layers": tuple(layers)}
    broken = dataclasses.replace(new, params=stale)
    if not on_the_way:
      broken = dataclasses.replace(broken, checksums=digest.checksums(stale))
    where = "^layers/1/mlp/up/kernel .1 of 27 leaves. .* at version 6"
    how = (
      ", and also differs from what was sent" if on_the_way else ": transfer"
    )
    with pytest.raises(sync.SyncError, match=where + how):
      sync.verify(broken, transfer.checksums(params), version=6)

  def test_weights_of_another_model_are_found(self):
    weights, _ = self._weights()
    _, params = tiny.tiny_policy()
    params = jax.tree.map(lambda x: x * 1.01 + 0.01, params)
    with pytest.raises(
      sync.SyncError, match="every leaf. .* at version 5: tra"
    ):
      sync.verify(weights, _transfer().checksums(params), version=5)

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
