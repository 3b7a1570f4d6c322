"""Schedules, optimizers and the bookkeeping of updates."""

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tiny_run

from jaxrl_llm import sharding
from jaxrl_llm.learner import optimizer as optimizer_lib
from jaxrl_llm.models import adapters
from jaxrl_llm.trainer import build


def make_params():
  return {
    "embed": {"embedding": jnp.full((3, 2), 2.0)},
    "layers": {
      "q": {"kernel": jnp.full((2, 2, 2), 2.0), "bias": jnp.full((2, 2), 2.0)},
      "norm": {"scale": jnp.full((2, 2), 2.0)},
    },
  }


def make_schedule(rate, **changes):
  """Makes the schedule of a run of six updates."""
  settings = {
    "learning_rate": rate,
    "warmup_steps": 0,
    "learning_rate_schedule": "constant",
    "min_learning_rate_ratio": 0.25,
    "updates": 6,
  }
  return optimizer_lib.make_schedule(
    types.SimpleNamespace(**(settings | changes))
  )


def make_optimizer(rate=0.1, **changes):
  settings = {
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
  }
  schedule = rate if callable(rate) else make_schedule(rate)
  return optimizer_lib.make_optimizer(schedule, **(settings | changes))


def make_apply(optimizer):
  """Returns apply(state, gradients); jitted, as eager optax is slow."""
  return jax.jit(
    lambda state, gradients: optimizer_lib.apply_gradients(
      state, gradients, optimizer, finite=True
    )
  )


