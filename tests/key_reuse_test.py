"""Every test runs under JAX's check that no random key is used twice."""

import jax
import pytest

draw = jax.random.uniform


def _while(draw_once):
  """Returns the sum of three draws in a loop."""
  body = lambda c: (c[0] + 1, c[1] + draw_once(c[0]))
  return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, 0.0))[1]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_key_is_not_drawn_from_twice(transform):
  for twice in (
    lambda key: draw(key) + draw(key),
    lambda key: _while(lambda i: draw(key)),
  ):
    with pytest.raises(jax.errors.KeyReuseError):
      transform(twice)(jax.random.key(0))