class TestSchedule:
  @pytest.mark.parametrize(
    ("warmup_steps", "name", "rates"),
    [
      *((steps, "constant", [8.0] * 8) for steps in (0, 1)),
      (2, "constant", [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
      (4, "constant", [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
      # From 8 to a quarter of it in the four updates after warm-up.
      (2, "linear", [4.0, 8.0, 8.0, 6.5, 5.0, 3.5, 2.0, 2.0]),
      # 2 + 6 * (1 + cos(pi * k / 4)) / 2 for k = 0 to 4.
      (2, "cosine", [4.0, 8.0, 8.0, 7.1213203, 5.0, 2.8786797, 2.0, 2.0]),
      # Warm-up during the entire run.
      (6, "cosine", [8 * k / 6 for k in range(1, 7)]),
    ],
  )
  def test_rises_and_falls(self, warmup_steps, name, rates):
    schedule = make_schedule(
      8.0, warmup_steps=warmup_steps, learning_rate_schedule=name
    )
    found = [float(jax.jit(schedule)(step)) for step in range(len(rates))]
    np.testing.assert_allclose(found, rates, rtol=1e-6)


class TestScheduleStep:
  def make(self, *, steps=6, mini_batch=16, epochs=2):
    config = tiny_run.make_config("none", run__steps=steps)
    config.optimizer.policy.update(mini_batch=mini_batch, epochs=epochs)
    return build.update_settings(config, "policy")

  def walk(self, settings, counts):
    """Returns the schedule at each update for steps of `counts` updates."""
    return [
      int(settings.schedule_step(step, number, count))
      for step, count in enumerate(counts)
      for number in range(count)
    ]

  def test_counts_the_updates_where_steps_are_alike(self):
    settings = self.make()  # 32 responses: two epochs of two.
    assert self.walk(settings, [4] * 6) == list(range(24))

  @pytest.mark.parametrize("seed", range(3))
  def test_ends_with_the_run_whatever_its_steps_are(self, seed):
    counts = np.random.default_rng(seed).integers(1, 9, 6)
    settings = self.make()
    walked = self.walk(settings, counts)
    assert walked == sorted(walked) and walked[0] == 0
    firsts = np.append(0, np.cumsum(counts[:-1]))
    assert [walked[k] for k in firsts] == [0, 4, 8, 12, 16, 20]
    assert settings.schedule_step(6, 0, 3) == settings.updates == 24

  def test_a_mini_batch_larger_than_a_batch(self):
    assert self.walk(self.make(mini_batch=64, epochs=1), [1] * 6) == [
      *(0, 0, 1, 1, 2, 2)
    ]

  def test_value_pretraining_before_a_run_without_steps_warms_up(self):
    assert self.walk(self.make(steps=0), [4] * 2) == list(range(8))

  def test_a_longer_run_goes_on_where_it_was(self):
    short, long = self.make(), self.make(steps=9)
    assert short.schedule_step(3, 1, 4) == long.schedule_step(3, 1, 4) == 13


class TestOptimizer:
  @pytest.mark.parametrize(
    "settings", [{}, {"name": "adafactor", "mu_dtype": "float32"}]
  )
  def test_weight_decay_is_for_matrices(self, settings):
    optimizer = make_optimizer(weight_decay=0.5, **settings)
    params = make_params()
    current = optimizer_lib.create_train_state(params, optimizer)
    nothing = jax.tree.map(jnp.zeros_like, params)
    after = make_apply(optimizer)(current, nothing).trained
    decayed = np.float32(2.0 * (1 - 0.1 * 0.5))
    np.testing.assert_allclose(after["embed"]["embedding"], decayed)
    np.testing.assert_allclose(after["layers"]["q"]["kernel"], decayed)
    np.testing.assert_array_equal(after["layers"]["q"]["bias"], 2.0)
    np.testing.assert_array_equal(after["layers"]["norm"]["scale"], 2.0)

  def test_weight_decay_is_for_the_factors_of_adapters(self):
    params = {"q": dict.fromkeys(adapters.FACTORS, jnp.ones((2, 2)))}
    assert all(jax.tree.leaves(optimizer_lib.matrices(params)))

  @pytest.mark.parametrize(("norm", "kept"), [(0.25, 0.25), (40.0, 0.5)])
  def test_the_global_norm_is_clipped(self, norm, kept):
    optimizer = make_optimizer(max_grad_norm=0.5)
    params = make_params()
    draw = np.random.default_rng(0).normal
    direction = jax.tree.map(lambda x: jnp.float32(draw(size=x.shape)), params)
    length = optax.global_norm(direction)
    state = optimizer_lib.create_train_state(params, optimizer)
    gradients = jax.tree.map(lambda x: x * norm / length, direction)
    after = make_apply(optimizer)(state, gradients)
    # Adam's first moment is a tenth of the clipped gradient.
    chex.assert_trees_all_close(
      optax.tree_utils.tree_get(after.optimizer.opt_state, "mu"),
      jax.tree.map(lambda x: 0.1 * x * kept / length, direction),
      rtol=1e-5,
    )


class TestAdafactor:
  SHAPE = (2, 130, 128)  # Stacked layers; large enough to factor.

  def _params(self):
    kernel = {"kernel": jnp.ones(self.SHAPE), "bias": jnp.ones((2, 128))}
    return {"layers": {"q": kernel}}

  def test_is_the_formula_of_the_paper(self):
    optimizer = make_optimizer(
      rate=0.01, name="adafactor", max_grad_norm=1e9, mu_dtype="float32"
    )
    state = optimizer_lib.create_train_state(self._params(), optimizer)
    apply, rng = make_apply(optimizer), np.random.default_rng(0)
    kernel, mean, rows, columns = 1.0, 0.0, 0.0, 0.0
    for step in range(1, 4):
      g = rng.normal(size=self.SHAPE)
      bias = jnp.zeros((2, 128))
      gradients = {"layers": {"q": {"kernel": jnp.float32(g), "bias": bias}}}
      state = apply(state, gradients)
      decay = 1 - step**-0.8
      rows = decay * rows + (1 - decay) * (g**2).mean(2, keepdims=True)
      columns = decay * columns + (1 - decay) * (g**2).mean(1, keepdims=True)
      update = g / np.sqrt(rows * columns / rows.mean(1, keepdims=True))
      rms = np.sqrt((update**2).mean(axis=(1, 2), keepdims=True))
      update /= np.maximum(1, rms)
      mean = 0.9 * mean + 0.1 * update
      kernel -= 0.01 * mean / (1 - 0.9**step)
      got = state.trained["layers"]["q"]["kernel"]
      np.testing.assert_allclose(got, kernel, rtol=1e-5)

  @pytest.mark.parametrize(
    ("path", "shape", "own"),
    [
      # Layers and experts are also axes that are large enough to factor.
      (("layers", "q", "kernel"), (3, 130, 128), 2),
      (("layers", "q", "kernel"), (140, 130, 4), 2),
      (("layers", "q", "lora_a"), (140, 130, 4), 2),
      (("layers", "experts", "gate", "kernel"), (2, 140, 4, 130), 2),
      (("layers", "experts", "gate", "kernel"), (2, 3, 128, 130), 2),
      (("layers", "norm", "scale"), (140, 130), 1),
      (("value_head", "bias"), (3,), 1),
    ],
  )
  def test_layers_and_experts_are_matrices_of_their_own(self, path, shape, own):
    def nested(x):
      for key in reversed(path):
        x = {key: x}
      return x

    def updates(gradients):
      """Returns the update after several steps of one tree."""
      params = nested(jnp.zeros(gradients[0].shape))
      made = optimizer_lib.adafactor(
        lambda step: 1.0, b1=0.0, mu_dtype="float32", weight_decay=0.0
      )
      state, step = made.init(params), jax.jit(made.update)
      for x in gradients:
        update, state = step(nested(jnp.asarray(x)), state, params)
      return np.asarray(jax.tree.leaves(update)[0])

    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(3, *shape)).astype(np.float32)
    spike = (0,) * (len(shape) - own)
    gradients[-1][spike] *= 100
    whole = updates(gradients)
    for index in {spike, tuple(n - 1 for n in shape[: len(spike)])}:
      alone = updates([x[index] for x in gradients])
      np.testing.assert_allclose(whole[index], alone, rtol=1e-5, atol=1e-7)
      assert np.sqrt(np.mean(alone**2)) < 1 + 1e-5

  def test_its_state_is_one_moment(self):
    params = self._params()
    size = sum(x.size for x in jax.tree.leaves(params))
    optimizer = make_optimizer(name="adafactor", mu_dtype="bfloat16")
    state = jax.eval_shape(
      lambda: optimizer_lib.create_train_state(params, optimizer)
    )
    held = jax.tree.leaves(state.optimizer.opt_state)
    assert 2 * size < sum(x.size * x.dtype.itemsize for x in held) < 2.2 * size
    # The means over rows and over columns are sharded, too.
    mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
    chex.assert_trees_all_equal_structs(
      sharding.tree_shardings(state, mesh), state
    )


class TestApplyGradients:
  def test_the_rate_is_that_of_the_given_step(self):
    optimizer = make_optimizer(make_schedule(0.8, warmup_steps=4))
    params, apply = make_params(), make_apply(optimizer)
    state = optimizer_lib.create_train_state(params, optimizer)
    gradients = jax.tree.map(jnp.ones_like, params)
    for step, rate in ((2, 0.6), (2, 0.6), (0, 0.2)):
      before = optimizer_lib.at_schedule_step(state, jnp.int32(step))
      state = apply(before, gradients)
      change = jax.tree.map(jnp.subtract, before.trained, state.trained)
      np.testing.assert_allclose(jax.tree.leaves(change)[0], rate, rtol=1e-5)

  def test_the_mean_of_gradients_may_be_of_two_bytes(self):
    optimizer = make_optimizer(mu_dtype="bfloat16")
    state = optimizer_lib.create_train_state(make_params(), optimizer)
    moments = state.optimizer.opt_state[1][0][1:]
    dtypes = [{x.dtype for x in jax.tree.leaves(moment)} for moment in moments]
    assert dtypes == [{jnp.dtype("bfloat16")}, {jnp.dtype("float32")}]
